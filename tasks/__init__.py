"""Typed Flyte tasks, one per file: fetch the inputs, call the library, hand over the outputs.

Heavy imports stay inside the bodies, so that registering needs no GPU stack.
"""

from __future__ import annotations

import copy
import functools

import fsspec
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import s3_setup_args
from flytekit.core.type_engine import TypeEngine
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.types import LiteralType
from pydantic import BaseModel

# The library opens URIs with fsspec and knows no Flyte: it finds the store that Flyte is configured for.
fsspec.config.conf.setdefault("s3", {}).update(s3_setup_args(DataConfig.auto().s3))


class _DescribedOnce(PydanticTransformer):
    """Flytekit describes a type and all within it anew for each task that takes it, which for recipes took half of the time to
    load the workflows."""

    _described = functools.cache(PydanticTransformer.get_literal_type)

    def get_literal_type(self, t: type[BaseModel]) -> LiteralType:
        return copy.copy(self._described(t))  # flytekit writes into what it gets where the type is one of a union


TypeEngine.register_additional_type(_DescribedOnce(), BaseModel, override=True)
