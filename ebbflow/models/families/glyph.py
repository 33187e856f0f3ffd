"""The glyph family: short strings drawn in pixel space by a small SD3 transformer, which Ebbflow
trains itself.

A folder of this family is a Hugging Face folder of the SD3 family (``transformer/``,
``text_encoder/``, ``tokenizer/``, ``scheduler/``, ``model_index.json``) whose VAE is the identity:
latent = (pixel - .55) / .75 with pixels in [-1, 1], exactly the shift and scale of a VAE.
``diffusers.StableDiffusion3Pipeline.from_pretrained`` loads it when the parts that this family
lacks (``vae=None, text_encoder_2=None ...``) are passed explicitly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar as silence_transformers

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.folder import report_unreadable_parts
from ebbflow.recipe.base import shorten_value
from ebbflow.recipe.base_folder import INDEX
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import (
    CHARACTERS,
    DESCRIPTIONS,
    GlyphTrainingConfig,
    ModelConfig,
    Precision,
)

FAMILY = Family(
    adapter="GlyphModel",
    pipeline="StableDiffusion3Pipeline",
    folder_files=(
        "transformer",
        "scheduler",
        "text_encoder",
        "tokenizer",
        "glyph.json",
        "model_index.json",
    ),
    guided=False,
    diffusers=False,
    trains_base_model=True,
    has_fixed_size=True,
    unsupported_keys=("frames", "guidance", "max_tokens", "attention"),
    feature_caches=("first_block", "taylor_seer", "mag"),
)
ALPHABET = CHARACTERS["capitals"]
PIXEL_SHIFT = 0.55
PIXEL_SCALE = 0.75
"""A latent is (pixel - shift) / scale, of pixels in [-1, 1]."""
SPECIALS = ("<pad>", "<start>", "<unk>", "<end>")
PATCH = 8
WIDTH = 64
SIZE = "glyph.json"
"""The file of a folder that says height and width."""
PIPELINE_PARTS = {
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
}
# Named in the index as null, since the pipeline of SD3 asks for them.
ABSENT_PARTS = (
    "vae",
    "text_encoder_2",
    "tokenizer_2",
    "text_encoder_3",
    "tokenizer_3",
    "image_encoder",
    "feature_extractor",
)


class GlyphModel:
    """Adapter of the glyph family; see ``ebbflow.models.base.Model``."""

    lora_targets = [
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    ]
    pipeline_class = StableDiffusion3Pipeline
    networks = ("transformer",)
    text_parts = ("text_encoder",)
    guided = FAMILY.guided

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: CLIPTextModelWithProjection,
        tokenizer: PreTrainedTokenizerFast,
        scheduler: FlowMatchEulerDiscreteScheduler,
        height: int,
        width: int,
        precision: Precision = "float32",
    ) -> None:
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.height = height
        self.width = width
        self.latent_shape: tuple[int, ...] = (1, height, width)
        self.precision = precision

    @classmethod
    def load(cls, folder: Path, config: ModelConfig, device: torch.device) -> Self:
        """As ``ebbflow.models.base.Model.load``."""
        with report_unreadable_parts(folder, config.family):
            model = cls._read_parts(folder, config.precision)
        for part in (model.transformer, model.text_encoder):
            part.requires_grad_(False).eval().to(device)
        return model

    @classmethod
    def _read_parts(cls, folder: Path, precision: Precision) -> Self:
        # Height and width are nowhere else in the folder: the network has positions up to a largest
        # side. Validated as the recipe's keys are, for the folder may come from elsewhere.
        size = GlyphTrainingConfig.model_validate_json((folder / SIZE).read_bytes())
        if size.model_fields_set != {"height", "width"}:
            raise ValueError(f"{SIZE} must hold height and width")
        transformer = _read_network(SD3Transformer2DModel, folder / "transformer")
        limit = PATCH * transformer.config.pos_embed_max_size
        if max(size.height, size.width) > limit:
            raise ValueError(f"its network draws {limit} pixels at most and {SIZE} wants more")
        model = cls(
            transformer,
            _read_network(CLIPTextModelWithProjection, folder / "text_encoder"),
            PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", local_files_only=True),
            FlowMatchEulerDiscreteScheduler.from_pretrained(
                folder / "scheduler", local_files_only=True
            ),
            size.height,
            size.width,
            precision,
        )
        # A tokenizer of something else is found here, and not in the middle of a stage.
        with torch.no_grad():
            model.encode_texts(["", "A"])
        return model

    def count_tokens(self) -> Tokens:
        """The tokens of one sample."""
        _, height, width = self.latent_shape
        return Tokens(image=height * width // PATCH**2, text=self.tokenizer.model_max_length)

    def token_widths(self) -> tuple[int, int]:
        """The width of a token in the blocks, and of an encoded token of a prompt."""
        return WIDTH, self.transformer.config.joint_attention_dim

    def compute_sigmas(self, steps: int) -> Tensor:
        """As ``ebbflow.models.base.Model.compute_sigmas``."""
        # The pipelines of the newer families pass this list; the scheduler's own default ends in a
        # step from .001 to 0, a forward pass that changes nothing.
        self.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist())
        sigmas: Tensor = self.scheduler.sigmas.clone()
        return sigmas

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """As ``ebbflow.models.base.Model.encode_prompts``."""
        return self.encode_texts([prompt.prompt for prompt in prompts])

    def encode_texts(self, prompts: list[str]) -> Conditioning:
        """``encode_prompts`` with a gradient, for training the text encoder itself.

        Raises:
            ModelError: a prompt has more letters than the model can draw.
        """
        # Always padded to one length, so that a row does not depend on the rows beside it.
        tokens = self.tokenizer(prompts, padding="max_length").input_ids
        limit = self.tokenizer.model_max_length
        too_long = [prompt for prompt, ids in zip(prompts, tokens, strict=True) if len(ids) > limit]
        if too_long:
            raise ModelError(
                f"this glyph model draws {limit - 2} letters at most and was asked for"
                f" {too_long[0]!r}"
            )
        # embeds [N, letters + 2, WIDTH], pooled [N, WIDTH].
        output = self.text_encoder(input_ids=torch.tensor(tokens, device=self.text_encoder.device))
        return Conditioning({"embeds": output.last_hidden_state, "pooled": output.text_embeds})

    def describe_unseen_letters(self, prompt: Prompt) -> str | None:
        """How a prompt differs from the strings that the model was trained on, and what it reads in
        it.
        """
        letters = self.tokenizer.model_max_length - 2
        # Quotes and blanks are dropped by design; anything else that the tokenizer drops or changes
        # is a surprise to the user.
        asked_text = re.sub(r'["\s]', "", prompt.prompt)
        read_text = "".join(self.tokenizer.tokenize(asked_text))
        # A folder does not say which alphabets it was trained on; its vocabulary has them whole.
        alphabets = [
            alphabet
            for alphabet, known in CHARACTERS.items()
            if known[0] in self.tokenizer.get_vocab()
        ]
        # Each string of the training has letters of one alphabet.
        is_of_one_alphabet = any(
            set(read_text) <= set(CHARACTERS[alphabet]) for alphabet in alphabets
        )
        if asked_text == read_text and len(read_text) == letters and is_of_one_alphabet:
            return None
        kinds = " or ".join(DESCRIPTIONS[alphabet] for alphabet in alphabets)
        return (
            f"it was trained on {letters} {kinds} and reads {read_text!r} in"
            f" {shorten_value(prompt.prompt)}"
        )

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """As ``ebbflow.models.base.Model.predict_velocity``."""
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            # Never truncated to an integer: rollout and training must agree.
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def decode_latents(self, latents: Tensor) -> np.ndarray:
        """As ``ebbflow.models.base.Model.decode_latents``."""
        # [N, 1, H, W] in [-1, 1] to uint8 [N, H, W, 3], three equal channels.
        pixels = (latents.float() * PIXEL_SCALE + PIXEL_SHIFT).clamp(-1, 1)
        grey = ((pixels + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
        return grey.transpose(0, 2, 3, 1).repeat(3, axis=3)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """As ``ebbflow.models.base.Model.decode_with_gradient``."""
        # Not rounded to 256 levels, whose gradient would be 0.
        grey = ((latents.float() * PIXEL_SCALE + PIXEL_SHIFT).clamp(-1, 1) + 1) / 2
        return grey.expand(-1, 3, -1, -1)

    def encode_images(self, images: np.ndarray) -> Tensor:
        """As ``ebbflow.models.base.Model.encode_images``."""
        _, height, width = self.latent_shape
        if images.shape[1:] != (height, width, 3):
            raise ModelError(
                f"images of shape {images.shape[1:]}: the model draws {(height, width, 3)}; resize"
                " them"
            )
        return encode_grey_images(images.mean(axis=3)).to(self.text_encoder.device)

    def list_blocks(self) -> list[nn.Module]:
        """As ``ebbflow.models.base.Model.list_blocks``."""
        return list(self.transformer.transformer_blocks)

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``."""
        silence_transformers()
        for part in PIPELINE_PARTS:
            getattr(self, part).save_pretrained(folder / part)
        absent = {part: [None, None] for part in ABSENT_PARTS}
        index = {"_class_name": "StableDiffusion3Pipeline", **PIPELINE_PARTS, **absent}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
        _, height, width = self.latent_shape
        (folder / SIZE).write_text(json.dumps({"height": height, "width": width}, indent=2))


def encode_grey_images(grey: np.ndarray) -> Tensor:
    """Grey images, [N, height, width] in 0 to 255, as latents, float32 [N, 1, height, width]."""
    pixels = torch.from_numpy(grey).float()[:, None] / 127.5 - 1
    return (pixels - PIXEL_SHIFT) / PIXEL_SCALE


def _read_network(kind: Any, folder: Path) -> Any:
    """A network with all of its weights: both libraries would draw those that are missing at
    random, with a warning.
    """
    network, report = kind.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    misfits = sorted(
        str(name) for key in ("missing_keys", "unexpected_keys") for name in report[key]
    )
    if misfits:
        raise ValueError(
            f"{folder.name}: {len(misfits)} weights are missing or left over, first {misfits[0]}"
        )
    return network


def build_glyph_model(config: GlyphTrainingConfig) -> GlyphModel:
    """A glyph model with random weights (1.7 million parameters, and a text encoder of 57
    thousand).
    """
    transformer = SD3Transformer2DModel(
        sample_size=max(config.height, config.width),
        patch_size=PATCH,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=max(config.height, config.width) // PATCH,
        qk_norm="rms_norm",
    )
    tokenizer = build_letter_tokenizer(config.letters, "".join(config.alphabet_characters))
    text_encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=config.letters + 2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return GlyphModel(
        transformer,
        text_encoder,
        tokenizer,
        FlowMatchEulerDiscreteScheduler(),
        config.height,
        config.width,
    )


def build_letter_tokenizer(letters: int, alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """A token per letter of the alphabet; everything else in a prompt (quotes, spaces) is dropped
    by the normaliser.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    # <end> must not have id 2: transformers then pools at the largest id, a rule kept for CLIP's
    # first checkpoints.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # Small letters are read as capitals unless the alphabet has them.
    folded = "".join(letter for letter in alphabet.lower() if letter not in alphabet)
    # Whole alphabets as a class of a regular expression: A-Za-z.
    ranges = "".join(
        f"{known[0]}-{known[-1]}" for known in CHARACTERS.values() if known[0] in alphabet + folded
    )
    steps: list[Any] = [normalizers.Replace(Regex(f"[^{ranges}]"), "")]
    if folded:
        # A sequence in the sequence: a flat list would do the same, and change tokenizer.json and
        # with it the digest of every base model.
        steps.append(
            normalizers.Sequence([normalizers.Replace(letter, letter.upper()) for letter in folded])
        )
    tokenizer.normalizer = normalizers.Sequence(steps)
    # Every letter is a token; <start> and <end> stand around them.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(token, vocabulary[token]) for token in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=letters + 2,
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
