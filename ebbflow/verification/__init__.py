"""Whether a registered version is what the gate decided on (``ebbflow verify``).

Where it fits
    Above ``registry``, which stores the evidence with a version and downloads it.

How
    - ``evidence``: what the gate decided from, written when a version is registered.
    - ``version``: a downloaded version, its tags and the files of its evidence.
    - ``checks``: every digest, and the decision made again from the stored scores.
    - ``compared``: the champion that the gate compared with, found again. ``generation``: with
      ``--again``, both sides generated and scored again. ``comparison``: what differs then.

Gotchas
    - Digests are tags of the version and the files are its artifacts. A person who can change both
      consistently is not detected, unless versions are signed (``registry.signing``).
    - A version may name code. It is imported only with ``--again``, and only where the caller
      allows it.
"""
