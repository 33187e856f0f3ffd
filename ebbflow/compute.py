"""How a process computes: torch's threads, and, where the recipe says ``deterministic``, kernels
that repeat their bytes.

Every process that computes calls ``set_up_process`` before CUDA starts there: pods, ranks of a
training group, Ray actors, and the process of vLLM-Omni. What it sets holds for the process from
then on.
"""

from __future__ import annotations

import os

from ebbflow.recipe import Recipe

VARIABLES = {
    # Without a fixed workspace, cuBLAS may add in another order from call to call (its "Results
    # reproducibility").
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses an algorithm and a protocol by size and topology, and each adds in another order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""What CUDA's libraries read once, when they start."""


def set_up_process(recipe: Recipe) -> None:
    """Give torch its threads, and deterministic kernels where the recipe asks for them.

    Raises:
        RuntimeError: as ``use_deterministic_kernels``.
    """
    if recipe.deterministic:
        use_deterministic_kernels()
    import torch

    torch.set_num_threads(recipe.threads)


def use_deterministic_kernels() -> None:
    """Have torch, cuBLAS, cuDNN and NCCL use kernels that give the same bytes every time; from now
    on an operation without such a kernel raises a RuntimeError that names it.

    Raises:
        RuntimeError: CUDA has started without the variables of its libraries; they would have no
            effect.
    """
    late = [name for name, value in VARIABLES.items() if os.environ.get(name) != value]
    os.environ.update(VARIABLES)
    import torch

    if late and torch.cuda.is_initialized():
        raise RuntimeError(
            "deterministic: CUDA has started in this process without"
            f" {late[0]}={VARIABLES[late[0]]}; set it in the environment before the process starts,"
            " or call nothing on a GPU before the stage"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose a kernel by its time
