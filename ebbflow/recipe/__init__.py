"""Recipes: pydantic models of everything a run can be told. Imports nothing heavy."""

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe import Recipe, load_recipe

__all__ = ["Recipe", "RecipeError", "load_recipe"]
