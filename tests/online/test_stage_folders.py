"""An online stage from folder to folder: what it takes over from the policy before it, and what it
hands on.
"""

from __future__ import annotations

import json
import os
import signal

import pyarrow as pa
import pytest
import torch

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.flow.windows import plan_window
from ebbflow.models import load_model
from ebbflow.online import rollout_queue, train_folder
from ebbflow.online.train_folder import train_online_folder
from ebbflow.resume import SIGTERM_CAME
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy
from ebbflow.training.policy_metadata import (
    PolicyMetadata,
    Progress,
    read_policy_metadata,
    write_base_policy,
)
from tests.parameters import changed, move


@pytest.fixture(autouse=True)
def _free_reward(scorer, monkeypatch):
    monkeypatch.setattr(train_folder, "load_scorer", lambda rewards, guardrails: scorer)


@pytest.fixture
def folders(base_folder, make_prompts, tmp_path):
    """The prompt table, and the policy folder of the untouched base for a recipe."""
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(6)], PROMPTS),
        tmp_path / "prompts.parquet",
    )

    def of(recipe):
        write_base_policy(
            tmp_path / "start", verify_folder(base_folder), recipe.digest, recipe.policy
        )
        return tmp_path / "start"

    return tmp_path / "prompts.parquet", of


class LoadsNoMoreError(Exception):
    pass


def test_a_sigterm_while_models_are_loaded_is_a_request(
    make_recipe, base_folder, folders, tmp_path, monkeypatch
):
    prompts, start = folders
    ctx = StageContext(make_recipe(), 0, 0)
    requested = []

    def open_workers(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        requested.append(SIGTERM_CAME.is_set())
        raise LoadsNoMoreError

    monkeypatch.setattr(train_folder, "open_workers", open_workers)
    # Without the stage's handler the signal would end this process.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(LoadsNoMoreError):
            train_online_folder(
                ctx,
                StageFolders(base_folder, start(ctx.recipe), prompts, tmp_path / "trained"),
                MetricsRecorder(),
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert requested == [True]


def test_windows_and_statistics_go_on_in_the_next_stage(
    make_recipe, base_folder, folders, tmp_path, monkeypatch
):
    prompts, start = folders
    ctx = StageContext(make_recipe(online={"steps": 2, "advantages": {"running": True}}), 0, 0)
    seen = []

    def record_window(stage, seed, step, with_means):
        seen.append(step)
        return plan_window(stage, seed, step, with_means)

    monkeypatch.setattr(rollout_queue, "plan_window", record_window)
    folder = start(ctx.recipe)
    counts = []
    for name in ("first", "second"):
        train_online_folder(
            ctx, StageFolders(base_folder, folder, prompts, tmp_path / name), MetricsRecorder()
        )
        folder = tmp_path / name
        statistics = json.loads((folder / "prompt_statistics.json").read_text())["darkness"]
        counts.append(sum(count for _, count, _, _ in statistics))
    assert seen == [0, 1, 2, 3]
    assert counts == [16, 32]  # two steps of two prompts with four samples, twice
    assert read_policy_metadata(folder).progress.steps == 4


@pytest.fixture
def distilled(make_recipe, base_folder, folders, tmp_path):
    """``distilled(sizes, algorithm, **recipe)``: metrics of a distillation from teachers so far
    from the base model.
    """
    prompts, start = folders

    def run(sizes, algorithm, **recipe):
        # Distillation trains the same steps all the time here, so that its losses can be compared.
        stage = {
            "algorithm": {"name": "distillation", **algorithm},
            "window": {"kind": "fixed", "size": 2},
        }
        ctx = StageContext(
            make_recipe(online={**stage, "optimizer": {"lr": 1e-3}, "steps": 8}, **recipe), 0, 0
        )
        metadata = PolicyMetadata(
            base_digest=verify_folder(base_folder),
            recipe_digest="r",
            config=ctx.recipe.policy,
            version=5,
        )
        for copy, size in sizes.items():
            teacher = Policy(load_model(base_folder), ctx.recipe.policy, 0)
            move(teacher, size)
            teacher.save_folder(tmp_path / copy, metadata)
        recorder = MetricsRecorder()
        teachers = {copy: tmp_path / copy for copy in sizes}
        stage_folders = StageFolders(
            base_folder, start(ctx.recipe), prompts, tmp_path / "trained", teachers
        )
        train_online_folder(ctx, stage_folders, recorder)
        return recorder.metrics_rows

    return run


def test_a_teacher_comes_from_a_folder_and_is_come_closer_to(distilled, tmp_path):
    found = distilled({"teacher": 0.01}, {"teacher": "elsewhere"})
    losses = [metrics["loss"] for metrics in found]
    assert losses[0] > 1e-6
    assert losses[-1] < 0.5 * losses[0]
    assert losses == pytest.approx([metrics["kl/teacher"] for metrics in found])
    assert read_policy_metadata(tmp_path / "trained").copies == ()


def test_every_prompt_set_has_its_own_teacher(distilled, tmp_path):
    table = read_table(tmp_path / "prompts.parquet").to_pylist()
    sets = [row | {"source": "signs" if row["prompt_id"] % 2 else "words"} for row in table]
    write_prompts(pa.Table.from_pylist(sets, PROMPTS), tmp_path / "prompts.parquet")
    mixture = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]
    teachers = {"words": "elsewhere", "signs": "elsewhere"}
    found = distilled(
        {"teacher:words": 0.01, "teacher:signs": 0},
        {"teachers": teachers},
        prompts={"mixture": mixture},
    )
    words, signs = ([metrics[f"kl/teacher/{name}"] for metrics in found] for name in teachers)
    assert words[0] > 1e-6
    assert signs[0] == pytest.approx(
        0, abs=1e-12
    )  # of this set the policy is its teacher until the other one pulls at it
    assert words[-1] < words[0]
    assert found[0]["kl/teacher"] == pytest.approx(words[0] / 2)


def test_a_stage_hands_on_the_average_and_what_to_go_on_from(
    make_recipe, base_folder, folders, tmp_path
):
    prompts, start = folders
    online = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
    ctx = StageContext(
        make_recipe(online=online, policy={"ema": {"slope": 0.5, "max_decay": 0.5}}), 0, 0
    )
    trained = tmp_path / "trained"
    recorder = MetricsRecorder()
    tags = {}
    recorder.log_tags = tags.update
    record = train_online_folder(
        ctx, StageFolders(base_folder, start(ctx.recipe), prompts, trained), recorder
    )
    assert tags == {"ebbflow.device": "cpu", "ebbflow.torch": torch.__version__}
    metadata = read_policy_metadata(trained)
    assert (metadata.version, metadata.copies) == (record.optimizer_steps, ("old", "iterate"))
    assert metadata.progress == Progress(
        algorithm="diffusion_nft", steps=ctx.online_config.steps, updates=record.optimizer_steps
    )
    policy, _ = open_policy(ctx, load_model(base_folder), trained)
    served = Policy(load_model(base_folder), ctx.recipe.policy, 0)
    served.load_folder(trained)
    assert all(
        torch.equal(value, served.parameters[name]) for name, value in policy.copies["ema"].items()
    )
    assert changed(policy, policy.copies["ema"])
