"""Generate images with a registered policy; the MLflow model flavour and ``ebbflow draw`` call
this.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model, ModelError, load_model
from ebbflow.models.base import device_of
from ebbflow.models.encoding import Embeddings, embed_prompts
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    ALLOW_CODE,
    read_policy_metadata,
    require_allowed_code,
    require_base,
)

MAX_BATCH = 64
MAX_LATENTS = 2**19
"""Elements of the latents of a pass: of SD3 eight images of 512 x 512, or two of 1024 x 1024."""

NOT_FINITE = (
    "the picture has values that are not finite, so there is none; take another version, or train"
    " in another model.precision"
)


class GeneratedImage(NamedTuple):
    """What became of a prompt.

    Attributes:
        image: PNG bytes, animated for a video.
        error: why there is no image.
        warning: what to know of the image.
    """

    image: bytes | None = None
    error: str | None = None
    warning: str | None = None


def generate_images(
    base: Path,
    policy: Path,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    allowed_code: Collection[str] = (),
) -> list[GeneratedImage]:
    """``iterate_images`` in the order of the prompts."""
    drawn = dict(iterate_images(base, policy, prompts, seeds, allowed_code))
    return [drawn[index] for index in range(len(prompts))]


def load_served_model(
    base: Path, policy: Path, allowed_code: Collection[str] = ()
) -> tuple[Model, SamplerConfig]:
    """The model with the policy's weights, which stays in memory for the next call, and the
    sampler.

    Raises:
        ArtifactError, PolicyError, ModelError: as ``iterate_images``.
    """
    metadata = read_policy_metadata(policy)
    require_allowed_code(
        metadata, policy, [*os.environ.get(ALLOW_CODE, "").split(","), *allowed_code]
    )
    return _load_policy_model(base, policy), SamplerConfig(
        name=metadata.sampler, steps=metadata.steps, eta=metadata.eta
    )


def iterate_images(
    base: Path,
    policy: Path,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    allowed_code: Collection[str] = (),
) -> Iterator[tuple[int, GeneratedImage]]:
    """An image per prompt with its index, by the sampler, with the steps and in the size that the
    policy was evaluated with.

    An image depends on its own prompt and seed: the other prompts of a batch do not change its
    noise, and its pixels by rounding only. A prompt that cannot be drawn gets an error instead.
    ``EBBFLOW_ALLOW_CODE`` lists code that the policy may name, separated by commas.

    Args:
        seeds: of the noise, each from 0 to 2^63 - 1.
        allowed_code: as ``EBBFLOW_ALLOW_CODE``.

    Raises:
        ArtifactError: a folder is not what was committed.
        PolicyError: the policy was trained from another base model, or names code that is not
            allowed.
        ModelError: the base model cannot be read.
    """
    model, sampler = load_served_model(base, policy, allowed_code)
    size = max(1, min(MAX_BATCH, MAX_LATENTS // math.prod(model.latent_shape)))
    with tqdm(total=len(prompts), desc="drawing", unit="image", disable=None) as progress:
        for encoded, indices in _encode_prompts(model, prompts, range(len(prompts))):
            for part in (indices[start : start + size] for start in range(0, len(indices), size)):
                yield from zip(
                    part,
                    _generate_pass(model, encoded, [(prompts[i], seeds[i]) for i in part], sampler),
                    strict=True,
                )
                progress.update(len(part))


def _encode_prompts(
    model: Model, prompts: Sequence[Prompt], indices: Sequence[int]
) -> Iterator[tuple[Embeddings | str, Sequence[int]]]:
    """Prompts that are encoded together, or what is wrong with a single one, with their indices.

    What cannot be encoded is halved until the prompt at fault is alone. Two images to edit may also
    only not go together.
    """
    if not indices:
        return
    try:
        encoded: Embeddings | str = embed_prompts(model, [prompts[index] for index in indices])
    except (ModelError, ValueError) as error:
        middle = len(indices) // 2
        if middle:
            yield from _encode_prompts(model, prompts, indices[:middle])
            yield from _encode_prompts(model, prompts, indices[middle:])
            return
        encoded = str(error)
    yield encoded, indices


def _generate_pass(
    model: Model,
    encoded: Embeddings | str,
    rows: Sequence[tuple[Prompt, int]],
    sampler: SamplerConfig,
) -> Iterator[GeneratedImage]:
    """The images of prompts with their seeds, in one pass."""
    if isinstance(encoded, str):
        yield GeneratedImage(error=encoded)
        return
    prompts, seeds = zip(*rows, strict=True)
    keys = SampleKeys(
        0, [0] * len(seeds), seeds
    )  # a seed is the number of the sample, so that a batch may have many
    conditioning = encoded(prompts).to(device_of(model))
    rollouts = generate_samples(model, conditioning, keys, sampler, micro_batch=len(seeds))
    images = encode_pngs(model.decode_latents(rollouts.latents))
    unguided = conditioning.negative is None
    for prompt, image, finite in zip(prompts, images, rollouts.finite_samples, strict=True):
        yield (
            GeneratedImage(image, warning=_collect_warnings(model, prompt, unguided))
            if finite
            else GeneratedImage(error=NOT_FINITE)
        )


def _collect_warnings(model: Model, prompt: Prompt, unguided: bool) -> str | None:
    """What to know of a picture: families may say what they were trained on, and most cannot."""
    said = getattr(model, "describe_unseen_letters", lambda prompt: None)(prompt)
    ignored = (
        "negative_prompt is ignored, as the policy draws without guidance"
        if unguided and prompt.negative_prompt
        else None
    )
    return "; ".join(filter(None, (said, ignored))) or None


@lru_cache(maxsize=1)
def _load_policy_model(base: Path, policy: Path) -> Model:
    metadata = read_policy_metadata(policy)
    require_base(metadata, base, policy)
    model = load_model(base, metadata.served_model)
    Policy(model, metadata.config, seed=0).load_folder(policy)
    return model
