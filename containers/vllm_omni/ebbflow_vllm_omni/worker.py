"""New weights for the engine: methods that vLLM-Omni's worker gets, called through its
``collective_rpc``.
"""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from ebbflow.rollouts.weights import compute_checksum
from ebbflow_vllm_omni.pipeline import PREFIX, EbbflowPipeline, Lora

POLICY = LoRARequest("policy", 1, "/in/memory")
"""The one adapter; its path is asked for and never read."""


class Weights(CustomPipelineWorkerExtension):
    """Both kinds come in safetensors files by the trainer's parameter names; the answer is the
    checksum of what was read.

    Full weights and LoRA exclude each other: LoRA layers hide the weights under them from
    ``load_weights``.
    """

    model_runner: Any
    lora_manager: Any
    remove_lora: Any
    add_lora: Any
    _elements: int = 0
    _loaded: set[str] = set()

    def take_lora(self, file: str, rank: int, alpha: int) -> str:
        """Generate with this adapter from now on, instead of the one before."""
        tensors = load_file(file)
        self._pipeline.lora = Lora(tensors, rank, alpha)
        self.remove_lora(POLICY.lora_int_id)  # an id that is there already would be left as it is
        self.add_lora(POLICY)
        self.lora_manager.set_active_adapter(POLICY)
        self._pipeline.lora = None  # the engine has its own copy
        return compute_checksum(tensors)

    def take_weights(self, file: str, last: bool) -> str:
        """Overwrite some parameters; with the last of them, check that none was left out.

        Raises:
            ValueError: some were.
        """
        tensors = load_file(file)
        self._loaded = self._loaded | self._pipeline.load_weights(
            (PREFIX + name, values) for name, values in tensors.items()
        )
        self._elements += sum(values.numel() for values in tensors.values())
        if last:
            self._check_all_loaded()
        return compute_checksum(tensors)

    def _check_all_loaded(self) -> None:
        parameters: dict[str, Tensor] = dict(self._pipeline.transformer.named_parameters())
        missing = [name for name in parameters if PREFIX + name not in self._loaded]
        wanted = sum(values.numel() for values in parameters.values())
        got = self._elements
        self._loaded = set()
        self._elements = 0
        if (
            missing or wanted != got
        ):  # fused layers would hide a part that was not sent; the count does not
            raise ValueError(
                f"{got} of {wanted} elements were sent, and nothing for"
                f" {missing[:3] or 'no parameter'}"
            )

    @property
    def _pipeline(self) -> EbbflowPipeline:
        return self.model_runner.pipeline
