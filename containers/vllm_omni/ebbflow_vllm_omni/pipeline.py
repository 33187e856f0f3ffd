"""vLLM-Omni's transformer under Ebbflow's adapters: the denoising loop, guidance, noise and
decoding are Ebbflow's own.

Prompts arrive encoded, so text encoders are not loaded. A request is a micro-batch: which samples
share a forward pass is decided by the trainer, as with the engine of its own process, and never by
when requests happen to arrive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from ebbflow.models.families import load_adapter
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.plugins import import_object
from ebbflow.rollouts.generate import generate_samples
from ebbflow.rollouts.wire import Task, pack_rollouts
from ebbflow_vllm_omni.networks import Network

PREFIX = "transformer."


@dataclass(frozen=True)
class Lora:
    """LoRA factors by the trainer's parameter names, float32."""

    tensors: Mapping[str, Tensor]
    rank: int
    alpha: int


class EbbflowPipeline(nn.Module):
    """The pipeline that the engine runs; ``custom_pipeline_args`` hold the recipe's ``model``."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        assert od_config.custom_pipeline_args is not None
        config = ModelConfig.model_validate(od_config.custom_pipeline_args["model"])
        base = od_config.model
        self.od_config = od_config
        self.network: Network = import_object(FAMILIES[config.family].vllm_omni)
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(base, "transformer", None, PREFIX)
        ]
        FolderScheduler = _find_scheduler_class(Path(base, "model_index.json"))
        self.scheduler = FolderScheduler.from_pretrained(
            base, subfolder="scheduler", local_files_only=True
        )
        options = {"local_files_only": True, "use_safetensors": True, "torch_dtype": torch.float32}
        self.vae = self.network.vae.from_pretrained(base, subfolder="vae", **options)
        for name, scale in self.network.scales(self.vae).items():
            setattr(self, name, scale)
        self.transformer = self.network.transformer(od_config)
        self.transformer.config = (
            od_config.tf_model_config
        )  # where diffusers' networks have it, and the adapters look
        self.adapter: Any = load_adapter(config.family)(self, config, get_local_device())
        self.lora: Lora | None = None

    def forward(self, batch: DiffusionRequestBatch) -> DiffusionOutput:
        """The rollouts of one task."""
        (request,) = batch.requests
        if request.is_dummy_run():  # there is nothing to warm up
            return DiffusionOutput(output={"payload": {"image": torch.zeros(1)}})
        task: Task = request.sampling_params.extra_args["task"]
        conditioning = task.conditioning.to(self.adapter.device)
        rollouts = generate_samples(
            self.adapter, conditioning, task.keys, task.sampler, task.plan, len(task.keys)
        )
        tensors = pack_rollouts(rollouts, self.adapter.decode_latents(rollouts.latents))
        return DiffusionOutput(
            output={"payload": {"image": tensors.pop("images")}, "metadata": {"rl": tensors}},
            to_cpu=True,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take over weights of the transformer by diffusers' names; returns the names of what they
        went into.
        """
        loaded = self.transformer.load_weights(
            (name.removeprefix(PREFIX), values) for name, values in weights
        )
        return {PREFIX + name for name in loaded}

    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """What vLLM-Omni asks before it looks for a file: the adapter that lies in memory."""
        assert self.lora is not None
        factors: dict[str, dict[str, Tensor]] = {}
        for name, values in self.lora.tensors.items():
            layer, factor = name.split(".lora_")
            factors.setdefault(PREFIX + self._rename_layer(layer), {})[factor[0]] = values.to(
                dtype, copy=True
            )
        rank = self.lora.rank
        alpha = self.lora.alpha
        layers = {
            name: LoRALayerWeights(name, rank, alpha, pair["A"], pair["B"])
            for name, pair in factors.items()
        }
        return LoRAModel(lora_request.lora_int_id, rank, layers), PEFTHelper(
            rank, alpha, list(layers)
        )

    def _rename_layer(self, layer: str) -> str:
        """A layer of diffusers' transformer as vLLM-Omni calls it."""
        for theirs, ours in self.network.renamed.items():
            if layer.endswith(theirs):
                return layer.removesuffix(theirs) + ours
        return layer


def _find_scheduler_class(index: Path) -> Any:
    """Return the class of the scheduler that a folder's index names, as families differ in it.

    Raises:
        ValueError: it is none of diffusers' schedulers. Other classes could read pickles.
    """
    name = json.loads(index.read_text())["scheduler"][1]
    scheduler_class = getattr(diffusers, name, None)
    if not (
        isinstance(scheduler_class, type) and issubclass(scheduler_class, diffusers.SchedulerMixin)
    ):
        raise ValueError(f"{index} names the scheduler {name!r}, which diffusers does not have")
    return scheduler_class
