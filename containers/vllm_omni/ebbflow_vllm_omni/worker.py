"""New weights for the engine: methods that vLLM-Omni's worker gets, called through its
``collective_rpc``.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from ebbflow.rollouts.weights import compute_checksum, measure_adapters
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

    def take_lora(self, file: str, rank: int, alpha: int) -> dict[str, Any]:
        """Generate with this adapter from now on, instead of the one before; the answer also says
        how many layers have it, and the norm of their products.
        """
        tensors = load_file(file)
        self._pipeline.lora = Lora(tensors, rank, alpha)
        self.remove_lora(POLICY.lora_int_id)  # an id that is there already would be left as it is
        self.add_lora(POLICY)
        self.lora_manager.set_active_adapter(POLICY)
        self._pipeline.lora = None  # the engine has its own copy
        layers = self.lora_manager._lora_modules.values()
        pairs = [pair for layer in layers for pair in _list_adapters(layer)]
        size = measure_adapters(pairs)  # their scale is in the second factors
        return {"sha256": compute_checksum(tensors), "layers": size.layers, "norm": size.norm}

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


def _list_adapters(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """List the factors of the adapters of a layer; one of fused projections has several."""
    adapters: list[tuple[Tensor, Tensor]] = []
    for first, second, is_active in zip(
        layer.lora_a_stacked,
        layer.lora_b_stacked,
        layer._diffusion_lora_active_slices,
        strict=True,
    ):
        if not is_active:
            continue
        pair = (first[0, 0], second[0, 0])
        # The two halves of a gated projection share the first factor of its one adapter.
        if adapters and torch.equal(adapters[-1][0], pair[0]):
            pair = (pair[0], torch.cat([adapters.pop()[1], pair[1]]))
        adapters.append(pair)
    return adapters
