"""The commands of ``ebbflow``, a module for each group of them.

Where it fits
    Below ``cli``, which collects the commands and handles what they have in common: logging and
    errors about missing extras.

Why
    A command needs few of the library's packages. ``ebbflow keys`` works where only the core is
    installed, and ``ebbflow --help`` answers at once.

How
    - ``recipes``: check, keys, list, defaults. ``costs``: estimate, plan. ``runs``: run, runs,
      compare, replay, ui. ``cluster``: submit, reconcile. ``policies``: evaluate, export, draw,
      verify, rollback. ``gate_policy``: gate-policy. ``signing``: make-key, sign, adopt.
      ``certify``: certify, check-certificate.
      ``servers``: serve-reward, label. ``projects``: init.
    - ``options``: options that several commands have. ``loading``: imports of heavy packages.

Gotchas
    - A module here imports click and the recipe at its top, and everything else in the bodies of
      its commands: all modules are loaded for ``ebbflow --help``.
    - A command prints the errors that explain themselves and exits with status 1. Any other error
      keeps its traceback.
"""
