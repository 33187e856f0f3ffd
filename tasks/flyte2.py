"""Flyte 2, through flyte-migrate: what it needs to know of the tasks. With flytekit alone, nothing
here changes anything.

flyte-migrate replaces flytekit's decorators before it loads a file, so that it is imported before
this module is.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from flytekit import Resources

# None with flytekit alone. Its modules are private: flyte-migrate has no public way to name a
# plugin.
PLUGINS = sys.modules.get("flyte_migrate._plugins")


def build_limits(requests: Resources) -> Resources:
    """Build limits that are the same as the requests. flyte-migrate takes a disk from one of the
    two, or makes a pair of it that Flyte 2 rejects.
    """
    return replace(requests, ephemeral_storage=None) if PLUGINS else requests


def register_elastic_translation() -> None:
    """Have flyte-migrate translate the training group's configuration: it goes by the name of its
    class, and knows one.
    """
    if PLUGINS:
        from tasks.elastic import EveryGpu, GracefulElastic  # imports Flyte's plugin

        for config in (GracefulElastic, EveryGpu):
            PLUGINS.register_plugin(config.__name__, PLUGINS._transform_pytorch_config_v1_to_v2)
