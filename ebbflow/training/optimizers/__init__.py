"""Optimisers, a file each: ``ebbflow.recipe.optimizers`` finds them by their names.

Reading a recipe imports these files, so torch is imported inside their functions.
"""

import ebbflow.recipe  # noqa: F401  first: it imports these files, which need its base class
