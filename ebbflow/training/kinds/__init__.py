"""Kinds of algorithms, a file each: what the rows of a loss are made of.

A kind is one object. Recipes ask it whether a stage suits it, estimates what its rows cost, and the
training worker has it build them (``ebbflow.recipe.kinds.AlgorithmKind`` and
``base.TrainableKind``). ``ebbflow.recipe.kinds`` finds the objects in these files by their names,
and a user's own by its path: no list has to follow.

Reading a recipe imports these files, so torch and numpy are imported inside their functions.
"""

import ebbflow.recipe  # noqa: F401  first: it reads these files, which need its base class
