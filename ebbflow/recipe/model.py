"""The base model of a run: its family, where its weights come from, and how it generates."""

from __future__ import annotations

import string
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ebbflow.recipe.base import Strict
from ebbflow.recipe.families import FAMILIES, find_family
from ebbflow.recipe.plugins import validate_name_or_path
from ebbflow.recipe.pretrained import PretrainedSourceConfig

Precision = Literal["float32", "bfloat16", "float16"]
Alphabet = Literal["capitals", "digits", "lower_case"]
CHARACTERS: dict[Alphabet, str] = {
    "capitals": string.ascii_uppercase,
    "digits": string.digits,
    "lower_case": string.ascii_lowercase,
}
DESCRIPTIONS: dict[Alphabet, str] = {
    "capitals": "capital letters A-Z",
    "digits": "digits 0-9",
    "lower_case": "small letters a-z",
}


class GlyphTrainingConfig(Strict):
    """Training of the glyph base model from scratch, if ``model.path`` is not set. With the
    defaults nothing is trained: that model comes with the package."""

    height: int = Field(16, ge=16, le=64, multiple_of=8)
    width: int = Field(32, ge=16, le=256, multiple_of=8)
    letters: int = Field(4, ge=1, le=16)
    """Number of letters per string."""
    alphabets: list[Alphabet] = Field(["capitals"], min_length=1)
    """Alphabets of the strings; each string uses one of them. A model without ``lower_case`` reads
    small letters as capitals."""
    steps: int = Field(900, ge=1)
    batch: int = Field(64, ge=1)
    lr: float = Field(2e-3, gt=0, le=1)
    ema: float = Field(0.99, ge=0, lt=1)
    caption_noise: float = Field(0.35, ge=0, le=1)
    """Probability of replacing each letter of a caption in the last third of the training. The
    noise leaves reinforcement learning something to improve: without it the base model already
    spells almost everything right."""
    seed: int = Field(0, ge=0, lt=2**63)

    @field_validator("alphabets")
    @classmethod
    def _check_alphabets_differ(cls, alphabets: list[Alphabet]) -> list[Alphabet]:
        if len(set(alphabets)) < len(alphabets):
            raise ValueError(
                f"{', '.join(alphabets)}: each alphabet may be named once; leave out what is there"
                " twice"
            )
        return alphabets

    @property
    def alphabet_characters(self) -> list[str]:
        """Those of each alphabet."""
        return [CHARACTERS[alphabet] for alphabet in self.alphabets]


class FsdpConfig(Strict):
    """Sharding of the weights over the processes that train together (FSDP2). A single process
    ignores these keys."""

    gather: Literal["float32", "bfloat16"] = "float32"
    """Precision of trained weights while they are gathered, and in the network. With ``precision:
    bfloat16``, bfloat16 halves the traffic. Gradients are reduced in float32, and the optimiser's
    weights stay float32."""
    keep_gathered: bool = False
    """In passes without gradient, keep the gathered weights of all blocks from one micro-batch to
    the next. They are sent once, and every process holds the whole network during these passes."""
    prefetch: bool = False
    """Gather the weights of the next block before a block computes, instead of when it ends. This
    helps where GPUs wait for their CPU."""


class ModelConfig(PretrainedSourceConfig):
    """The base model: a folder or repository in the Hugging Face layout of its family, or the glyph
    model, which the run trains."""

    family: Annotated[str, validate_name_or_path(*FAMILIES)] = "glyph"
    """A model family that Ebbflow ships, or ``package.module:Class``, an adapter of your own
    (``docs/extending.md``)."""
    height: int | None = Field(None, ge=8)
    """Height of the images, in pixels. Default: the height of the family's pipeline. The glyph
    model has ``training.height`` instead."""
    width: int | None = Field(None, ge=8)
    """Width of the images, in pixels."""
    frames: int = Field(1, ge=1)
    """Number of frames of a video. 1: the model generates images."""
    expert: Literal["high_noise", "low_noise", "both"] | None = None
    """The transformer to train, for families with two of them (``wan_a14b``, ``wan_i2v``). Default:
    ``high_noise``."""
    guidance: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance (``sd3``, ``wan``; ``qwen_image`` rescales the norm), or
    the guidance that the network takes as an input (``flux``). 1: no guidance."""
    guidance_2: float | None = Field(None, ge=1)
    """Scale of classifier-free guidance of the transformer for low noise, for families with two
    (``guidance_scale_2`` of their pipelines). Default: ``guidance``."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum prompt length, in tokens of the large text encoder. Default: the length of the
    family's pipeline."""
    precision: Precision = "float32"
    """Precision of the network's arithmetic in rollout, training and evaluation, and of frozen
    weights. Latents, log-probs and trained parameters are always float32."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass. This is slower and needs far
    less memory."""
    gradient_checkpointing_every: int = Field(1, ge=1)
    """Recompute one block in every n; the other blocks keep their activations. Larger values are
    faster and take more memory."""
    fsdp: FsdpConfig = FsdpConfig()
    cpu_offload: bool = False
    """Keep the tensors that training rarely needs in main memory: the optimiser's state and the
    copies of the policy. If several processes share the model (FSDP2), its weights and gradients
    are there too, and move to the GPU block by block. This is slower."""
    attention: str | None = None
    """An attention backend of diffusers (``native``, ``flash``, ``_flash_3_hub`` ...). Default: the
    backend that diffusers chooses."""
    compile: Literal["blocks", "off"] = "off"
    """``blocks``: compile the network block by block (``torch.compile``) for rollouts and training.
    It is then a quarter to a third faster, after a minute or more of compilation in each process
    that does not find the result in torch's cache."""
    training: GlyphTrainingConfig = GlyphTrainingConfig()

    @field_validator("compile", mode="before")
    @classmethod
    def _accept_false_as_off(cls, value: object) -> object:
        # YAML 1.1 reads ``off`` without quotes as false.
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check_base_model_is_named(self) -> ModelConfig:
        family = find_family(self.family)
        # A family of the user's own without a record (None) needs a path, too.
        if self.path is None and not (family and family.trains_base_model):
            trained = [name for name, record in FAMILIES.items() if record.trains_base_model]
            raise ValueError(
                f"family = {self.family!r} needs the 'path' of its base model; only"
                f" {' and '.join(trained)} is trained here"
            )
        return self

    @model_validator(mode="after")
    def _check_expert(self) -> ModelConfig:
        family = find_family(self.family)
        if self.expert and family and not family.experts:
            known = ", ".join(name for name, record in FAMILIES.items() if record.experts)
            raise ValueError(
                f"expert = {self.expert!r}: {self.family} has one transformer; leave it out, or"
                f" take {known}"
            )
        return self

    @model_validator(mode="after")
    def _check_guidance_of_low_noise(self) -> ModelConfig:
        if self.guidance_2 is None:
            return self
        family = find_family(self.family)
        if family and not family.experts:
            raise ValueError(
                f"guidance_2 = {self.guidance_2:g}: {self.family} has one transformer; leave it out"
            )
        if self.guidance == 1:
            # The pipeline encodes no negative prompts then, for neither of the two.
            raise ValueError(
                f"guidance_2 = {self.guidance_2:g} without guidance; set guidance above 1, or leave"
                " guidance_2 out"
            )
        return self

    @model_validator(mode="after")
    def _check_memory_keys_have_effect(self) -> ModelConfig:
        # A key that does nothing is an error here and below: who set it counted on its memory.
        if self.gradient_checkpointing_every > 1 and not self.gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing_every = {self.gradient_checkpointing_every} chooses among"
                " recomputed blocks; set gradient_checkpointing: true, or leave it out"
            )
        if self.fsdp.gather == "bfloat16" and self.precision != "bfloat16":
            raise ValueError(
                f"fsdp.gather = 'bfloat16' computes in bfloat16, and precision is {self.precision};"
                " set that, too"
            )
        return self

    @model_validator(mode="after")
    def _check_keys_have_effect(self) -> ModelConfig:
        family = find_family(self.family)
        # Nothing is known of what a family of the user's own ignores.
        if family is None:
            return self
        # A record states a fixed size once, and does not repeat these keys in ``unsupported_keys``.
        size_keys = ("height", "width") if family.has_fixed_size else ()
        keys_without_effect = [
            key
            for key in (*size_keys, *family.unsupported_keys)
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        if keys_without_effect:
            fix = "set training.height and width" if family.trains_base_model else "leave them out"
            raise ValueError(
                f"{', '.join(keys_without_effect)}: the {self.family} model draws what it was"
                f" trained on; {fix}"
            )
        return self


def resize_model(model: ModelConfig, height: int | None, width: int | None) -> ModelConfig:
    """The model with images of another height and width; as they are, where one is None."""
    # ``model_copy`` does not validate: whether the family can generate the size is checked by
    # ``ebbflow.models.sizes``, which needs torch.
    return model.model_copy(
        update={"height": height or model.height, "width": width or model.width}
    )


def find_picture_size(model: ModelConfig) -> tuple[int, int] | None:
    """Height and width of the model's images, in pixels; None where only the loaded model knows
    them.
    """
    family = find_family(model.family)
    # The glyph model has the size that it is trained at.
    size = model.training if family and family.has_fixed_size else model
    return (size.height, size.width) if size.height and size.width else None
