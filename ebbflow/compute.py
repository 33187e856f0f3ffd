"""How a process computes: torch's threads, the GPU that its machine was asked for, and, where the
recipe says ``deterministic``, kernels that repeat their bytes.

Every process that computes calls ``set_up_process`` before CUDA starts there: pods, ranks of a
training group, and Ray actors. The process of vLLM-Omni, which an actor starts, sets its kernels
alone. What is set holds for the process from then on.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.recipe import Recipe

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GPUS = "EBBFLOW_GPUS"
"""Environment variable: the GPUs that the deployment asked for, in pods that have some. Set it to 1
on a machine of your own to be told when a run would train on its CPU.
"""
SMALLEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""NVIDIA's smallest Linux driver for each major version of CUDA ("Minor Version Compatibility" in
the release notes of the CUDA Toolkit).
"""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Where the kernel module says its version, also inside containers."""
DRIVER_SIGNS = (DRIVER_FILE, Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of them exists where a driver is loaded: a container with a ``/proc`` of its own may show the
device alone, and Windows' Linux has the third.
"""
PROCESSES = "EBBFLOW_TRAIN_PROCESSES"
"""Environment variable: the training processes of a node (tasks/deployment.py)."""


class GpuError(RuntimeError):
    """A process that was given a GPU sees none: names the reason, as far as it can be told."""


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
        GpuError: as ``require_requested_gpus``.
    """
    if recipe.deterministic:
        use_deterministic_kernels()
    import torch

    torch.set_num_threads(recipe.threads)
    require_requested_gpus()


def require_requested_gpus() -> None:
    """Check that torch sees a GPU where ``EBBFLOW_GPUS`` asks for some.

    Raises:
        GpuError: as ``require_gpu``, or the variable is not a number.
    """
    requested = os.environ.get(GPUS) or "0"
    if not requested.isdecimal():
        raise GpuError(f"{GPUS}={requested} is not a number; give the number of GPUs, or unset it")
    # Only where it is asked for: the question starts CUDA's driver, after which a Ray actor without
    # a GPU could no longer hide those of its machine.
    if int(requested):
        require_gpu(f"{GPUS}={requested}, which the deployment's 'gpus' sets in its pods,")


def require_gpu(place: str) -> None:
    """Check that torch sees a GPU. Without one, models are loaded onto the CPU, and all that shows
    it is that the run is slow.

    Args:
        place: what asked for it, and its value.

    Raises:
        GpuError: it sees none.
    """
    import torch

    if torch.cuda.is_available():
        return
    cuda = torch.version.cuda
    if cuda is None:
        reason = (
            f"torch {torch.__version__} is a build without CUDA; install the one from PyPI, or use"
            " the image of containers/trainer.Dockerfile"
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        reason = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU; unset it"
    else:
        smallest = SMALLEST_DRIVER.get(int(cuda.partition(".")[0]), "a newer one")
        reason = (
            f"the driver is {read_driver_version() or 'not there'}, and torch"
            f" {torch.__version__} with CUDA {cuda} needs {smallest} or newer; update the node's"
            " driver, or give the pod's container a GPU (NVIDIA's container toolkit or device"
            " plugin)"
        )
    raise GpuError(
        f"{place} asks for a GPU, and torch sees none: {reason}. To train on the CPU, set 'gpus' to"
        f" 0 or unset {GPUS}"
    )


def count_gpus() -> int:
    """Count the GPUs that a process of this machine may use."""
    # The import of torch takes seconds, which a command on a machine without a driver is spared.
    if not any(path.exists() for path in DRIVER_SIGNS):
        return 0
    import torch

    return torch.cuda.device_count()


def count_local_processes() -> int:
    """Count the training processes of a run on this machine where neither ``train_processes`` nor
    its variable is set: one for each GPU, and 2 without one.
    """
    return count_gpus() or 2


def choose_rank_gpu(local_rank: int) -> torch.device | None:
    """Choose the GPU of a rank of a training group, and make it this process's; None without CUDA.

    Args:
        local_rank: its number among the ranks of its machine.

    Raises:
        GpuError: the machine has fewer GPUs than ranks. NCCL would say "Duplicate GPU", or CUDA
            "invalid device ordinal", and neither says what to change.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise GpuError(
            f"rank {local_rank} of this machine has no GPU of its own: torch sees {num_gpus}; set"
            f" {PROCESSES}={num_gpus}, or train_processes in the deployment (times train_nodes"
            " where one machine runs all nodes), or CUDA_VISIBLE_DEVICES='' to train on CPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def read_driver_version() -> str | None:
    """Read the version of NVIDIA's driver; None where there is none."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return None
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ..."
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return version[1] if version else None


@cache
def log_device() -> Mapping[str, str]:
    """Log once what this process computes on, and return it as tags of its MLflow run.

    Call it when the process has chosen its GPU, because it starts CUDA there.

    Example:
        ``{"ebbflow.device": "NVIDIA H100 80GB HBM3", "ebbflow.driver": "580.95.05",
        "ebbflow.cuda": "13.0", "ebbflow.cudnn": "91300", "ebbflow.torch": "2.13.0+cu130"}``, and on
        a CPU ``{"ebbflow.device": "cpu", "ebbflow.torch": "2.13.0+cpu"}``
    """
    import torch

    device = {"device": "cpu"}
    if torch.cuda.is_available():
        device = {
            "device": torch.cuda.get_device_name(),
            "driver": read_driver_version() or "unknown",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    device["torch"] = torch.__version__
    logger.info("computing on %s", ", ".join(f"{name} {value}" for name, value in device.items()))
    return {f"ebbflow.{name}": value for name, value in device.items()}


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
