"""Versions of registered MLflow models: every run's best policy becomes one, and the gate decides
which version is champion.

Where it fits
    Above ``tracking``, whose store and runs it uses, and above ``training`` and ``evaluation``,
    which load and run the policies that it stores.

Why
    Metrics may arrive late; a promotion may not. Every failure of a write raises, and a retry ends
    in the same state as an undisturbed attempt.

How
    - ``promotion``: register, promote and roll back versions. ``lookup``: find them. ``download``:
      versions as files, compared with their digests before they are used. ``signing``: their
      signatures. ``trained_prompts``: whether a champion was trained on held-out prompts.
    - ``gate_policy``: what a model's candidates have to pass, pinned by its first promotion.
    - ``model_version``: what a version contains, and how it is created exactly once.
    - ``lock``: one promotion at a time.
    - ``looks``: the ledger of the gate's looks at the held-out prompts.
    - ``serving``: how MLflow loads a version. ``drawing``: pictures of one (``ebbflow draw``).
      ``model_folders``: policy and base model of whatever a command names.

Why a lock of our own
    Four ways for two promotions to exclude each other were tried, ten races each, two clients of
    one SQLite store (MLflow 3.17.2):

    - Read the alias, compare, set it: both got in, in 10 of 10 races.
    - Set a tag of the registered model with a token, read it back, compare: both in 1 of 10. The
      tag's last writer wins, and the first may have read its own token back before that. In
      another race the loser's write broke a constraint of the database.
    - A file lock beside the store (``storage.locks``): none, in .1 s. It needs a store that is a
      file on a disk of this machine. A cluster has an MLflow server, to which no file belongs, so
      this would be a second mechanism and not the only one.
    - ``lock``, which needs only that a write is seen by every later read: none, in .8 s.

    Creating a registered model with a unique name is atomic as well. The lock that a killed
    process leaves must then be deleted, and MLflow deletes without a condition: two attempts that
    see the leftover both get in. The lock is also listed in the registry as a model.

Gotchas
    - MLflow's client repeats a POST whose answer was lost: whoever creates a version or a logged
      model looks for its duplicate afterwards.
    - Moving an alias is no compare-and-swap, and ``latest`` is an alias that MLflow reserves.
    - ``register_model("runs:/…")`` refuses plain artifacts: a version needs a logged model.
    - ``ebbflow.registry.serving`` is the loader module that registered versions name. A version
      brings the sources of its Ebbflow along and is loaded with those.
"""

from ebbflow.extras import require

require("ebbflow.registry", "mlflow")
