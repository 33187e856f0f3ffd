"""Two policies, or two runs, side by side: ``ebbflow evaluate`` and ``ebbflow compare``.

Where it fits
    Above ``registry``, where policies come from, ``evaluation``, whose gate compares them,
    ``report``, whose pictures and charts its pages show, and ``run_list``.

Why
    A run compares its candidate with one champion. People ask about other pairs: two versions, a
    colleague's policy, the base model, last week's run with another learning rate.

How
    - ``policies``: evaluates both on the held-out prompts of a recipe, scores them together and
      applies the rules of the gate. ``policy_page``: their page and table.
    - ``runs``: what two runs in local folders did. ``run_page``: their page.

Gotchas
    - Nothing here is a look of the gate: its noise is another one, and no error budget is spent.
    - Held-out prompts stay unseen only as long as nobody chooses policies by them: who compares
      many candidates here should ask the gate about the last one with other prompts.
"""

from ebbflow.extras import require

require("ebbflow.comparison", "matplotlib", "mlflow", "pandas")
