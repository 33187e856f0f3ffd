"""The pipeline: which task runs after which, and how it is launched.

Where it fits
    On top of ``tasks``. It imports no tensor library and is what users register and run.

Why
    Post-training alternates stages: large offline ones for breadth, online ones for refinement. The
    recipe decides which stages, how often and when to stop, so the graph is built at run time.

How
    - ``post_training``: ``post_train`` (the pipeline) and ``dry_run`` (its cost). ``train_rounds``
      is a recursive dynamic: one round, then itself, until the stop rule ends it.
    - ``launch_plans``: the nightly and the manual one, both with a person's approval.
    - ``recipes/``: the recipes that are shipped.

Gotchas
    - Only the inputs of a dynamic have values; inside a ``@workflow`` everything is a promise.
    - Names of workflows, tasks and launch plans are public: renaming one loses its history.
    - ``post_train`` has no default recipe: the published learning rates would hardly train the
      glyph model. A schedule needs a value for every input, or it fails silently, so its launch
      plan fixes the recipe.
"""

from workflows.recipe_option import read_recipes_strictly

read_recipes_strictly()
