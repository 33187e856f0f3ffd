"""A stage that goes on from a checkpoint ends with the same bytes as one that never stopped."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ebbflow.artifacts import verify
from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.online import loop
from ebbflow.online.loop import train_online_folder
from ebbflow.online.standing import Checkpoints
from ebbflow.stage import Kept, Place
from ebbflow.training.checkpoint import CheckpointError
from ebbflow.training.policy import write_base_policy

NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")


class Killed(Exception):
    """What the test ends a stage with."""


@pytest.fixture
def attempt(make_recipe, make_prompts, base_folder, scorer, tmp_path, monkeypatch):
    """``attempt("name", kill=3, **online)``: run a stage, killed in the step with that number; (digest, rows, checkpoints)."""
    write_prompts(pa.Table.from_pylist([vars(p) for p in make_prompts(9)], PROMPTS), tmp_path / "prompts.parquet")
    monkeypatch.setattr(loop, "load_scorer", lambda terms, guards: scorer)

    def run(name, kill=None, policy=None, **online):
        recipe = make_recipe(online={"steps": 6, "checkpoint_every": 2, **online}, policy=policy or {})
        place, start = Place(recipe, 0, 0), tmp_path / f"start-{name}"
        write_base_policy(start, verify(base_folder), recipe.digest, recipe.policy)
        checkpoints, kept = Checkpoints(place, tmp_path / name), Kept()
        with monkeypatch.context() as patch:
            take = loop.Ahead.take

            def die(ahead, version):
                if version == kill:
                    raise Killed
                return take(ahead, version)

            patch.setattr(loop.Ahead, "take", die)
            trained = tmp_path / f"trained-{name}"
            train_online_folder(place, base_folder, start, tmp_path / "prompts.parquet", trained, kept, checkpoints=checkpoints)
        untimed = [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in kept.metrics]
        return verify(trained), untimed, sorted(path.name for path in (tmp_path / name).iterdir())

    return run


@pytest.mark.parametrize(
    ("online", "policy"),
    [
        ({}, {}),
        ({"mode": "one_step_off"}, {"train": "lora", "rank": 2}),
        ({**NFT, "mode": "one_step_off"}, {"ema": {"slope": 0.5, "most": 0.5}}),
        ({"advantages": {"running": True}, "mode": "async", "staleness": 2}, {}),
    ],
    ids=["sync", "one-step-off-lora", "nft-average", "async-running"],
)
@pytest.mark.parametrize("kill", [3, 4])
def test_a_killed_stage_ends_with_the_same_bytes(attempt, online, policy, kill):
    whole = attempt("whole", policy=policy, **online)
    with pytest.raises(Killed):
        attempt("killed", kill=kill, policy=policy, **online)
    again = attempt("killed", policy=policy, **online)
    assert again == whole
    assert [row["step"] for row in whole[1]] == list(range(6))
    assert whole[2] == ["step-00002", "step-00004"]


def test_killed_before_the_first_checkpoint_it_begins_again(attempt):
    whole = attempt("whole")
    with pytest.raises(Killed):
        attempt("killed", kill=1)
    assert attempt("killed") == whole


def test_another_recipe_does_not_go_on_from_it(attempt):
    with pytest.raises(Killed):
        attempt("killed", kill=3)
    with pytest.raises(CheckpointError, match=r"recipe = .*\(now .*remove it"):
        attempt("killed", optimizer={"lr": 1e-5})


def test_nothing_is_under_way_over_a_checkpoint(attempt, monkeypatch):
    """Rollouts of steps 2 and 4 begin only after what was learnt up to there."""
    begun, versions = loop.Ahead._begin, {}

    def note(ahead, step):
        versions[step] = ahead.newest.version
        begun(ahead, step)

    monkeypatch.setattr(loop.Ahead, "_begin", note)
    attempt("whole", mode="one_step_off")
    assert versions == {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4}
