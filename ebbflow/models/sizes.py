"""How large a base model is, counted in the modules that diffusers and transformers build on the meta device, without weights."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ebbflow.models import check_folder, load_model
from ebbflow.models.families import adapter_of
from ebbflow.models.families.glyph import new_glyph
from ebbflow.models.folder import INDEX, read_object
from ebbflow.models.published import PUBLISHED, Part
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig

Shape = tuple[int, int]
"""(inputs, outputs) of a linear layer."""
DECODED_SIDE = 32
"""Large enough that the borders do not matter, small enough that the attention of the VAE, quadratic in it, does not either."""


class SizeError(Exception):
    """A model whose sizes cannot be computed."""


@dataclass(frozen=True)
class Sizes:
    """What an estimate needs to know of a base model.

    Attributes:
        parameters: of the transformer.
        buffers: numbers in its checkpoint beside them.
        blocks: of the transformer.
        width: of a token in them.
        linears: the transformer's linear layers by name.
        lora_targets: the layers that LoRA adapts where the recipe names none.
        text_encoders: parameters.
        vae: parameters.
        decoding: bytes that the VAE's tensors take at most while it decodes, per pixel of an image.
        vae_encodes_prompts: prompts come with an image.
        frames_per_latent: of a video.
        text_width: of an encoded token of a prompt.
        stored: bytes of the weights as they are published.
    """

    parameters: int
    blocks: int
    width: int
    linears: Mapping[str, Shape]
    lora_targets: Sequence[str]
    text_encoders: int
    vae: int
    text_width: int
    stored: int
    decoding: int = 0
    vae_encodes_prompts: bool = False
    frames_per_latent: int = 1
    buffers: int = 0


@dataclass(frozen=True)
class Sample:
    """One sample of a model as a recipe has it generated.

    Attributes:
        latent_shape: without the batch.
        pixels: height x width x frames.
        tokens: that a block works on, those of the text included where they go through the blocks.
        joint: whether they do.
        text_tokens: encoded tokens of a prompt, at most.
        conditioning: numbers that a prompt is encoded to.
        passes: evaluations of the network for a denoising step; two with classifier-free guidance.
    """

    latent_shape: tuple[int, ...]
    pixels: int
    tokens: int
    joint: bool
    text_tokens: int
    conditioning: int
    passes: int

    @property
    def elements(self) -> int:
        """Numbers in its latents."""
        return math.prod(self.latent_shape)


def measure(model: ModelConfig) -> tuple[Sizes, Sample]:
    """The sizes of a recipe's base model, and of one sample of it.

    Raises:
        SizeError: the family is a user's own, or nothing is known of the model.
        ModelError: the folder is none of the family, or the family cannot draw the recipe's size.
    """
    if model.family not in FAMILIES:
        raise SizeError(f"model.family = {model.family!r} is your own, no sizes are known; take one of {', '.join(FAMILIES)}")
    adapter, stored = _glyph(model) if model.family == "glyph" else _pipeline(model)
    transformer, config = adapter.transformer, adapter.transformer.config
    pipeline = getattr(adapter, "pipeline", adapter)
    encoders = [getattr(pipeline, part) for part in adapter.text_parts if part != "vae"]
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    sizes = Sizes(
        parameters=_parameters(transformer),
        buffers=_buffers(transformer),
        blocks=len(adapter.blocks()),
        width=config.num_attention_heads * config.attention_head_dim,
        linears={name: (layer.in_features, layer.out_features) for name, layer in layers.items()},
        lora_targets=adapter.lora_targets,
        text_encoders=sum(_parameters(encoder) for encoder in encoders if encoder is not None),
        text_width=config.get("joint_attention_dim") or config.text_dim,
        vae=_parameters(pipeline.vae) if hasattr(pipeline, "vae") else 0,
        decoding=_decoding_bytes(pipeline.vae, adapter.latent_shape[0]) if hasattr(pipeline, "vae") else 0,
        vae_encodes_prompts="vae" in adapter.text_parts,
        frames_per_latent=getattr(pipeline, "vae_scale_factor_temporal", 1),
        stored=stored,
    )
    tokens, channels = adapter.tokens(), adapter.latent_shape[0]
    sample = Sample(
        latent_shape=adapter.latent_shape,
        pixels=adapter.height * adapter.width * model.frames,
        tokens=tokens.image + tokens.edited + (tokens.text if tokens.joint else 0),
        joint=tokens.joint,
        text_tokens=tokens.text,
        conditioning=tokens.text * sizes.text_width + tokens.edited * 4 * channels,
        passes=2 if model.guidance > 1 and adapter.guided else 1,
    )
    return sizes, sample


def lora_parameters(linears: Mapping[str, Shape], targets: Sequence[str], rank: int) -> int:
    """Parameters of LoRA adapters (2106.09685): rank (inputs + outputs) for each layer whose name is or ends in a target.

    Raises:
        SizeError: no layer has such a name.
    """
    adapted = [shape for name, shape in linears.items() if any(f".{name}".endswith(f".{target}") for target in targets)]
    if not adapted:
        raise SizeError(f"no layer of the transformer is called {' or '.join(targets)}; see policy.targets")
    return rank * sum(inputs + outputs for inputs, outputs in adapted)


def _glyph(model: ModelConfig) -> tuple[Any, int]:
    """The glyph model of a folder, which is small enough to load, or the one that ``model.training`` describes; its bytes."""
    if model.path:
        return load_model(Path(model.path), model), _folder_bytes(Path(model.path))
    with torch.device("meta"):
        glyph = new_glyph(model.training)
    return glyph, 4 * sum(_parameters(part) + _buffers(part) for part in (glyph.transformer, glyph.text_encoder))


def _pipeline(model: ModelConfig) -> tuple[Any, int]:
    """The family's adapter around a pipeline without tokenizers and without numbers in its tensors, and the model's bytes."""
    adapter: Any = adapter_of(model.family)
    parts = _parts(model, ("transformer", "vae", *adapter.text_parts))
    with torch.device("meta"):
        built = {name: _build(part) for name, part in parts.items()}
    wanted = inspect.signature(adapter.pipeline_class.__init__).parameters.items()
    absent = [name for name, parameter in wanted if parameter.default is parameter.empty and name not in ("self", *built)]
    pipeline = adapter.pipeline_class(**built, **dict.fromkeys(absent))
    stored = (
        sum(part.bytes * (_parameters(built[name]) + _buffers(built[name])) for name, part in parts.items())
        if model.on_hub
        else _folder_bytes(Path(model.path or ""))
    )
    return adapter(pipeline, model, torch.device("meta")), stored


def _parts(model: ModelConfig, names: Sequence[str]) -> dict[str, Part]:
    """The named parts of a published model, or of a folder as far as it has them."""
    assert model.path
    if model.on_hub and model.path in PUBLISHED:
        return PUBLISHED[model.path]
    folder = Path(model.path)
    if model.on_hub or not folder.is_dir():
        raise SizeError(
            f"of model.path = {model.path!r} no sizes are known: it is no folder here, nor one of the repositories "
            f"{', '.join(PUBLISHED)}; download it and name its folder"
        )
    check_folder(folder, model.family)
    index = read_object(folder / INDEX)
    kinds = {name: index[name] for name in names if index.get(name, [None])[0]}
    return {name: Part(kind[0], kind[1], read_object(folder / name / "config.json")) for name, kind in kinds.items()}


def _build(part: Part) -> nn.Module:
    """A part with random weights, or on the meta device without any."""
    kind = getattr(import_module(part.library), part.kind)
    if part.library == "diffusers":
        built: nn.Module = kind.from_config(part.config)
    else:
        built = kind(kind.config_class.from_dict(part.config))
    return built


def _decoding_bytes(vae: Any, channels: int) -> int:
    """Bytes per pixel while a VAE decodes an image of ``DECODED_SIDE`` latents a side."""
    frames = [1] if any(isinstance(layer, nn.Conv3d) for layer in vae.modules()) else []
    latents = torch.zeros(1, channels, *frames, DECODED_SIDE, DECODED_SIDE, device="meta")
    with torch.no_grad(), _PeakBytes() as held:
        image = vae.decode(latents, return_dict=False)[0]
    return int(held.peak / math.prod(image.shape[2:]))


class _PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of the tensors that were made inside and are alive at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and id(storage := value.untyped_storage()) not in self._alive:
                self._alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, id(storage))
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def _parameters(module: nn.Module) -> int:
    return sum(map(torch.Tensor.numel, module.parameters()))


def _buffers(module: nn.Module) -> int:
    """Numbers in its checkpoint that are no parameters."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return sum(value.numel() for name, value in module.state_dict().items() if name not in parameters)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
