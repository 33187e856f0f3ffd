"""What a preflight check notes about a run that it accepts."""

from pathlib import Path
from typing import Any

import pytest

from ebbflow import run_notes
from ebbflow.evaluation.look import find_needed_prompts, find_smallest_gain
from ebbflow.preflight import check_recipe, read_prompt_table
from ebbflow.recipe import Recipe
from ebbflow.run_notes import describe_passes, describe_run, describe_shares
from tests.preflight_cases import SERVER, on_plain_prompts


@pytest.mark.parametrize(("family", "expected"), [("ltx2", 1), ("ltx_video", 0)])
def test_a_family_whose_pipeline_generates_otherwise_says_so(family: str, expected: int) -> None:
    recipe = Recipe.model_validate({"model": {"family": family, "path": "/models/ltx"}})
    notes = [note for note in describe_run(recipe, None) if "further guidance" in note]
    assert len(notes) == expected
    assert all(note.startswith("model.family = ltx2: video and sound are") for note in notes)


@pytest.mark.parametrize(("held_out", "samples"), [(64, 1), (128, 4)])
def test_the_smallest_gain_that_the_gate_can_prove_is_said(held_out: int, samples: int) -> None:
    recipe = Recipe.model_validate(
        {"prompts": {"held_out": held_out}, "evaluation": {"samples": samples}}
    )
    notes = describe_run(recipe, read_prompt_table(recipe, on_cluster=False))
    promotion = recipe.promotion
    share = promotion.error_budget / promotion.looks_per_year
    gain = find_smallest_gain(held_out, share, samples)
    (note,) = [note for note in notes if note.startswith("the gate decides on")]
    assert f"{held_out} held-out prompts" in note
    assert f"it proves a gain of {gain:.2g} standard deviations" in note
    needed = find_needed_prompts(gain / 2, share, samples)
    assert note.endswith(f"half of that needs about {needed} prompts")


def test_too_few_held_out_prompts_for_any_promotion_are_said(tmp_path: Path) -> None:
    notes = check_recipe(on_plain_prompts(tmp_path), SERVER, on_cluster=False)
    (note,) = [note for note in notes if note.startswith("the gate decides on")]
    assert "8 held-out prompts, which are too few: it promotes nothing below 24" in note


@pytest.mark.parametrize("guardrails", [[], ["jpeg_compressibility"]])
def test_a_recipe_without_guardrails_is_told_so(tmp_path: Path, guardrails: list[str]) -> None:
    notes = check_recipe(
        on_plain_prompts(tmp_path, guardrails=guardrails), SERVER, on_cluster=False
    )
    says_so = any("no guardrails are named" in note for note in notes)
    assert says_so == (not guardrails)


def test_how_often_a_prompt_comes_back_is_said(tmp_path: Path) -> None:
    recipe = on_plain_prompts(tmp_path, rounds=2)
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    # 28 prompts are left to train on; 2 rounds of 7 steps take 8 each: 112.
    assert "28 to train, 4 to validate, 8 held out" in notes[0]
    assert notes[1] == "28 prompts to train on, each sampled about 4 times in the run"


def test_prompts_of_a_stage_from_the_base_model_come_back_in_the_first_round_alone(
    tmp_path: Path,
) -> None:
    online = {"kind": "online", "steps": 7, "prompts_per_step": 8}
    recipe = on_plain_prompts(
        tmp_path, rounds=4, stages=[online | {"only_from_base": True}, online]
    )
    # 28 prompts; 1 round of the one stage and 4 of the other take 56 each: 280.
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    assert notes[1] == "28 prompts to train on, each sampled about 10 times in the run"


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"group_size": 16, "micro_batch": 64}, []),
        (
            {"group_size": 16, "micro_batch": 48, "updates_per_step": 2},
            [
                (
                    "stages.0.micro_batch = 48: rollouts of a step in passes of unequal size (2 of"
                    " 48, 1 of 32 samples); 48 does not divide the 64 samples of an update; 32"
                    " divides every batch of the stage"
                )
            ],
        ),
        (
            {"group_size": 24, "micro_batch": 9, "updates_per_step": 1},
            [
                (
                    "stages.0.micro_batch = 9: passes have 8 samples, as groups of 24 are split"
                    " evenly; 8 divides every batch of the stage"
                )
            ],
        ),
        (
            {"group_size": 7, "micro_batch": 3, "prompts_per_step": 6, "updates_per_step": 4},
            [
                (
                    "stages.0.micro_batch = 3: rollouts of a step in passes of unequal size (6 of"
                    " 3, 12 of 2 samples); 1 divides every batch of the stage"
                )
            ],
        ),
        (
            {"kind": "offline", "batch_size": 100},
            [
                (
                    "stages.0.micro_batch = 64: 64 does not divide the 100 samples of an optimiser"
                    " step; 4 divides every batch of the stage"
                )
            ],
        ),
    ],
)
def test_passes_of_unequal_size_are_said(
    tmp_path: Path, stage: dict[str, object], says: list[str]
) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online"} | stage]}
    )
    assert describe_passes(recipe) == says


def note_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: int, *stages: dict[str, Any]
) -> list[str]:
    """The notes about GPUs of a recipe with these online stages, on a machine with so many."""
    monkeypatch.setattr(run_notes, "count_gpus", lambda: num_gpus)
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online"} | stage for stage in stages]}
    )
    return [note for note in check_recipe(recipe, SERVER, on_cluster=False) if "GPU" in note]


def test_gpus_that_this_machine_has_not_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"training": {"gpus": 1}, "rollout": {"count": 2, "gpus": 1}}
    split = {"placement": "ray", "resources": resources}
    assert note_gpus(monkeypatch, tmp_path, 1, {}, split) == [
        "stages.1.resources ask for 3 GPUs, and this machine has 1: here the stage would not start"
    ]


def test_gpus_that_a_stage_in_one_process_leaves_idle_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reusing = {
        "algorithm": {"name": "flow_grpo"},
        "reuse_rollout_forward": True,
        "updates_per_step": 1,
    }
    notes = note_gpus(monkeypatch, tmp_path, 8, {}, {"placement": "colocated"}, reusing)
    assert notes == [
        "stages.0 runs on one of the 8 GPUs of this machine; with placement: colocated all of them"
        " generate and train"
    ]


def test_idle_processes_of_a_colocated_stage_are_said() -> None:
    stage = {"kind": "online", "placement": "colocated", "group_size": 16, "micro_batch": 32}
    recipe = Recipe.model_validate({"stages": [stage | {"prompts_per_step": 12}]})
    assert describe_shares(recipe, 3) == []
    assert describe_shares(recipe, 8) == [
        "stages.0: a step has 6 requests of 2 prompts for 8 processes, so 2 of them wait while the"
        " others generate; raise prompts_per_step or lower micro_batch"
    ]
