"""Two processes that share the tokens of every sample train an offline stage as one process
does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName
from safetensors.torch import load_file

from benchmarks.tiny_models import build_tiny
from ebbflow.models import load_model
from ebbflow.models.base import ModelError
from ebbflow.models.context_parallel import fits_ulysses, require_shareable_tokens
from ebbflow.models.sizes import check_shared_tokens
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.distributed import Ranks, join_process_group
from tests.glyph_stages import small_stage
from tests.offline_stage import write_offline_stage
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

LATER = [
    pytest.param(name, marks=pytest.mark.exhaustive)
    for name in ("wan", "qwen_image", "flux2_klein", "flux2", "wan_a14b", "ltx_video")
]
"""Families that share tokens and take text alone; that of each other network once."""
STAGE = {
    "kind": "offline",
    "algorithm": {"name": "diffusion_nft", "noise_levels": 1},
    "group_size": 2,
    "micro_batch": 2,
    "prompts": 4,
    "shards": 2,
    "epochs": 1,
    "batch_size": 4,
    "sampler": {"steps": 2},
    "optimizer": {
        "lr": 0.1,
        "eps": 1.0,
    },  # AdamW's first steps are signs, which turn rounding into full steps
    "drift_alarm": 1e9,
}


@pytest.fixture
def begin(tmp_path, make_prompts, scorer):
    """``begin("flux")``: (folder of a stage with its rollouts, its recipe, the tiny base model)."""

    def begun(family: str) -> tuple[Path, Any, Path]:
        base = tmp_path / "base"
        with write_new_folder(base) as unfinished:
            build_tiny(family, unfinished)
        model = {"family": family, "path": str(base), "height": 64, "width": 64, "max_tokens": 32}
        stages = [small_stage({"kind": "online"}), small_stage(STAGE)]
        recipe = Recipe.model_validate(
            {"model": model, "policy": {"train": "lora", "rank": 2}, "stages": stages}
        )
        write_offline_stage(tmp_path, recipe, base, make_prompts(4), scorer)
        return tmp_path, recipe.model_dump(mode="json"), base

    return begun


def train(stage: tuple[Path, Any, Path], name: str, context_parallel: int) -> MetricsRecorder:
    folder, recipe, base = stage
    ctx = StageContext(Recipe.model_validate(recipe), 0, 1)
    recorder = MetricsRecorder()
    with join_process_group() as ranks, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_offline_folder(
            ctx,
            StageFolders(base, folder / "start", folder / "prompts.parquet", folder / name),
            sorted(folder.glob("rollouts-*")),
            folder / "advantages.parquet",
            recorder,
            Checkpoints(ctx, folder / f"kept-{name}-{ranks.rank}"),
            context_parallel=context_parallel,
        )
    return recorder


def rows(recorder: MetricsRecorder) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("seconds", "ms_per"))}
        for row in recorder.metrics_rows
    ]


@pytest.mark.parametrize("family", ["flux", *LATER])
def test_two_processes_that_share_tokens_learn_what_one_learns(begin, family):
    stage = begin(family)
    alone = rows(train(stage, "alone", 1))
    as_two_ranks(train_and_compare, stage, alone)
    for path in (stage[0] / "alone").rglob("*.safetensors"):
        found = load_file(stage[0] / "together" / path.relative_to(stage[0] / "alone"))
        expected = load_file(path)
        assert (
            max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5
        )
    learnt = load_file(next((stage[0] / "alone").glob("*.safetensors")))
    assert max(float(value.abs().max()) for key, value in learnt.items() if "lora_B" in key) > 1e-4


def train_and_compare(stage: tuple[Path, Any, Path], alone: list[dict[str, float]]) -> None:
    together = rows(train(stage, "together", 2))
    assert len(together) == len(alone) == 2
    for one, both in zip(alone, together, strict=True):
        assert both == pytest.approx(one, rel=1e-3, abs=1e-6)


def test_ranks_that_share_tokens_have_one_number_among_those_with_rows():
    assert [Ranks(rank, 8).row_ranks(4) for rank in (0, 3, 4, 7)] == [
        Ranks(0, 2),
        Ranks(0, 2),
        Ranks(1, 2),
        Ranks(1, 2),
    ]
    assert Ranks(5, 8).row_ranks(1) == Ranks(5, 8)


@pytest.mark.parametrize(
    ("family", "keys", "ranks", "said"),
    [
        (
            "sd3",
            {},
            2,
            "train_context_parallel = 2: the tokens of SD3Model cannot be shared, as",
        ),
        (
            "wan",
            {"height": 32, "width": 96},
            4,
            "train_context_parallel = 4: the latent has 3 tokens, fewer than processes; take fewer,"
            " or another size, model.frames or model.max_tokens",
        ),
        ("ltx2", {"frames": 9}, 16, "the video has 8 tokens, fewer than processes"),
        ("ltx2", {"frames": 1}, 2, "the sound has 1 tokens, fewer than processes"),
    ],
    ids=["family", "latents", "video", "sound"],
)
def test_what_cannot_be_shared_is_refused_before_anything_is_sent(
    tiny_recipe, family, keys, ranks, said
):
    config = tiny_recipe(family, keys).model
    model = load_model(Path(config.path), config)
    with pytest.raises(ModelError) as error:
        require_shareable_tokens(model, ranks)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("family", "keys", "ranks", "exchanges"),
    [
        ("flux", {}, 2, True),
        ("flux", {}, 3, False),
        ("flux", {"max_tokens": 33}, 2, False),
        ("wan", {"height": 32, "width": 96}, 2, False),
        ("wan", {"height": 32, "width": 128}, 2, True),
        ("ltx2", {"frames": 9}, 2, False),
        ("flux_kontext", {}, 2, False),
    ],
    ids=["even", "heads", "text", "odd latents", "even latents", "sound", "images to edit"],
)
def test_heads_are_exchanged_where_all_numbers_divide(tiny_recipe, family, keys, ranks, exchanges):
    config = tiny_recipe(family, keys).model
    model = load_model(Path(config.path), config)
    require_shareable_tokens(model, ranks)
    assert fits_ulysses(model, ranks) is exchanges


def test_attention_that_cannot_be_shared_is_refused(tiny_recipe):
    config = tiny_recipe("flux").model
    model = load_model(Path(config.path), config)
    for processor in (
        model.transformer.attn_processors.values()
    ):  # of this network alone: diffusers' own setter is for all
        processor._attention_backend = AttentionBackendName._NATIVE_EFFICIENT
    with pytest.raises(
        ModelError,
        match="attention '_native_efficient' cannot share tokens; set model.attention to native",
    ):
        require_shareable_tokens(model, 2)


def test_a_compiled_network_is_refused(tiny_recipe):
    config = tiny_recipe("flux", {"compile": "blocks"}).model
    with pytest.raises(
        ModelError,
        match="train_context_parallel = 2 is for a network that is not compiled; set model.comp",
    ):
        require_shareable_tokens(load_model(Path(config.path), config), 2)


OFFLINE = [{"kind": "online"}, {"kind": "offline"}]


@pytest.mark.parametrize(
    ("family", "model", "stages", "ranks", "said"),
    [
        (
            "sd3",
            {},
            OFFLINE,
            2,
            (
                "the tokens of SD3Model cannot be shared, as diffusers has no plan of"
                " its network for it; leave it out of the deployment, or take a family of"
            ),
        ),
        (
            "flux",
            {"compile": "blocks"},
            OFFLINE,
            2,
            "is for a network that is not compiled; set model.compile: off",
        ),
        (
            "flux",
            {"attention": "_native_efficient"},
            OFFLINE,
            2,
            "attention '_native_efficient' cannot share tokens",
        ),
        (
            "flux",
            {"attention": "nothing"},
            OFFLINE,
            2,
            "attention 'nothing' cannot share tokens; set model.attention to native",
        ),
        ("flux", {"max_tokens": 1}, OFFLINE, 2, "the prompt has 1 tokens, fewer than processes"),
        (
            "flux",
            {},
            [
                {
                    "kind": "online",
                    "placement": "ray",
                    "resources": {"training": {"count": 3}},
                }
            ],
            2,
            " does not divide resources.training.count = 3 of a stage with placement: ray; take a",
        ),
        (
            "flux",
            {},
            [{"kind": "offline", "sizes": [{"height": 32, "width": 64}]}],
            2,
            "is for stages of one size",
        ),
        (
            "flux",
            {},
            [{"kind": "offline", "anchor": {"data": {"path": "pictures", "buckets": {}}}}],
            2,
            "is for stages of one size",
        ),
    ],
    ids=["family", "compiled", "attention", "no attention", "text", "ray", "sizes", "anchor"],
)
def test_a_recipe_that_cannot_share_tokens_is_refused_before_it_costs_anything(
    tiny_recipe, family, model, stages, ranks, said
):
    with pytest.raises(ModelError) as error:
        check_shared_tokens(tiny_recipe(family, model, stages=stages), ranks)
    assert str(error.value).startswith(f"train_context_parallel = {ranks}")
    assert said in str(error.value)


def test_a_recipe_without_offline_stages_shares_no_tokens_and_others_may(tiny_recipe):
    check_shared_tokens(tiny_recipe("sd3", stages=[{"kind": "online"}]), 2)
    check_shared_tokens(tiny_recipe("sd3"), 1)
    check_shared_tokens(tiny_recipe("flux"), 2)


def test_of_a_model_that_is_not_known_the_family_is_checked():
    there = {"path": "s3://bucket/models/base"}
    check_shared_tokens(
        Recipe.model_validate({"model": {"family": "flux"} | there, "stages": OFFLINE}), 3
    )
    with pytest.raises(ModelError, match="the tokens of SD3Model cannot be shared"):
        check_shared_tokens(
            Recipe.model_validate({"model": {"family": "sd3"} | there, "stages": OFFLINE}), 2
        )
