"""How large a base model is, counted in the modules that diffusers and transformers build on the
meta device, without weights.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ebbflow.data.model_sizes import ModelSizes, SampleSize, SizeError
from ebbflow.flow.latents import get_picture_shape
from ebbflow.models import load_model
from ebbflow.models.base import is_trainable
from ebbflow.models.context_parallel import (
    require_shareable_family,
    require_shareable_stage,
    require_shareable_tokens,
)
from ebbflow.models.families import load_adapter
from ebbflow.models.families.glyph import build_glyph_model
from ebbflow.models.meta_results import MetaResults
from ebbflow.models.published import Part, Published
from ebbflow.recipe import Recipe
from ebbflow.recipe.base_folder import check_folder, find_index, read_json_object
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.stages import OnlineStageConfig, is_trained_in_group

DECODED_SIDE = 32
"""Large enough that the borders do not matter, small enough that the attention of the VAE,
quadratic in it, does not either.
"""


def measure_model(model: ModelConfig) -> tuple[ModelSizes, SampleSize]:
    """The sizes of a recipe's base model, and of one sample of it.

    Raises:
        SizeError: the family is a user's own, or nothing is known of the model.
        ModelError: the folder is none of the family, or the family cannot generate the recipe's
            size.
    """
    if model.family not in FAMILIES:
        raise SizeError(
            f"model.family = {model.family!r} is your own, no sizes are known; take one of"
            f" {', '.join(FAMILIES)}"
        )
    # A model that runs train is small enough to load, and none of diffusers' pipelines.
    if FAMILIES[model.family].trains_base_model:
        adapter, stored_bytes = _measure_glyph(model)
    else:
        adapter, stored_bytes = _build_meta_pipeline(model)
    return _measure_networks(adapter, stored_bytes), _measure_sample(adapter, model)


def _measure_networks(adapter: Any, stored_bytes: int) -> ModelSizes:
    transformer = adapter.transformer
    # The glyph model has its parts itself, and no VAE.
    pipeline = getattr(adapter, "pipeline", adapter)
    vae = getattr(pipeline, "vae", None)
    width, text_width = adapter.token_widths()
    # The VAE of families that edit images is one of their text parts, and counted by itself.
    encoders = [getattr(pipeline, part) for part in adapter.text_parts if part != "vae"]
    linears = {
        name: (layer.in_features, layer.out_features)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear) and is_trainable(adapter, name)
    }
    num_unused = sum(
        value.numel()
        for name, value in transformer.named_parameters()
        if not is_trainable(adapter, name)
    )
    # Families with two networks may train one of them; the other only denoises.
    num_denoising = sum(_count_parameters(getattr(pipeline, name)) for name in adapter.networks)
    # What decodes sound lies beside the VAE.
    decoders = [vae, *(getattr(pipeline, part) for part in getattr(adapter, "sound_parts", ()))]
    decoding = 0
    decoding_with_gradient = 0
    if vae is not None:
        # A sample may be tokens, which are patches of the VAE's latents, or lack their only frame.
        latents = getattr(adapter, "vae_latent_shape", adapter.latent_shape)
        shape = get_picture_shape(latents)
        decoding = _decoding_bytes(vae, shape)
        decoding_with_gradient = _decoding_bytes(vae, shape, with_gradient=True)
    return ModelSizes(
        parameters=_count_parameters(transformer),
        buffers=_count_buffers(transformer),
        blocks=len(adapter.list_blocks()),
        width=width,
        linears=linears,
        lora_targets=adapter.lora_targets,
        # SD3's T5 may be missing from a folder.
        text_encoders=sum(
            _count_parameters(encoder) for encoder in encoders if encoder is not None
        ),
        text_width=text_width,
        frozen=num_denoising - _count_parameters(transformer),
        unused=num_unused,
        vae=sum(_count_parameters(decoder) for decoder in decoders if decoder is not None),
        decoding=decoding,
        decoding_with_gradient=decoding_with_gradient,
        vae_encodes_prompts="vae" in adapter.text_parts,
        decoded_frames=getattr(adapter, "frames_per_decode", 1),
        stored=stored_bytes,
    )


def _measure_sample(adapter: Any, model: ModelConfig) -> SampleSize:
    tokens = adapter.count_tokens()
    _, text_width = adapter.token_widths()
    channels = get_picture_shape(adapter.latent_shape)[0]
    return SampleSize(
        # A plain tuple, of several latents as well: sizes are kept as JSON.
        latent_shape=tuple(adapter.latent_shape),
        pixels=adapter.height * adapter.width * model.frames,
        tokens=tokens.image + tokens.edited + (tokens.text if tokens.joint else 0),
        joint=tokens.joint,
        text_tokens=tokens.text,
        # The image to edit is kept as latents: a token of it is 2 x 2 of them.
        conditioning=tokens.text * text_width
        + tokens.edited * 4 * channels
        + tokens.condition_channels,
        passes=2 if model.guidance > 1 and adapter.guided else 1,
    )


def check_size(model: ModelConfig) -> None:
    """Check that a family of ours can generate the recipe's height, width and frames; of an unknown
    model, nothing.

    Raises:
        ModelError: it cannot; names the nearest size.
    """
    build_meta_adapter(model)


def check_shared_tokens(recipe: Recipe, ranks: int) -> None:
    """Check that so many processes can share the tokens of a sample in the stages that a group of
    processes trains: offline and colocated ones, and those on Ray (``models.context_parallel``).

    Of a model that nothing is known of, and of a user's own family, it checks no numbers of heads
    and tokens.

    Raises:
        ModelError: they cannot.
    """
    if ranks == 1:
        return
    stages = [
        stage
        for stage in recipe.stages
        if is_trained_in_group(stage)
        or (isinstance(stage, OnlineStageConfig) and stage.placement == "ray")
    ]
    if not stages:
        return
    for stage in stages:
        require_shareable_stage(stage, ranks)
    require_shareable_family(load_adapter(recipe.model.family), recipe.model, ranks)
    if recipe.model.family in FAMILIES:
        adapter = build_meta_adapter(recipe.model)
        if adapter:
            require_shareable_tokens(adapter, ranks)


def build_meta_adapter(model: ModelConfig) -> Any:
    """What generates a sample, without text encoders: the adapter of a family of ours; None where
    nothing is known of the model.

    Raises:
        ModelError: the family cannot generate the recipe's size.
    """
    family: Any = load_adapter(model.family)
    names = (*family.networks, "vae", *getattr(family, "sound_parts", ()))
    try:
        parts = _find_parts(model, names)
    except SizeError:
        return None
    return _build_adapter(
        model, {name: _build_on_meta(part) for name, part in parts.items() if name in names}
    )


def _measure_glyph(model: ModelConfig) -> tuple[Any, int]:
    """The glyph model of a folder, which is small enough to load, or the one that
    ``model.training`` describes; its bytes.
    """
    if model.path:
        return load_model(Path(model.path), model), _folder_bytes(Path(model.path))
    with torch.device("meta"):
        glyph = build_glyph_model(model.training)
    # Saved in float32, 4 bytes a number.
    num_stored = sum(
        _count_parameters(part) + _count_buffers(part)
        for part in (glyph.transformer, glyph.text_encoder)
    )
    return glyph, 4 * num_stored


def _build_meta_pipeline(model: ModelConfig) -> tuple[Any, int]:
    """The family's adapter around a pipeline without tokenizers and without numbers in its tensors,
    and the model's bytes.
    """
    family: Any = load_adapter(model.family)
    names = (*family.networks, "vae", *getattr(family, "sound_parts", ()), *family.text_parts)
    parts = _find_parts(model, names)
    built = {name: _build_on_meta(part) for name, part in parts.items()}
    # Nothing of a repository is here yet; a folder has its bytes.
    if model.is_on_hub:
        stored_bytes = sum(
            part.bytes * (_count_parameters(built[name]) + _count_buffers(built[name]))
            for name, part in parts.items()
        )
    else:
        stored_bytes = _folder_bytes(Path(model.path or ""))
    return _build_adapter(model, built), stored_bytes


def _build_adapter(model: ModelConfig, built: Mapping[str, nn.Module]) -> Any:
    """The family's adapter around a pipeline of these parts and no others.

    Raises:
        ModelError: the family cannot generate the recipe's size.
    """
    adapter: Any = load_adapter(model.family)
    # Tokenizers, schedulers and what else has no weights is None: nothing is encoded or denoised.
    return adapter(adapter.assemble_pipeline(built), model, torch.device("meta"))


def _find_parts(model: ModelConfig, names: Sequence[str]) -> Mapping[str, Part]:
    """The named parts of a published model, or of a folder as far as it has them."""
    assert model.path
    family: Any = load_adapter(model.family)
    published: Published = family.published
    if model.is_on_hub and model.path in published:
        return published[model.path]
    folder = Path(model.path)
    if model.is_on_hub or not folder.is_dir():
        known = f", nor one of the repositories {', '.join(published)}" if published else ""
        raise SizeError(
            f"of model.path = {model.path!r} no sizes are known: it is no folder here{known};"
            " download it and name its folder"
        )
    check_folder(folder, model.family)
    # {"vae": ["diffusers", "AutoencoderKL"], "text_encoder_3": [null, null], ...}
    index = read_json_object(find_index(folder))
    kinds = {name: index[name] for name in names if index.get(name, [None])[0]}
    return {
        name: Part(kind[0], kind[1], read_json_object(folder / name / "config.json"))
        for name, kind in kinds.items()
    }


def _build_on_meta(part: Part) -> nn.Module:
    """A part without numbers in its tensors."""
    with _use_meta_device():
        return _build_part(part)


@contextmanager
def _use_meta_device() -> Iterator[None]:
    """Build modules on the meta device, where a layer has no numbers to initialise: to compute them
    would take as long as everything else that building takes.
    """
    with torch.device("meta"), _SkipInitialization():
        yield


class _SkipInitialization(TorchFunctionMode):
    """Skips what ``nn.Linear`` and the convolutions fill their tensors with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_):
            # torch.overrides passes a tensor that it was called with by name.
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _build_part(part: Part) -> nn.Module:
    """A part with random weights, or on the meta device without any."""
    if part.library == "transformers":
        kind = getattr(import_module(part.library), part.kind)
        built: nn.Module = kind(kind.config_class.from_dict(part.config))
    else:
        # "ltx2" is a package of one of diffusers' pipelines, which an index names without the rest.
        module = part.library
        if module != "diffusers":
            module = f"diffusers.pipelines.{part.library}"
        built = getattr(import_module(module), part.kind).from_config(part.config)
    return built


def _decoding_bytes(vae: Any, latent_shape: Sequence[int], with_gradient: bool = False) -> int:
    """Bytes per pixel while a VAE decodes an image of ``DECODED_SIDE`` latents a side, and takes
    the gradient of that.

    Without gradient a video is decoded part by part; with it, all parts are kept, and the second
    one stands for all later ones.
    """
    # VAEs of videos take latents [N, C, frames, H, W], also for images.
    frames = []
    if len(latent_shape) == 4 or any(isinstance(layer, nn.Conv3d) for layer in vae.modules()):
        frames = [min(2, latent_shape[1])] if with_gradient else [1]
    kind: Any = type(vae)
    # As text, which can be a key of the cache: an estimate of a recipe asks many times.
    config = json.dumps(vae.config, sort_keys=True, default=str)
    return _measure_decoding_peak(kind, config, (latent_shape[0], *frames), with_gradient)


@cache
def _measure_decoding_peak(
    kind: Any, config: str, channels_and_frames: tuple[int, ...], with_gradient: bool
) -> int:
    # On the meta device nothing is computed; every operation gives a tensor of the right size,
    # which is all that is counted.
    with _use_meta_device():
        vae = kind.from_config(json.loads(config)).requires_grad_(False)
    latents = torch.zeros(
        1,
        *channels_and_frames,
        DECODED_SIDE,
        DECODED_SIDE,
        device="meta",
        requires_grad=with_gradient,
    )
    with torch.set_grad_enabled(with_gradient), _PeakBytes() as memory:
        image = vae.decode(latents, return_dict=False)[0]
        if with_gradient:
            torch.autograd.grad(image, latents, torch.ones_like(image))
    # [1, 3, (frames,) height, width]: bytes per pixel of all frames.
    return int(memory.peak / math.prod(image.shape[2:]))


class _PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of the tensors that were made inside and are alive at the same time, at
    most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peak = 0
        self._results = MetaResults()
        # Counted along, as a backward pass has thousands of tensors alive at each operation.
        self._total = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._results.compute(func, args, kwargs or {})
        for value in tree_iter(result):
            if not isinstance(value, torch.Tensor):
                continue
            # Views share the storage of their tensor, which is counted once, and is freed when the
            # last of them goes.
            storage = value.untyped_storage()
            if id(storage) not in self._alive:
                self._alive.add(id(storage))
                self._total += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self.peak = max(self.peak, self._total)
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._alive.remove(key)
        self._total -= num_bytes


def _count_parameters(module: nn.Module) -> int:
    return sum(map(torch.Tensor.numel, module.parameters()))


def _count_buffers(module: nn.Module) -> int:
    """Numbers in its checkpoint that are no parameters."""
    # Tied parameters have several names in the state, all of parameters.
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return sum(
        value.numel() for name, value in module.state_dict().items() if name not in parameters
    )


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
