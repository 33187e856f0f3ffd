"""Typed Flyte tasks, one per file: fetch the inputs, call the library, hand over the outputs.

Heavy imports stay inside the bodies, so that registering needs no GPU stack.
"""

from __future__ import annotations

import fsspec
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import s3_setup_args

# The library opens URIs with fsspec and knows no Flyte: it finds the store that Flyte is configured for.
fsspec.config.conf.setdefault("s3", {}).update(s3_setup_args(DataConfig.auto().s3))
