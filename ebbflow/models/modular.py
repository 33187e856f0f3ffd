"""Families that diffusers has as modular pipelines alone: their blocks, run one after another
around our own loop.

A modular pipeline is a list of blocks that pass values on in a ``PipelineState``. An adapter runs
those that encode a prompt, set the timesteps, prepare the network's inputs and decode; the loop of
the denoising block, its guider and its scheduler's step are ours.
"""

from __future__ import annotations

import inspect
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ModelMixin, SequentialPipelineBlocks
from diffusers.modular_pipelines import PipelineState
from torch import Tensor
from transformers import PreTrainedModel

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Tokens
from ebbflow.models.pipeline import SHARD, PipelineModel
from ebbflow.recipe.base_folder import MODULAR_INDEX

NETWORK_INPUTS = "denoiser_input_fields"
"""How diffusers marks the values that are inputs of the network in each step."""


class ModularModel(PipelineModel):
    """Adapter of a modular pipeline; a family names its blocks and calls the network.

    A sample is what the pipeline takes as ``latents``: [channels, rows, columns] of the tokens.

    Attributes:
        blocks_class: the pipeline's blocks.
        workflow: which of their workflows.
        skipped_blocks: blocks of it that are not run, nor their parts loaded.
        encoding_blocks: they encode a prompt.
        schedule_blocks: they set the timesteps of the scheduler.
        preparing_blocks: they prepare the network's inputs.
        decoding_blocks: they make images of samples.
    """

    blocks_class: ClassVar[Any]
    workflow: ClassVar[str]
    skipped_blocks: ClassVar[tuple[str, ...]] = ()
    encoding_blocks: ClassVar[tuple[str, ...]] = ("text_encoder",)
    schedule_blocks: ClassVar[tuple[str, ...]] = ("denoise.set_timesteps",)
    preparing_blocks: ClassVar[tuple[str, ...]]
    decoding_blocks: ClassVar[tuple[str, ...]] = ("decode",)

    @classmethod
    def build_blocks(cls) -> SequentialPipelineBlocks:
        """The blocks of the workflow that are run."""
        blocks = cls.blocks_class().get_workflow(cls.workflow)
        for name in cls.skipped_blocks:
            del blocks.sub_blocks[name]
        return blocks

    @classmethod
    def assemble_pipeline(cls, parts: Mapping[str, Any]) -> Any:
        """As ``ebbflow.models.pipeline_loading.ReadsPipeline.assemble_pipeline``."""
        pipeline = cls.pipeline_class(cls.build_blocks())
        pipeline.update_components(**parts)
        # Guidance is ours: the blocks then neither ask for negative prompts nor encode them.
        pipeline.guider.disable()
        return pipeline

    @classmethod
    def read_pipeline(
        cls, folder: Path, dtypes: Mapping[str, torch.dtype], parts: Mapping[str, Any]
    ) -> Any:
        """As ``ebbflow.models.pipeline_loading.ReadsPipeline.read_pipeline``. Every part is read
        from the folder, whatever repository its index names.
        """
        read = dict(parts)
        for spec in cls.build_blocks().expected_components:
            source = folder / spec.name
            # Schedulers and guiders without a folder keep the defaults of their blocks.
            has_default = spec.default_creation_method == "from_config" and not source.is_dir()
            if spec.name in read or has_default:
                continue
            options: dict[str, Any] = {"local_files_only": True}
            if issubclass(spec.type_hint, (ModelMixin, PreTrainedModel)):
                dtype = dtypes.get(spec.name, dtypes["default"])
                options |= {"dtype": dtype, "use_safetensors": True}
            read[spec.name] = spec.type_hint.from_pretrained(source, **options)
        pipeline = cls.assemble_pipeline(read)
        # As diffusers does for classic pipelines.
        pipeline.register_to_config(_name_or_path=str(folder))
        return pipeline

    def _run_blocks(self, names: Sequence[str], **values: Any) -> PipelineState:
        """The state after these blocks, which began with these values and the blocks' defaults."""
        components = PlacedComponents(self.pipeline, self.device)
        state = PipelineState()
        for name in names:
            block = self.pipeline.blocks.sub_blocks[name]
            for parameter in block.inputs:
                if parameter.name and parameter.name not in state.values:
                    value = values.get(parameter.name, parameter.default)
                    state.set(parameter.name, value, parameter.kwargs_type)
            # Without the decorator that would take the gradient away: whoever calls decides.
            run_block = inspect.unwrap(type(block).__call__)
            run_block(block, components, state)
        return state

    # What every family of modular blocks does.

    def count_tokens(self) -> Tokens:
        return Tokens(image=self.latent_shape[1] * self.latent_shape[2], text=self.max_tokens)

    def compute_sigmas(self, steps: int) -> Tensor:
        """As ``ebbflow.models.base.Model.compute_sigmas``: as the block sets them."""
        self._run_blocks(self.schedule_blocks, num_inference_steps=steps)
        sigmas: Tensor = self.pipeline.scheduler.sigmas.clone().cpu()
        return sigmas

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # Modular blocks may take one prompt per call.
        rows = [Conditioning(self._encode_prompt(text)) for text in texts]
        return dict(Conditioning.concatenate(rows).tensors)

    @abstractmethod
    def _encode_prompt(self, text: str) -> dict[str, Tensor]:
        """The conditioning of one prompt, [1, ...]."""

    def _prepare_inputs(self, latents: Tensor, **values: Any) -> dict[str, Any]:
        """What the denoising block would find: the samples as tokens, ``latents`` [N, S, C], and
        the inputs of the network.
        """
        state = self._run_blocks(
            self.preparing_blocks,
            latents=latents,
            height=self.height,
            width=self.width,
            **values,
        )
        prepared: dict[str, Any] = state.get_by_kwargs(NETWORK_INPUTS)
        return prepared | {"latents": state.get("latents")}

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        state = self._run_blocks(self.decoding_blocks, latents=latents.float(), output_type="pt")
        # [n, 3, height, width] in [0, 1].
        images: Tensor = state.get("images")
        return images.movedim(1, -1)

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; what has no weights, and the index, as they were
        published.
        """
        # The folder that the pipeline was read from.
        published = Path(self.pipeline.config["_name_or_path"])
        folder.mkdir(exist_ok=True)
        for name, part in self.pipeline.components.items():
            if isinstance(part, ModelMixin | PreTrainedModel):
                part.save_pretrained(folder / name, max_shard_size=SHARD)
            elif (published / name).is_dir():
                shutil.copytree(published / name, folder / name)
        shutil.copyfile(published / MODULAR_INDEX, folder / MODULAR_INDEX)


class PlacedComponents:
    """The parts of a modular pipeline, for blocks that compute on a device of our choice: diffusers
    takes that of its first part, which may wait in main memory.
    """

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self._pipeline = pipeline
        self._execution_device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)
