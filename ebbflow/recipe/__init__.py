"""The recipe: pydantic models of one run, read from one YAML file.

Where it fits
    The lowest room. Every other room reads its part of the recipe (``ModelConfig``,
    ``SamplerConfig``, ...). The resolved recipe and its sha256 are logged with the run.

Why
    A run that costs GPU hours must fail before it starts: unknown keys, values out of range and
    invalid combinations are errors that name the key, the value and the fix. Reading a recipe needs
    no GPU stack, so tasks and workflows import this room freely.

How
    - ``recipe`` is the root, and ``recipe_file`` reads it; ``prompts``, ``model``, ``policy``,
      ``evaluation`` and ``promotion`` are its parts; ``stages`` the kinds of stages, ``choices``
      what a stage chooses besides its algorithm.
    - ``registry`` finds the algorithms and rewards by their folders: each file there defines its
      own configuration class.
    - ``plugins`` resolves names and a user's ``package.module:Name``; ``base`` explains errors and
      refuses secrets, which ``secrets`` recognises.

Gotchas
    - Nothing here may import torch, numpy or pandas, and neither may the files that ``registry``
      imports (tests/test_house.py).
    - ``registry`` imports files of higher rooms by the names of their folders. Rooms that have such
      files therefore import ``ebbflow.recipe`` first, in their ``__init__``.
    - Defaults depend on the algorithm: ``stage_defaults`` of its class fill in what a stage leaves
      out.
"""

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe import Recipe
from ebbflow.recipe.recipe_file import load_recipe

__all__ = ["Recipe", "RecipeError", "load_recipe"]
