"""How large a base model is: what its folder's headers say, or what is known of a published one. No weights are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebbflow.recipe.algorithms import import_path
from ebbflow.recipe.model import Model as ModelConfig

Shape = tuple[int, int]
"""(inputs, outputs) of a linear layer."""

ADAPTERS = {
    "sd3": "ebbflow.models.sd3:SD3Model",
    "qwen_image": "ebbflow.models.qwen_image:QwenImageModel",
    "qwen_image_edit": "ebbflow.models.qwen_image:QwenImageEditModel",
    "flux": "ebbflow.models.flux:FluxModel",
    "wan": "ebbflow.models.wan:WanModel",
}
"""The adapter of each family whose models come from elsewhere."""
BUFFER = "pos_embed.pos_embed"
"""The one tensor in these families' files that is no parameter."""
EDITED_PIXELS, PIXELS_PER_TOKEN = 1024 * 1024, 28 * 28
"""An image to edit is scaled to as many pixels, and Qwen2.5-VL (2502.13923) makes a token of a square of 28."""


class SizeError(Exception):
    """A model whose size is not known: names it and the way out."""


@dataclass(frozen=True)
class Sizes:
    """What an estimate needs to know of a base model.

    Attributes:
        parameters: of the transformer.
        buffers: numbers that it keeps beside them and nothing trains.
        blocks: how many it has.
        width: of a token in them.
        linears: its linear layers by name; of a published model those of the blocks.
        text_encoders: parameters.
        vae: parameters.
        text_width: of an encoded token of a prompt.
        stored: bytes of the weights as they are published.
        config: of the transformer, as far as the family's adapter asks for it.
        scale: pixels to a latent, along each side.
        pace: frames to a latent.
    """

    parameters: int
    blocks: int
    width: int
    linears: Mapping[str, Shape]
    text_encoders: int
    vae: int
    text_width: int
    stored: int
    config: Mapping[str, Any]
    scale: int
    pace: int = 1
    buffers: int = 0


@dataclass(frozen=True)
class Sample:
    """One sample of a model as a recipe has it drawn.

    Attributes:
        latent_shape: without the batch.
        pixels: height x width x frames.
        tokens: that a block works on, those of the text included where they go through the blocks.
        text_tokens: encoded tokens of a prompt, at most.
        conditioning: numbers that a prompt is encoded to.
        passes: evaluations of the network for a denoising step; two with classifier-free guidance.
    """

    latent_shape: tuple[int, ...]
    pixels: int
    tokens: int
    text_tokens: int
    conditioning: int
    passes: int

    @property
    def elements(self) -> int:
        """Numbers in its latents."""
        return math.prod(self.latent_shape)


def sizes_of(model: ModelConfig) -> Sizes:
    """The sizes of a recipe's base model.

    Raises:
        SizeError: there is no such folder and no such published model, the folder is of another layout, or the family is a
            user's own.
    """
    if model.family == "glyph":
        return _folder_sizes(Path(model.path), ("text_encoder",), scale=1) if model.path else _new_glyph_sizes(model)
    if model.family not in ADAPTERS:
        raise SizeError(f"of family = {model.family!r}, your own, no sizes are known; take a family that comes along")
    assert model.path
    if model.on_hub and model.path in PUBLISHED:
        return PUBLISHED[model.path]
    if not model.on_hub and Path(model.path).is_dir():
        return _pipeline_sizes(Path(model.path), model.family)
    raise SizeError(
        f"of model.path = {model.path!r} no sizes are known: it is no folder here, nor one of the repositories "
        f"{', '.join(PUBLISHED)}; download it and name its folder"
    )


def sample_of(model: ModelConfig, sizes: Sizes) -> Sample:
    """What a sample of the model takes; tokens follow from latents and patches, and ``max_tokens`` counts in full.

    Raises:
        ModelError: the family cannot draw the recipe's size.
    """
    if model.family == "glyph":
        return _glyph_sample(model, sizes)
    adapter = import_path(ADAPTERS[model.family])(_skeleton(sizes), model, None)
    shape: tuple[int, ...] = adapter.latent_shape
    image = math.prod(shape[1:]) // 4  # every family makes a token of 2 x 2 latents
    text = {"sd3": 77 + (model.max_tokens or 256)}.get(model.family, model.max_tokens or 512)
    seen = 0  # numbers of the latents of an image to edit
    if model.family == "qwen_image_edit":
        text += EDITED_PIXELS // PIXELS_PER_TOKEN
        seen = shape[0] * EDITED_PIXELS // sizes.scale**2
        image += EDITED_PIXELS // sizes.scale**2 // 4
    return Sample(
        latent_shape=shape,
        pixels=adapter.height * adapter.width * model.frames,
        tokens=image if model.family == "wan" else image + text,  # wan's tokens look at the text, which does not go along
        text_tokens=text,
        conditioning=text * sizes.text_width + seen,
        passes=2 if adapter.guided and model.guidance > 1 else 1,
    )


def lora_parameters(linears: Mapping[str, Shape], targets: Sequence[str], rank: int) -> int:
    """Parameters of LoRA adapters (2106.09685): rank (inputs + outputs) for each layer of that name, or whose name ends so.

    Raises:
        SizeError: no layer has such a name.
    """
    adapted = [shape for name, shape in linears.items() if any(f".{name}".endswith(f".{target}") for target in targets)]
    if not adapted:
        raise SizeError(f"no layer of the transformer is called {' or '.join(targets)}; see policy.targets")
    return rank * sum(inputs + outputs for inputs, outputs in adapted)


def lora_targets(model: ModelConfig) -> list[str]:
    """The layers that LoRA adapts where the recipe names none."""
    path = "ebbflow.models.glyph:GlyphModel" if model.family == "glyph" else ADAPTERS[model.family]
    return import_path(path).lora_targets


def _skeleton(sizes: Sizes) -> SimpleNamespace:
    """A pipeline without weights, of which an adapter can tell the shape of its latents."""
    transformer = SimpleNamespace(config=SimpleNamespace(**sizes.config))
    return SimpleNamespace(
        transformer=transformer,
        vae_scale_factor=sizes.scale,
        vae_scale_factor_spatial=sizes.scale,
        vae_scale_factor_temporal=sizes.pace,
    )


def _glyph_sample(model: ModelConfig, sizes: Sizes) -> Sample:
    height, width, text = (sizes.config[key] for key in ("height", "width", "text_tokens"))
    image = height * width // sizes.config["patch_size"] ** 2
    return Sample((1, height, width), height * width, image + text, text, text * sizes.text_width, passes=1)


def _new_glyph_sizes(model: ModelConfig) -> Sizes:
    """Of the model that ``model.training`` describes."""
    from ebbflow.models.glyph import new_glyph

    glyph = new_glyph(model.training)
    parts = {part: sum(p.numel() for p in getattr(glyph, part).parameters()) for part in ("transformer", "text_encoder")}
    linears = {name: _shape(p.shape) for name, p in glyph.transformer.named_parameters() if p.ndim == 2}
    buffers = sum(buffer.numel() for buffer in glyph.transformer.buffers())
    config = dict(glyph.transformer.config) | {"height": model.training.height, "width": model.training.width}
    return _sizes(
        config | {"text_tokens": glyph.tokenizer.model_max_length},
        parameters=parts["transformer"],
        buffers=buffers,
        linears={name.removesuffix(".weight"): shape for name, shape in linears.items()},
        text_encoders=parts["text_encoder"],
        vae=0,
        stored=4 * (sum(parts.values()) + buffers),
        scale=1,
    )


def _pipeline_sizes(folder: Path, family: str) -> Sizes:
    """Of a folder in the layout of a diffusers pipeline."""
    vae = _config(folder / "vae")
    if "block_out_channels" in vae:
        scale, pace = 2 ** (len(vae["block_out_channels"]) - 1), 1
    else:  # Qwen-Image's is Wan's, without these keys
        scale, pace = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
    parts = [part for part in import_path(ADAPTERS[family]).text_parts if part != "vae"]
    return _folder_sizes(folder, parts, scale, pace)


def _folder_sizes(folder: Path, text_parts: Sequence[str], scale: int, pace: int = 1) -> Sizes:
    shapes = _headers(folder / "transformer")
    buffers = math.prod(shapes.pop(BUFFER, [0]))
    config = _config(folder / "transformer")
    if (folder / "glyph.json").is_file():
        text = _config(folder / "text_encoder")
        config |= json.loads((folder / "glyph.json").read_text()) | {"text_tokens": text["max_position_embeddings"]}
    return _sizes(
        config,
        parameters=sum(map(math.prod, shapes.values())),
        buffers=buffers,
        linears={name.removesuffix(".weight"): _shape(shape) for name, shape in shapes.items() if len(shape) == 2},
        text_encoders=sum(_count(folder / part) for part in text_parts if (folder / part).is_dir()),
        vae=_count(folder / "vae") if (folder / "vae").is_dir() else 0,
        stored=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        scale=scale,
        pace=pace,
    )


def _sizes(config: Mapping[str, Any], **known: Any) -> Sizes:
    """What a transformer's configuration says, with what else is known of the model."""
    return Sizes(
        config=config,
        blocks=config["num_layers"] + config.get("num_single_layers", 0),
        width=config["num_attention_heads"] * config["attention_head_dim"],
        text_width=config.get("joint_attention_dim") or config["text_dim"],
        **known,
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise SizeError(f"{file} is missing, so {folder.parent} is no folder of a base model; name one, or fetch it again")
    return json.loads(file.read_text())


def _count(folder: Path) -> int:
    return sum(map(math.prod, _headers(folder).values()))


def _headers(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a folder's safetensors files, which begin with a table of them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SizeError(f"{folder} holds no .safetensors weights; fetch them in that format")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return shapes


def _shape(weight: Sequence[int]) -> Shape:
    outputs, inputs = weight
    return inputs, outputs


# The published models: counts and shapes of diffusers' and transformers' classes with the configurations on the hub, which the
# tests build without memory and compare.


def _square(width: int, *names: str) -> dict[str, Shape]:
    return dict.fromkeys(names, (width, width))


def _mlp(width: int, inner: int, *names: str) -> dict[str, Shape]:
    return {f"{name}.{layer}": shape for name in names for layer, shape in (("0.proj", (width, inner)), ("2", (inner, width)))}


def _stack(blocks: str, numbers: range, layers: Mapping[str, Shape]) -> dict[str, Shape]:
    """The layers of some blocks, by their full names."""
    return {f"{blocks}.{number}.{name}": shape for number in numbers for name, shape in layers.items()}


def _attention(width: int, name: str) -> dict[str, Shape]:
    return _square(width, *(f"{name}.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")))


def _joint(width: int) -> dict[str, Shape]:
    """Attention of image and text, without the text's way out."""
    return _attention(width, "attn") | _square(width, *(f"attn.add_{layer}_proj" for layer in "qkv"))


def _sd35_medium() -> dict[str, Shape]:
    """The last block has no text to hand on, and the first thirteen a second attention."""
    width, name = 1536, "transformer_blocks"
    return (
        _stack(name, range(24), _joint(width) | _mlp(width, 4 * width, "ff.net"))
        | _stack(name, range(23), _square(width, "attn.to_add_out") | _mlp(width, 4 * width, "ff_context.net"))
        | _stack(name, range(13), _attention(width, "attn2") | {"norm1.linear": (width, 9 * width)})
        | _stack(name, range(13, 24), {"norm1.linear": (width, 6 * width)})
        | _stack(name, range(23), {"norm1_context.linear": (width, 6 * width)})
        | _stack(name, range(23, 24), {"norm1_context.linear": (width, 2 * width)})
    )


def _flux() -> dict[str, Shape]:
    """19 blocks of two streams and 38 of one."""
    width = 3072
    modulation: dict[str, Shape] = {f"{name}.linear": (width, 6 * width) for name in ("norm1", "norm1_context")}
    double = _joint(width) | _square(width, "attn.to_add_out") | _mlp(width, 4 * width, "ff.net", "ff_context.net")
    single: dict[str, Shape] = {
        "norm.linear": (width, 3 * width),
        "proj_mlp": (width, 4 * width),
        "proj_out": (5 * width, width),
        **_square(width, "attn.to_q", "attn.to_k", "attn.to_v"),
    }
    return _stack("transformer_blocks", range(19), double | modulation) | _stack("single_transformer_blocks", range(38), single)


def _qwen_image() -> dict[str, Shape]:
    width = 3072
    modulation: dict[str, Shape] = {f"{name}.1": (width, 6 * width) for name in ("img_mod", "txt_mod")}
    layers = _joint(width) | _square(width, "attn.to_add_out") | _mlp(width, 4 * width, "img_mlp.net", "txt_mlp.net")
    return _stack("transformer_blocks", range(60), layers | modulation)


def _wan22_5b() -> dict[str, Shape]:
    width = 3072
    return _stack("blocks", range(30), _attention(width, "attn1") | _attention(width, "attn2") | _mlp(width, 14336, "ffn.net"))


CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
T5_XXL, UMT5_XXL, QWEN25_VL_7B = 4_762_310_656, 5_680_910_336, 8_292_166_656
VAE_16_CHANNELS, VAE_QWEN, VAE_WAN22 = 83_819_683, 126_892_531, 704_688_668
QWEN_IMAGE = Sizes(
    parameters=20_430_401_088,
    blocks=60,
    width=3072,
    linears=_qwen_image(),
    text_encoders=QWEN25_VL_7B,
    vae=VAE_QWEN,
    text_width=3584,
    stored=2 * (20_430_401_088 + QWEN25_VL_7B + VAE_QWEN),
    config={"in_channels": 64},
    scale=8,
)

PUBLISHED: dict[str, Sizes] = {
    "stabilityai/stable-diffusion-3.5-medium": Sizes(
        parameters=2_243_171_520,
        buffers=384 * 384 * 1536,
        blocks=24,
        width=1536,
        linears=_sd35_medium(),
        text_encoders=CLIP_L_PROJECTED + CLIP_G + T5_XXL,
        vae=VAE_16_CHANNELS,
        text_width=4096,
        stored=2 * (2_243_171_520 + 384 * 384 * 1536 + CLIP_L_PROJECTED + CLIP_G + T5_XXL + VAE_16_CHANNELS),
        config={"in_channels": 16, "patch_size": 2},
        scale=8,
    ),
    "black-forest-labs/FLUX.1-dev": Sizes(
        parameters=11_901_408_320,
        blocks=57,
        width=3072,
        linears=_flux(),
        text_encoders=CLIP_L + T5_XXL,
        vae=VAE_16_CHANNELS,
        text_width=4096,
        stored=2 * (11_901_408_320 + CLIP_L + T5_XXL + VAE_16_CHANNELS),
        config={"in_channels": 64},
        scale=8,
    ),
    "Qwen/Qwen-Image": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": QWEN_IMAGE,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Sizes(
        parameters=4_999_787_712,
        blocks=30,
        width=3072,
        linears=_wan22_5b(),
        text_encoders=UMT5_XXL,
        vae=VAE_WAN22,
        text_width=4096,
        stored=4 * (4_999_787_712 + VAE_WAN22) + 2 * UMT5_XXL,  # transformer and VAE are published in 32 bits
        config={"in_channels": 48, "patch_size": (1, 2, 2)},
        scale=16,
        pace=4,
    ),
}
"""By the id of their repository on the Hugging Face hub; ``stored`` counts the pipeline's own parts."""
