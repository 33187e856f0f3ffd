"""Processes of a colocated stage that share the tokens of every sample generate the samples of one
process, and learn what it learns from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from colocated_cases import (
    CASES,
    LORA,
    NFT,
    check_metrics,
    check_weights,
    prepare_folder,
    recipe_of,
    run_stage,
)
from safetensors.torch import load_file

from benchmarks.tiny_models import build_tiny
from ebbflow.models.base import ModelError
from ebbflow.models.sizes import check_shared_tokens
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.distributed import join_process_group
from tests.two_processes import as_ranks

OFTEN = ("trajectories", "average")
"""Those that ``make test`` has two ranks do."""
CASES_OF_FLUX = (
    *OFTEN,
    "corrected",
    "student",
    "reward gradients",
    "chosen prompts",
)
"""Replay, a validation, a correction, a second network that is trained, graphs of rollouts, and
prompts whose samples are generated before and after those of a step.
"""
GUIDED = "guided trajectories"
"""Guidance without the gradient of the negative prompts: two passes for each prediction."""
FAMILIES = (
    "wan",
    "wan_a14b",
    "qwen_image",
    "flux2",
    "flux2_klein",
    "ltx_video",
    "ltx2",
    "flux2_edit",
)


def recipe_of_family(family: str, base: Path, case: str, placement: str) -> Recipe:
    size = {"height": 64, "width": 64, "max_tokens": 32}
    frames = {"frames": 9} if family == "ltx2" else {}
    model = {"family": family, "path": str(base), **size, **frames}
    # In bfloat16 another order of rounding would be all that is seen.
    exact = {"rollout_precision": None}
    # Two passes for the three samples of a group, so that each rank has some to decode.
    passes = {"micro_batch": 2}
    if case == GUIDED:
        case = "trajectories"
        exact |= {"negative_gradient": False}
        model |= {"guidance": 3.0}
    stage = {"policy": LORA, **CASES[case], **exact, **passes, "model": model}
    # The second step has samples of weights that the first one trained; a third repeats it. Two
    # groups of ranks share three prompts unequally.
    stage["steps"] = 2
    stage["prompts_per_step"] = 3
    stage["drift_alarm"] = 1e9
    # The two steps of the window, and one that is not trained.
    stage["sampler"] = {"steps": 3, **stage.get("sampler", {})}
    return recipe_of(case, placement, **stage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    prepare_folder(folder)
    return folder


@pytest.fixture(scope="module")
def begin(folder):
    """``begin("flux")``: the folder of a tiny base model."""

    def build(family: str) -> Path:
        base = folder / family
        if not base.exists():
            with write_new_folder(base) as unfinished:
                build_tiny(family, unfinished)
        return base

    return build


def run_as_ranks(folder: Path, stages: Mapping[str, tuple[Path, Recipe]], group: str) -> None:
    """Run stages one after another in this group, whose ranks share tokens in pairs."""
    with join_process_group() as ranks:
        results = {
            name: run_stage(
                base,
                folder,
                f"{name}-{group}",
                recipe,
                ranks.world if group.endswith("replicas") else 1,
                context_parallel=2,
            )
            for name, (base, recipe) in stages.items()
        }
    (folder / f"results-{group}-{ranks.rank}.json").write_text(json.dumps(results))


def check_stages(
    folder: Path, bases: Mapping[str, Path], cases: Sequence[str], world: int, replicated: bool
) -> None:
    """Check that ``world`` ranks, which share tokens in pairs, do what one process does."""

    def build(placement: str) -> dict[str, tuple[Path, Recipe]]:
        return {
            f"{family}-{case}": (base, recipe_of_family(family, base, case, placement))
            for family, base in bases.items()
            for case in cases
        }

    for name, (base, recipe) in build("in_process").items():
        if not (folder / f"alone-{name}.json").exists():
            one = run_stage(base, folder, f"{name}-alone", recipe)
            (folder / f"alone-{name}.json").write_text(json.dumps(one))
    group = f"{world}-{'replicas' if replicated else 'shards'}"
    stages = build("colocated")
    as_ranks(world, run_as_ranks, folder, stages, group)
    results = [
        json.loads((folder / f"results-{group}-{rank}.json").read_text()) for rank in range(world)
    ]
    for name in stages:
        one = json.loads((folder / f"alone-{name}.json").read_text())
        first, *others = [result[name] for result in results]
        for other in others:
            # All ranks know the same, and who shares a sample has the same of it to the last bit.
            assert other["samples"] == first["samples"]
            assert other["metrics"] == first["metrics"]
        if world == 2:
            # Both have all samples, and each decodes some of them.
            decoded = [result[name]["decoded"] for result in results]
            assert sum(decoded) == one["decoded"]
            assert min(decoded) > 0
        check_samples(folder, name, group)
        check_metrics(first["metrics"], one["metrics"])
        check_weights(folder / f"trained-{name}-alone", folder / f"trained-{name}-{group}", 1e-5)


def check_samples(folder: Path, name: str, group: str) -> None:
    alone = load_file(folder / f"latents-{name}-alone.safetensors")
    shared = load_file(folder / f"latents-{name}-{group}.safetensors")
    assert alone.keys() == shared.keys()
    assert len(alone) > 0
    for key, latents in alone.items():
        # Half of the tokens are other shapes of the same products, in float32.
        assert (latents - shared[key]).abs().max() < 1e-4 * latents.abs().max(), key


def test_two_ranks_that_share_tokens_do_what_one_process_does(folder, begin):
    check_stages(folder, {"flux": begin("flux")}, OFTEN, 2, replicated=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world", "replicated", "cases"),
    [(2, True, CASES_OF_FLUX[len(OFTEN) :]), (4, False, CASES_OF_FLUX)],
    ids=["2", "4"],
)
def test_the_other_algorithms_do_what_one_process_does(folder, begin, world, replicated, cases):
    """Four ranks are two groups, which each have other requests."""
    check_stages(folder, {"flux": begin("flux")}, cases, world, replicated)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_other_network_does_what_one_process_does(folder, begin, family):
    check_stages(folder, {family: begin(family)}, ["trajectories"], 2, replicated=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicated", [True, False])
def test_negative_prompts_without_gradient_do_what_one_process_does(folder, begin, replicated):
    check_stages(folder, {"wan": begin("wan")}, [GUIDED], 2, replicated)


@pytest.mark.parametrize(
    ("family", "stage", "said"),
    [
        ("sd3", {}, "the tokens of SD3Model cannot be shared, as diffusers has no plan"),
        ("flux", {"sizes": [{"height": 32, "width": 64}]}, "is for stages of one size"),
        (
            "flux",
            {**NFT, "rollout_cache": {"name": "first_block"}},
            "each process would decide by its own tokens when rollout_cache.name = 'first_block'",
        ),
        (
            "flux",
            {"placement": "ray"},
            " does not divide resources.training.count = 1 of a stage with placement: ray; take a",
        ),
    ],
)
def test_a_colocated_stage_that_cannot_share_tokens_is_refused(tiny_recipe, family, stage, said):
    stage = {"kind": "online", "placement": "colocated", **stage}
    recipe = tiny_recipe(family, stages=[stage])
    with pytest.raises(ModelError) as error:
        check_shared_tokens(recipe, 2)
    assert str(error.value).startswith("train_context_parallel = 2")
    assert said in str(error.value)
    # The stage itself refuses what the check would have, before it loads anything.
    if family == "flux" and stage["placement"] == "colocated":
        nowhere = Path("nowhere")
        with pytest.raises(ModelError) as again:
            train_online_folder(
                StageContext(recipe, 0, 0),
                StageFolders(nowhere, nowhere, nowhere, nowhere),
                MetricsRecorder(),
                context_parallel=2,
            )
        assert str(again.value) == str(error.value)
