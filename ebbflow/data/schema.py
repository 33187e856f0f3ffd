"""The Arrow schemas of every table that passes between stages, in one place.

Sample tables are keyed by ``(prompt_id, sample)``. ``sample`` numbers the samples of a prompt
within a stage; with the stage's seed the key fixes the noise (``ebbflow.seeding``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("negative_prompt", pa.string(), nullable=False),
        # The text that an image should show; null where the prompt names none.
        pa.field("target", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        # The source's other columns, as a JSON object.
        pa.field("metadata", pa.string(), nullable=False),
        # PNG of the image to edit, or of several, one file after another; null for text-to-image.
        pa.field("image", pa.binary()),
    ]
)

SPLITS = ("train", "validation", "held_out")

SAMPLE_KEY = [
    pa.field("prompt_id", pa.int64(), nullable=False),
    pa.field("sample", pa.int64(), nullable=False),
]
KEY = [field.name for field in SAMPLE_KEY]


ROLLOUT_LAYOUT = 2
"""Of rollout shards, in their metadata. Layout 1 had latents as tensors of Arrow and no column
``finite``.
"""
LATENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Of an element of a stored latent, by its precision."""


def build_rollout_schema(latent_shape: Sequence[int], precision: str = "float32") -> pa.Schema:
    """Schema of a rollout shard: of every sample its final latent, whether that is finite, and its
    image or video.

    Latents are rows of bytes, little-endian and in C order, because nested columns take several
    times as long to read. Images are PNG, videos animated PNG.
    """
    return pa.schema(
        [
            *SAMPLE_KEY,
            pa.field("policy_version", pa.int64(), nullable=False),
            pa.field(
                "latent",
                pa.binary(LATENT_BYTES[precision] * math.prod(latent_shape)),
                nullable=False,
            ),
            # Scoring fails the samples that are not, and does not read their latents for that.
            pa.field("finite", pa.bool_(), nullable=False),
            pa.field("image", pa.binary(), nullable=False),
        ]
    )


def build_score_schema(metrics: list[str]) -> pa.Schema:
    """Schema of a score table: the combined reward, a nullable column per metric, and why a scorer
    failed.
    """
    return pa.schema(
        [
            *SAMPLE_KEY,
            # Null, as every metric is, where a scorer failed: a failed score is not a score of 0.
            pa.field("reward", pa.float64()),
            *(pa.field(name, pa.float64()) for name in metrics),
            pa.field("failure", pa.string()),
        ]
    )


ADVANTAGES = pa.schema([*SAMPLE_KEY, pa.field("advantage", pa.float32(), nullable=False)])


def name_statistic_column(name: str) -> str:
    """The column of a statistic of the images: no reward can be called like this."""
    return f"statistic/{name}"


def build_evaluation_schema(metrics: list[str], statistics: Sequence[str] = ()) -> pa.Schema:
    """Schema of an evaluation: every sample with its image (PNG) or video (animated PNG), a
    nullable column per metric and per statistic of the images, and why a scorer failed.
    """
    return pa.schema(
        [
            *SAMPLE_KEY,
            pa.field("split", pa.string(), nullable=False),
            # The prompt's set, as in the prompt table; older tables lack it.
            pa.field("source", pa.string()),
            pa.field("prompt", pa.string(), nullable=False),
            pa.field("target", pa.string()),
            pa.field("image", pa.binary(), nullable=False),
            *(pa.field(name, pa.float64()) for name in metrics),
            *(pa.field(name_statistic_column(name), pa.float64()) for name in statistics),
            pa.field("failure", pa.string()),
        ]
    )
