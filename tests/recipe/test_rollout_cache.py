"""``rollout_cache``: which algorithms and networks may generate with one, and what the others are
told.
"""

from __future__ import annotations

import pytest
from stage_cases import keys_of, offline, online

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.digest import compute_digest
from ebbflow.recipe.kinds import find_kind
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.recipe.rollout_cache import FeatureCacheConfig, FirstBlockCacheConfig

FIRST_BLOCK = {"name": "first_block"}
SD3 = {"family": "sd3", "path": "base"}
RATIO = [name for name, config in ALGORITHMS.items() if config.kind == "trajectory"]
REPEATED = [name for name, config in ALGORITHMS.items() if config.kind in ("gradient", "matching")]
ON_FINAL_LATENTS = [
    name for name, config in ALGORITHMS.items() if config.kind in ("forward", "direct_align")
]


def build(stage, model=SD3):
    return Recipe.model_validate({"model": model, "stages": [stage]})


def problem(stage, model=SD3):
    with pytest.raises(RecipeError) as error:
        build(stage, model)
    return str(error.value)


def stage_of(algorithm):
    kind = "online" if "online" in ALGORITHMS[algorithm].stages else "offline"
    return {"kind": kind, "algorithm": keys_of(algorithm), "rollout_cache": FIRST_BLOCK}


def test_every_algorithm_is_in_one_of_the_lists():
    assert sorted(RATIO + REPEATED + ON_FINAL_LATENTS) == sorted(ALGORITHMS)


@pytest.mark.parametrize("algorithm", RATIO)
def test_algorithm_with_a_ratio_is_refused_with_the_way_out(algorithm):
    message = problem(stage_of(algorithm))
    assert (
        f"rollout_cache.name = 'first_block' approximates the network, and {algorithm}" in message
    )
    assert "ratio against the log-probs of the rollout" in message
    assert "leave rollout_cache out, or set algorithm.name to one" in message


@pytest.mark.parametrize("algorithm", REPEATED)
def test_algorithm_that_generates_again_is_refused(algorithm):
    message = problem(stage_of(algorithm))
    assert f"{algorithm} generates the samples of the rollout again" in message


@pytest.mark.parametrize("algorithm", ON_FINAL_LATENTS)
def test_algorithm_on_final_latents_takes_a_cache(algorithm):
    stage = build(stage_of(algorithm)).stages[0]
    assert stage.rollout_cache == FirstBlockCacheConfig()


def test_lossless_accelerator_would_suit_every_algorithm(monkeypatch):
    monkeypatch.setattr(FeatureCacheConfig, "is_lossless", True)
    assert build(stage_of("flow_grpo")).stages[0].rollout_cache
    assert not find_kind("trajectory").trains_on_any_samples


@pytest.mark.parametrize(
    ("stage", "model", "part"),
    [
        (offline("diffusion_dpo", pairs="pairs.parquet"), SD3, "generates nothing"),
        (
            online("diffusion_nft", engine="vllm_omni"),
            SD3,
            "engine = 'vllm_omni' has its own; set engine: diffusers",
        ),
        (
            online("diffusion_nft", shared_initial_noise=True, sampler={"name": "cps", "steps": 6}),
            SD3,
            "predicts equal samples once; leave one of them out",
        ),
        (
            {"kind": "custom", "path": "mine:train"},
            SD3,
            "a stage of your own kind generates as it likes",
        ),
        (
            online("diffusion_nft"),
            SD3 | {"compile": "blocks"},
            "stages.0.rollout_cache.name = 'first_block' is decided in every step, which compiled",
        ),
        (
            online("diffusion_nft"),
            {"family": "flux2", "path": "base"},
            "does not fit the network of model.family = 'flux2'; take taylor_seer, mag, or leave",
        ),
        (
            online("diffusion_nft"),
            {"family": "sana", "path": "base"},
            "model.family = 'sana'; leave rollout_cache out",
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(stage, model, part):
    assert part in problem(stage | {"rollout_cache": FIRST_BLOCK}, model)


def test_recipes_without_a_cache_keep_their_digest():
    stage = online("diffusion_nft")
    without = compute_digest(build(stage))
    assert compute_digest(build(stage | {"rollout_cache": None})) == without
    assert compute_digest(build(stage | {"rollout_cache": FIRST_BLOCK})) != without
