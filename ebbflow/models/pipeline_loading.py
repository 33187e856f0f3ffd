"""Loads the diffusers pipeline of a base-model folder: frozen, each part on its device and in its
precision, with the recipe's attention.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models.attention_dispatch import AttentionBackendName
from safetensors import safe_open
from torch import nn

from ebbflow.models.base import DTYPES, ModelError
from ebbflow.models.folder import report_unreadable_parts
from ebbflow.models.weight_files import WeightFiles, list_weight_files, read_buffers
from ebbflow.recipe.base_folder import find_index, read_json_object
from ebbflow.recipe.model import ModelConfig

VARIANT = re.compile(r"\.(fp16|bf16|fp32)[.-]")


class ReadsPipeline:
    """How an adapter gets its pipeline: as diffusers' classic ones are read and built; a family of
    another kind overrides both.
    """

    pipeline_class: ClassVar[Any]

    @classmethod
    def read_pipeline(
        cls, folder: Path, dtypes: Mapping[str, torch.dtype], parts: Mapping[str, Any]
    ) -> Any:
        """The pipeline of a folder.

        Args:
            dtypes: of the parts by name, and of the others as ``default``.
            parts: those that are there already.
        """
        return cls.pipeline_class.from_pretrained(
            folder, dtype=dict(dtypes), local_files_only=True, use_safetensors=True, **parts
        )

    @classmethod
    def assemble_pipeline(cls, parts: Mapping[str, Any]) -> Any:
        """A pipeline of these parts and no others."""
        # A pipeline's constructor wants all of its parts.
        parameters = inspect.signature(cls.pipeline_class.__init__).parameters
        absent = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and name not in ("self", *parts)
        ]
        return cls.pipeline_class(**parts, **dict.fromkeys(absent))


def load_pipeline(
    adapter: Any,
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    weights_later: bool = False,
) -> tuple[Any, dict[str, WeightFiles]]:
    """The pipeline of a folder, frozen and in evaluation mode; the files of weights that it has not
    read, by the name of the part.

    A network to train is on the device in the precision that it was published in, and any other in
    ``config.precision``. Text encoders are in ``config.precision``, the VAE and what decodes sound
    in float32, all on the CPU.

    Args:
        adapter: the family's class, an ``ebbflow.models.pipeline.PipelineModel``, which imports
            this module.
        weights_later: leave the networks to train on the meta device, for a policy that reads them
            (``ebbflow.training.loading``).

    Raises:
        ModelError: a part cannot be read, the family refuses it, or attention cannot be computed as
            ``config.attention`` says.
    """
    weights = _find_weight_files(adapter, folder, config)
    with report_unreadable_parts(folder, config.family):
        published_dtypes = {part: _read_published_dtype(files) for part, files in weights.items()}
        # Training keeps its weights in float32: a cast to 16 bits on the way there would lose bits
        # that were published. A frozen part needs no more than the arithmetic does.
        decoders = dict.fromkeys(("vae", *adapter.sound_parts), torch.float32)
        dtypes = {"default": DTYPES[config.precision]} | decoders | published_dtypes
        parts = adapter._load_own_parts(folder)
        files: dict[str, WeightFiles] = {}
        # A folder with variants alone is read by diffusers, which knows which of them to take.
        if weights_later and all(list_weight_files(folder / part) for part in weights):
            for part in weights:
                network, files[part] = _build_without_weights(adapter, folder, part)
                parts[part] = network
        pipeline = adapter.read_pipeline(folder, dtypes, parts)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    adapter._check_pipeline(pipeline, config)
    for name in adapter.networks:
        network = getattr(pipeline, name)
        if name not in files:
            network.to(device)
        if config.attention:
            _choose_attention(network, config.attention, config.family)
    return pipeline, files


def _find_weight_files(adapter: Any, folder: Path, config: ModelConfig) -> dict[str, list[Path]]:
    """Find the files of weights of each part to train.

    Raises:
        ModelError: a part has none.
    """
    weights = {
        part: sorted((folder / part).glob("*.safetensors"))
        for part in adapter.trained_parts(config)
    }
    # Pickled weights (.bin) could run code, and are never loaded.
    parts_without_weights = [part for part, files in weights.items() if not files]
    if parts_without_weights:
        raise ModelError(
            f"{folder / parts_without_weights[0]} holds no .safetensors weights; fetch them in that"
            " format"
        )
    return weights


def _build_without_weights(adapter: Any, folder: Path, part: str) -> tuple[Any, WeightFiles]:
    """A network whose parameters are on the meta device, and the files of its weights.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    kind = find_part_class(folder, part)
    # As diffusers itself does before it loads: buffers that are computed have their values.
    with init_empty_weights():
        network = kind.from_config(kind.load_config(folder / part, local_files_only=True))
    files = WeightFiles(list_weight_files(folder / part))
    files.check_network(network)
    read_buffers(network, files)
    return network, files


def find_part_class(folder: Path, part: str) -> Any:
    """The class of a network in a pipeline folder.

    Raises:
        ValueError: diffusers has no such class.
    """
    library, name = read_json_object(find_index(folder))[part][:2]
    kind = getattr(diffusers, name, None) if library == "diffusers" else None
    if kind is None:
        raise ValueError(f"{part} is a {name} of {library}, which is no network of diffusers")
    return kind


def _read_published_dtype(files: list[Path]) -> torch.dtype:
    """The precision of the published weights; variants in another one, which may lie beside them,
    are not loaded.
    """
    file = next((file for file in files if not VARIANT.search(file.name)), files[0])
    with safe_open(file, "pt") as weights:
        dtype: torch.dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    return dtype


def _choose_attention(transformer: Any, backend: str, family: str) -> None:
    choices = sorted(choice.value for choice in AttentionBackendName)
    if backend not in choices:
        raise ModelError(
            f"model.attention = {backend!r}: diffusers has {', '.join(choices)}; take one of them,"
            " or leave it out"
        )
    # Processors of an older kind do not ask which backend was set; theirs is the native one.
    asks_for_backend = any(
        hasattr(processor, "_attention_backend")
        for processor in getattr(transformer, "attn_processors", {}).values()
    )
    if backend != "native" and not asks_for_backend:
        raise ModelError(
            f"model.attention = {backend!r}: diffusers has only 'native' for {family}; take that,"
            " or leave it out"
        )
    # ImportError: its package is missing. RuntimeError: it needs another GPU, or a newer torch.
    try:
        transformer.set_attention_backend(backend)
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"model.attention = {backend!r}: {error} Or leave it out") from error
