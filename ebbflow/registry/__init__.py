"""Versions of registered MLflow models: every run's best policy becomes one, and the gate decides
which version is champion.

Where it fits
    Above ``tracking``, whose store and runs it uses, and above ``training`` and ``evaluation``,
    which load and run the policies that it stores.

Why
    Metrics may arrive late; a promotion may not. Every failure of a write raises, and a retry ends
    in the same state as an undisturbed attempt.

How
    - ``promotion``: register, promote, roll back, find and download versions.
    - ``model_version``: what a version contains, and how it is created exactly once.
    - ``lock``: one promotion at a time.
    - ``serving``: how MLflow loads a version. ``drawing``: pictures of one (``ebbflow draw``).

Gotchas
    - MLflow's client repeats a POST whose answer was lost: whoever creates a version or a logged
      model looks for its duplicate afterwards.
    - ``ebbflow.registry.serving`` is the loader module that registered versions name. A version
      brings the sources of its Ebbflow along and is loaded with those.
"""

from ebbflow.extras import require

require("ebbflow.registry", "mlflow")
