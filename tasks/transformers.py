"""How Pydantic models become Flyte's types and literals.

Flytekit's own transformer puts the JSON schema of a model and the types of its fields into every
interface that takes the model, and every default of a recipe into every node that takes the recipe.
Flyte's engine refuses to start a workflow whose closure has more than `storage.limits.
maxDownloadMBs` (2 MB by default), and gRPC's 4 MB are the limit of its console and of flytectl.
With flytekit's transformer the type of ``Recipe`` has 424,015 bytes, and the closure of
``post_train`` 4.6 MB.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
from flytekit import FlyteContext
from flytekit.core.constants import CACHE_KEY_METADATA, MESSAGEPACK, SERIALIZATION_FORMAT
from flytekit.core.type_engine import TypeEngine
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.annotation import TypeAnnotation
from flytekit.models.literals import Binary, Literal, Scalar
from flytekit.models.types import LiteralType, SimpleType
from pydantic import BaseModel

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.digest import select_set_keys


class SchemaFreeTransformer(PydanticTransformer):
    """Describes a model as a structure, without its JSON schema and the types of its fields.

    Nothing reads them: flytekit knows the Python types, and the console asks for JSON.
    """

    def get_literal_type(self, t: type[BaseModel]) -> LiteralType:
        # As in flytekit's own: the annotation tells the engine how values are encoded, and is part
        # of the cache's key. The object is new each time, because flytekit writes into the type of
        # a union's variant.
        return LiteralType(
            simple=SimpleType.STRUCT,
            annotation=TypeAnnotation({CACHE_KEY_METADATA: {SERIALIZATION_FORMAT: MESSAGEPACK}}),
        )


class RecipeTransformer(SchemaFreeTransformer):
    """Sends a recipe as the keys that are set.

    A dynamic workflow binds the recipe to each of its nodes by value: with all defaults, a round of
    eight branches is a futures file of 400 KB.
    """

    def to_literal(
        self,
        ctx: FlyteContext,
        python_val: Recipe,
        python_type: type[BaseModel],
        expected: LiteralType,
    ) -> Literal:
        set_keys = select_set_keys(python_val)
        if not _gives_same_recipe(set_keys, python_val):
            return super().to_literal(ctx, python_val, python_type, expected)
        return Literal(scalar=Scalar(binary=Binary(value=msgpack.dumps(set_keys), tag=MESSAGEPACK)))


def write_recipe_text(recipe: Recipe) -> str:
    """Write a recipe as text of one line, as short as it can be."""
    set_keys = select_set_keys(recipe)
    if not _gives_same_recipe(set_keys, recipe):
        set_keys = recipe.model_dump(mode="json")
    return json.dumps(set_keys)


def _gives_same_recipe(set_keys: dict[str, Any], recipe: Recipe) -> bool:
    """Return whether the receiver would read the same recipe from the keys that are set.

    A key that a user sets to its field's default is not among them. The receiver would resolve it
    to the algorithm's default where that is another one, or miss a key that another one needs, as
    ``prompts.held_out_source`` needs ``prompts.held_out``.
    """
    try:
        return Recipe.model_validate(set_keys) == recipe
    except (RecipeError, ValueError):
        return False


def register_transformers() -> None:
    """Let flytekit use these transformers in this process."""
    TypeEngine.register_additional_type(SchemaFreeTransformer(), BaseModel, override=True)
    TypeEngine.register_additional_type(RecipeTransformer(), Recipe, override=True)
