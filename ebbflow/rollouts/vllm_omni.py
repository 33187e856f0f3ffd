"""vLLM-Omni as a rollout engine: a process in an environment of its own, whose pins differ from the
trainer's.

``containers/vllm_omni`` is its side. Prompts go there encoded and noise as keys; the denoising loop
that runs there is ``ebbflow.rollouts.generate`` too. What can still differ is the network, and
``ebbflow.rollouts.parity`` measures that.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.rollouts.weights import (
    AdaptersSize,
    compute_checksum,
    measure_adapters,
    split_into_buckets,
)
from ebbflow.rollouts.wire import (
    Header,
    Task,
    Tensors,
    receive_message,
    send_message,
    unpack_rollouts,
)
from ebbflow.stage import StageContext

logger = logging.getLogger(__name__)
VARIABLE = "EBBFLOW_VLLM_OMNI_PYTHON"
PYTHON = "/opt/vllm-omni/bin/python"
SOURCE_TREE = Path(__file__).parents[2]
ENGINE_SIDE = SOURCE_TREE / "containers" / "vllm_omni"
"""In a clone, an image or an upload of sources; an installed package has none."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""The base model is a folder, no telemetry says what is generated, and a line per request would
fill the disk.
"""
GROUP = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What torchrun tells the trainer of its process group; the engine makes one of its own."""
LOG_TAIL = 4000
"""Characters of the engine's log that an error shows."""
SECONDS_TO_END = 10
SOCKET_BYTES = 2**23
"""Sent before the other side has to read: with the usual fifth of a megabyte both processes take
turns thousands of times in a message.
"""
ADAPTER_ROUNDING = 0.01
"""Of the norm of adapters that the engine holds in 16 bits."""
MEMORY = Path("/dev/shm")


class EngineError(RuntimeError):
    """The engine cannot be started, has failed or has ended: names the call, with the engine's last
    lines or how to fix it.
    """


class VllmOmni:
    """``ebbflow.rollouts.engine.Engine`` in a process that ends with this one.

    After an error it is closed, because what vLLM-Omni then holds is not known: open a new one and
    load the weights again.

    Args:
        base: the base-model folder.

    Raises:
        EngineError: the engine's environment is missing, or it does not start.
    """

    def __init__(self, ctx: StageContext, base: Path) -> None:
        recipe = ctx.recipe
        self.policy = recipe.policy
        self.micro_batch = ctx.config.micro_batch
        # Open for as long as the engine's process writes into it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, self._process = _start_process(_find_interpreter(), self._log)
        # A finalizer also runs when this process exits, so no engine is left on the GPU.
        self._end = weakref.finalize(self, _end_process, self._socket, self._process)
        precision = ctx.config.rollout_precision or recipe.model.precision
        model = recipe.model.model_copy(update={"precision": precision}).model_dump(mode="json")
        # The engine's process does not read the recipe: it gets what changes its arithmetic, and no
        # more.
        process = {"threads": recipe.threads, "deterministic": recipe.deterministic}
        answer, _ = self._call_engine(
            "open", {"base": str(base.absolute()), "model": model, **process}
        )
        versions: dict[str, str] = answer.get("versions", {})
        self.versions = {f"engine's {name}": value for name, value in versions.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As ``Engine.load``: LoRA into memory beside the base model, full weights over it.

        Raises:
            EngineError: vLLM-Omni has refused them, or what it has read is not what was sent.
        """
        try:
            # An adapter is small and goes in one file; full weights go in buckets, so that the file
            # that hands them over never holds the whole model a second time.
            if self.policy.train == "lora":
                answer = self._push_weights(
                    "load_lora", weights, {"rank": self.policy.rank, "alpha": self.policy.alpha}
                )
                self._require_all_layers(weights, answer)
                return
            buckets = list(split_into_buckets(weights))
            for number, bucket in enumerate(buckets, 1):
                self._push_weights("load_weights", bucket, {"last": number == len(buckets)})
        # With half of the weights nothing may be generated, whatever interrupted the other half.
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
    ) -> tuple[Rollouts, np.ndarray]:
        """As ``Engine.generate``; the rollouts lie on the device of ``conditioning``.

        Raises:
            EngineError: the engine has failed, or had before.
        """
        parts: list[Rollouts] = []
        images: list[np.ndarray] = []
        # Micro-batches as the reference splits them: their size can change the last bits.
        for rows in split_into_equal_passes(len(keys), self.micro_batch):
            task = Task(conditioning.select_rows(rows), keys.select_samples(rows), sampler, plan)
            _, tensors = self._call_engine("generate", *task.pack_message())
            part, part_images = unpack_rollouts(tensors)
            parts.append(part)
            images.append(part_images)
        rollouts = join_rollouts(parts)
        return rollouts.move_to(conditioning.device), np.concatenate(images)

    def close(self) -> None:
        """End the engine's process; it has ended when this returns."""
        self._end()

    def _require_all_layers(self, weights: Mapping[str, Tensor], answer: Header) -> None:
        """Check that the engine's layers add what the policy's adapters do.

        Raises:
            EngineError: it has adapted other layers, or with another scale.
        """
        pairs = [
            (values, weights[name.replace("lora_A", "lora_B")])
            for name, values in weights.items()
            if "lora_A" in name
        ]
        sent = measure_adapters(pairs, self.policy.adapter_scale)
        applied = AdaptersSize(answer["layers"], answer["norm"])
        if applied.layers != sent.layers or not math.isclose(
            applied.norm, sent.norm, rel_tol=ADAPTER_ROUNDING, abs_tol=1e-12
        ):
            raise EngineError(
                f"load_lora: the engine adapts {applied.layers} layers by a product of norm"
                f" {applied.norm:.4g}, the policy {sent.layers} by one of {sent.norm:.4g}: it would"
                " generate with other weights. Compare the names of its layers with"
                " policy.layers, and its scale with policy.alpha; or set engine: diffusers"
            )

    def _push_weights(self, call: str, weights: Mapping[str, Tensor], header: Header) -> Header:
        """Hand weights over in a file, and check what was read; return the engine's answer."""
        with tempfile.NamedTemporaryFile(
            dir=_choose_exchange_folder(weights), suffix=".safetensors"
        ) as file:
            save_file(dict(weights), file.name)
            # The file exists only during the call: the engine has read it when it answers.
            answer, _ = self._call_engine(call, header | {"file": file.name})
        arrived = answer["sha256"]
        sent = compute_checksum(weights)
        if arrived != sent:
            raise EngineError(
                f"{call}: the engine has read weights with checksum {arrived[:12]}, those of the"
                f" policy have {sent[:12]}; nothing is generated with them. Look at what else"
                f" writes to {_choose_exchange_folder(weights)}, and at the machine's memory"
            )
        return answer

    def _call_engine(
        self, call: str, header: Header, tensors: Tensors | None = None
    ) -> tuple[Header, dict[str, Tensor]]:
        if not self._end.alive:
            raise EngineError(
                f"{call}: the engine was closed, after an error or by its owner; open a new one,"
                " and load its weights"
            )
        try:
            send_message(self._socket, header | {"call": call}, tensors)
            answer, received = receive_message(self._socket)
        except (EOFError, OSError):
            self.close()
            answer = {"error": f"its process has ended with exit code {self._process.returncode}"}
            received = {}
        except BaseException:
            # An interrupted call leaves its answer behind; the next call would take it for its own.
            self.close()
            raise
        if "error" not in answer:
            return answer, received
        self.close()
        raise EngineError(
            f"{call}: vLLM-Omni has failed: {answer['error']}\nThe last lines of its"
            f" log:\n{_read_log_tail(self._log)}"
        )


def _find_interpreter() -> str:
    """The Python of the engine's environment.

    Raises:
        EngineError: there is none.
    """
    python = os.environ.get(VARIABLE, PYTHON)
    if not os.access(python, os.X_OK):
        raise EngineError(
            f"{VARIABLE} = {python!r}: there is no Python of an environment with vLLM-Omni. Make"
            " one as containers/README.md says and set the variable to its bin/python; or set"
            " engine: diffusers"
        )
    return python


def _start_process(python: str, log: IO[bytes]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The engine's process and the connection to it."""
    # A pair without an address: no other process can connect, and no port can be taken.
    ours, theirs = socket.socketpair()
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    with theirs:
        end = theirs.fileno()
        command = [python, "-m", "ebbflow_vllm_omni", str(end), str(os.getpid())]
        environment = QUIET | {
            name: value for name, value in os.environ.items() if name not in GROUP
        }
        # Sources that were uploaded come before those in the engine's environment, and after what
        # a user put there.
        if ENGINE_SIDE.is_dir():
            paths = [environment.get("PYTHONPATH", ""), str(SOURCE_TREE), str(ENGINE_SIDE)]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        logger.info("starting the process of vLLM-Omni, which takes a minute")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[end],
            env=environment,
        )
    return ours, process


def _end_process(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    # The engine reads the end of its connection as the order to end.
    connection.close()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _choose_exchange_folder(weights: Mapping[str, Tensor]) -> Path:
    """Where to hand weights over: in memory, if there is room."""
    size = sum(values.nbytes for values in weights.values())
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size
    return MEMORY if fits else Path(tempfile.gettempdir())


def _read_log_tail(log: IO[bytes]) -> str:
    """The last lines of a file that another process still writes through the same file position."""
    size = os.fstat(log.fileno()).st_size
    return (
        os.pread(log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()
    )
