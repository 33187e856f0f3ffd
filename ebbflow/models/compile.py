"""Compiled networks: the same predictions in fewer kernels."""

from __future__ import annotations

import logging
import os
import shutil

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ebbflow.models.base import Model, ModelError
from ebbflow.storage.user_cache import find_user_cache

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable: where compiled kernels are kept, Triton's too."""
logger = logging.getLogger(__name__)


def compile_blocks(model: Model) -> None:
    """Have torch compile each block of the network when it is first called; the blocks are alike
    and share their graphs.

    Rollouts and training get graphs of their own, without and with gradient, of the same
    operations.

    Raises:
        ModelError: there is no C++ compiler, which torch needs on every device.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ModelError(
            f"model.compile = 'blocks': torch.compile needs a C++ compiler, and {compiler!r} is not"
            " on the PATH; install g++ or set CXX, or leave model.compile out"
        )
    configure_compiler()
    keep_compiled_kernels()
    # Static shapes: kernels for any number of rows would add in another order than those for one.
    for block in model.list_blocks():
        block.compile(dynamic=False)


def keep_compiled_kernels() -> None:
    """Keep compiled kernels among the caches of the user, unless ``TORCHINDUCTOR_CACHE_DIR`` names
    another folder.

    torch keeps them in the folder of temporary files, and a machine that starts again would
    compile everything again.
    """
    # torch sets the variable to its default when it is imported.
    if os.environ.get(CACHE) in (None, default_cache_dir()):
        folder = find_user_cache("compiled")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[CACHE] = str(folder)
        except OSError as error:  # the process compiles anew, and does not fail
            os.environ[CACHE] = default_cache_dir()
            logger.warning("%s cannot be made: %s", folder, error)
    logger.info("compiled kernels are kept in %s (%s)", os.environ[CACHE], CACHE)


def configure_compiler() -> None:
    """Have graphs with and without gradient compute the same bytes, in this process and in every
    other one.
    """
    # Rows, gradient, autocast and adapters make different graphs of the same code; past the limit
    # it would run uncompiled, and rollouts would no longer agree with training.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # A fused graph would not round between its operations, and what is fused depends on the
    # gradient.
    torch._inductor.config.emulate_precision_casts = True
    # On a GPU inductor times several kernels of a reduction and takes the fastest, for each graph
    # by itself: the sums of a rollout would be in another order than those of training, and those
    # of one pod in another than those of the next. Without timing it takes the same every time.
    torch._inductor.config.deterministic = True
