"""The adapters against diffusers' pipelines at drawn sizes, prompts, batches and guidance: whatever
a recipe may ask for, the latents are the pipeline's.
"""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_cases import (
    COARSE,
    EVERY,
    FIRST_AND_LAST,
    LONG,
    NEWEST,
    draws_videos,
    edits,
    guided,
    our_latents,
    prompts,
    their_latents,
)

CASES = 11
"""For each tiny folder, over 200 in all."""
WORDS = [
    "a",
    "red",
    "sign",
    "on",
    "café's",
    "wall:",
    "4",
    "“OPEN”,",
    "雨",
    "&",
    "<b>two</b>",
    "cats",
]
NO_NEGATIVES = ("flux2_klein",)
"""Whose pipelines guide away from the empty prompt alone."""


def draw_text(rng, longest=60):
    """Few words or many, none sometimes, and now and then more than any pipeline reads."""
    if rng.random() < 0.1:
        return LONG
    return " ".join(rng.choice(WORDS, size=int(rng.integers(longest) * rng.random())))


def draw_config(name, rng):
    """Keys of the model: a proportion between 1 : 4 and 4 : 1, guidance, frames."""
    step = 32 if name in COARSE else 16
    # The VAE of LTX-2 decodes no latent of one pixel, which is 32 pixels of an image.
    smallest = 64 if name in COARSE else 32
    height, width = (step * int(rng.integers(smallest // step, 128 // step + 1)) for _ in range(2))
    config = {"height": height, "width": width}
    config["guidance"] = float(rng.choice([1.0, 1.5, 4.0, 7.5]))
    if draws_videos(name) and rng.random() < 0.5:
        config["frames"] = 9 if name.startswith("ltx") else 5
    if name in FIRST_AND_LAST:
        config["frames"] = int(rng.choice([5, 9]))
    if name in ("wan_a14b", "wan_i2v") and config["guidance"] > 1 and rng.random() < 0.7:
        config["guidance_2"] = float(rng.choice([1.0, 3.0]))
    return config


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(
            name,
            case,
            marks=[pytest.mark.exhaustive] if case or name in NEWEST else [],
        )
        for name in EVERY
        for case in range(CASES)
    ],
)
def test_latents_are_the_pipelines(tiny, peer, name, case):
    rng = np.random.default_rng([EVERY.index(name), case])
    count = int(rng.integers(1, 4))
    texts = [draw_text(rng) for _ in range(count)]
    negatives = [
        draw_text(rng, 20) if guided(name) and name not in NO_NEGATIVES else ""
        for _ in range(count)
    ]
    size = (16, 16)
    if edits(name):
        # Both refuse smaller pictures than this for flux2_edit.
        size = tuple(int(edge) for edge in rng.integers(64 if name == "flux2_edit" else 24, 130, 2))
    model = tiny(name, **draw_config(name, rng))
    further = []
    if getattr(model, "max_images", 1) is None:
        edges = rng.integers(64, 130, (int(rng.integers(3)), 2))
        further = [tuple(int(edge) for edge in pair) for pair in edges]
    wanted = prompts(name, texts, negatives, size, further)
    ours = our_latents(model, wanted, steps=2)
    latents = their_latents(peer(name), model, wanted, steps=2)
    assert ours.isfinite().all()
    assert (ours - latents).abs().max() < 2e-5 * ours.abs().max()


@pytest.mark.parametrize(("size", "scaled"), [((63, 71), (48, 96)), ((101, 66), (64, 64))])
def test_kontext_measures_an_image_by_its_edges_cut_to_multiples(tiny, peer, size, scaled):
    """63 x 71 pixels are nearer to a square, and the 48 x 64 of them to 48 x 96."""
    model = tiny("flux_kontext")
    wanted = prompts("flux_kontext", ["a cat"], [""], size)
    ours = our_latents(model, wanted, steps=2)
    latents = their_latents(peer("flux_kontext"), model, wanted, steps=2)
    assert (ours - latents).abs().max() < 2e-5 * ours.abs().max()
    height, width = model.encode_prompts(wanted)["image"].shape[2:]
    factor = model.pipeline.vae_scale_factor
    assert (width * factor, height * factor) == scaled
