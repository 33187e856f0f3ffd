"""vLLM-Omni as a rollout engine: a process in an environment of its own, whose pins differ from the trainer's.

``containers/vllm_omni`` is its side. Prompts go there encoded and noise as keys; the denoising loop that runs there is
``ebbflow.rollouts.generate`` too. Everything else that could differ is what ``ebbflow.rollouts.parity`` measures.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.flow.windows import Plan
from ebbflow.models.base import Conditioning
from ebbflow.online.weights import checksum, in_buckets
from ebbflow.recipe.choices import Sampler
from ebbflow.rollouts.generate import Rollouts, SampleKeys, join
from ebbflow.rollouts.wire import Header, Task, Tensors, receive, send, unpack_rollouts
from ebbflow.stage import Place

VARIABLE = "EBBFLOW_VLLM_OMNI_PYTHON"
PYTHON = "/opt/vllm-omni/bin/python"
FAMILIES = ("sd3", "qwen_image")
LOG_LINES = 30
SECONDS_TO_END = 10
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""The base model is a folder, and nobody is told what is generated."""


class EngineError(RuntimeError):
    """The engine cannot be started, has failed or has ended: says which call, and the engine's last lines or the way out."""


class VllmOmni:
    """``ebbflow.rollouts.engine.Engine`` in a process that ends with this one.

    After an error it is closed: what state vLLM-Omni is in is not known then. Open a new one and load the weights again.

    Args:
        base: the base-model folder.

    Raises:
        EngineError: the engine's environment is missing, the family is not one that it draws, or it does not start.
    """

    def __init__(self, place: Place, base: Path) -> None:
        recipe = place.recipe
        if recipe.model.family not in FAMILIES:
            raise EngineError(
                f"model.family = {recipe.model.family!r}: the engine vllm_omni draws {', '.join(FAMILIES)}; set engine: diffusers"
            )
        self.policy, self.micro_batch = recipe.policy, place.config.micro_batch
        self._connection, self._log = _start(_interpreter())
        precision = place.config.rollout_precision or recipe.model.precision
        model = recipe.model.model_copy(update={"precision": precision}).model_dump(mode="json")
        self._call("open", {"base": str(base.absolute()), "model": model, "threads": recipe.threads})

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As ``Engine.load``: LoRA factors in memory, full weights by diffusers' names.

        Raises:
            EngineError: vLLM-Omni has refused them, or what it has read is not what was sent.
        """
        if self.policy.train == "lora":
            self._push("load_lora", weights, {"rank": self.policy.rank, "alpha": self.policy.alpha})
            return
        buckets = list(in_buckets(weights))
        for number, bucket in enumerate(buckets, 1):
            self._push("load_weights", bucket, {"last": number == len(buckets)})

    def _push(self, call: str, weights: Mapping[str, Tensor], header: Header) -> None:
        with tempfile.NamedTemporaryFile(dir=_exchange(weights), suffix=".safetensors") as file:
            save_file(dict(weights), file.name)
            answer, _ = self._call(call, {"file": file.name, **header})
        if answer["sha256"] != (sent := checksum(weights)):
            self.close()
            raise EngineError(
                f"the engine has read weights with checksum {answer['sha256'][:12]} and was sent {sent[:12]}: nothing is generated "
                "with them; look at the machine's memory and at who else writes to its temporary folders"
            )

    def generate(
        self, conditioning: Conditioning, keys: SampleKeys, sampler: Sampler, plan: Plan | None = None
    ) -> tuple[Rollouts, np.ndarray]:
        """As ``Engine.generate``; the rollouts lie on the device of ``conditioning``."""
        parts = [slice(start, start + self.micro_batch) for start in range(0, len(keys), self.micro_batch)]
        found = [self._generate(Task(conditioning.rows(part), keys.rows(part), sampler, plan)) for part in parts]
        rollouts = join([rollouts for rollouts, _ in found])
        return rollouts.to(conditioning.device), np.concatenate([images for _, images in found])

    def _generate(self, task: Task) -> tuple[Rollouts, np.ndarray]:
        _, tensors = self._call("generate", *task.pack())
        return unpack_rollouts(tensors)

    def close(self) -> None:
        """End the engine's process; it has ended when this returns."""
        self._connection.close()

    def _call(self, call: str, header: Header, tensors: Tensors | None = None) -> tuple[Header, dict[str, Tensor]]:
        connection = self._connection.socket
        if connection.fileno() < 0:
            raise EngineError(f"the engine was closed, or has failed before; {call} needs a new one, and its weights loaded again")
        try:
            send(connection, header | {"call": call}, tensors)
            answer, found = receive(connection)
        except (EOFError, OSError):
            self.close()
            code = self._process.returncode
            raise EngineError(f"the engine ended with exit code {code} during {call}. Its last lines:\n{self._last_lines()}") from None
        if "error" in answer:
            lines = self._last_lines()
            self.close()
            raise EngineError(f"the engine could not {call}: {answer['error']}. Its last lines:\n{lines}")
        return answer, found
