"""Second sinks get the curves of the parent, and what goes wrong in them stops nothing."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.tracking import node_sinks
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.node_sinks import NodeSinks, check_sinks
from ebbflow.tracking.parent_run import start_run


def tracked_with(recipe: Recipe, *names: str) -> TrackedRun:
    return start_run(
        Recipe.model_validate({"output": recipe.output, "tracking": {"sinks": list(names)}}), None
    )


class Kept:
    """A sink that keeps what it gets, and fails at a step if it is told to."""

    fails_at = -1

    def __init__(self, tracked: TrackedRun, node: str) -> None:
        self.node = node

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the sink is full")
        GOT.append((self.node, step, values))

    def close(self) -> None:
        GOT.append((self.node, -1, {}))


GOT: list[tuple[str, int, dict[str, float]]] = []


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    monkeypatch.setattr(node_sinks, "load_sink", lambda name: Kept)
    monkeypatch.setattr(Kept, "fails_at", -1)
    GOT.clear()
    return Kept


def train(tracked: TrackedRun, steps: int) -> None:
    with open_node_run(tracked, "1.1 online", 10) as run_logger:
        for step in range(steps):
            run_logger.log_metrics(
                {"reward/mean": 0.5, "loss": float("nan"), "seconds/step": 1.0}, step
            )


def test_a_sink_gets_the_curves_of_the_parent(recipe: Recipe, kept: type[Kept]) -> None:
    train(tracked_with(recipe, "wandb"), 2)
    values = {"stage 1.1 online/reward/mean": 0.5, "reward/train": 0.5}
    assert [("1.1 online", 10, values), ("1.1 online", 11, values), ("1.1 online", -1, {})] == GOT


def test_sinks_are_off_by_default(recipe: Recipe, kept: type[Kept]) -> None:
    train(start_run(recipe, None), 1)
    assert GOT == []
    assert Recipe().tracking.sinks == []


def test_a_sink_that_fails_is_named_once_and_stops_nothing(
    recipe: Recipe,
    kept: type[Kept],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kept, "fails_at", 11)
    with caplog.at_level(logging.WARNING):
        train(tracked_with(recipe, "wandb"), 5)
    assert [step for _, step, _ in GOT] == [10, -1], "it is closed"
    assert sum("wandb of tracking.sinks fails" in message for message in caplog.messages) == 1
    assert "the sink is full" in caplog.text


def test_a_sink_that_cannot_open_stops_nothing(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        train(tracked_with(recipe, "wandb"), 3)
    assert sum("wandb of tracking.sinks fails" in message for message in caplog.messages) == 1


def test_check_names_the_package_that_a_sink_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("tracking: {sinks: [tensorboard]}\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 1
    assert (
        "tracking.sinks = 'tensorboard' needs the package tensorboard: install it with `pip install"
        " tensorboard`" in done.output
    )
    with pytest.raises(RecipeError, match="needs the package wandb"):
        check_sinks(Recipe.model_validate({"tracking": {"sinks": ["wandb"]}}))


OWN_SINK = """
class Lines:
    def __init__(self, tracked, node):
        self.path, self.node = f"{tracked.folder}.txt", node

    def log(self, values, step):
        with open(self.path, "a") as file:
            print(self.node, step, *values, file=file)

    def close(self):
        with open(self.path, "a") as file:
            print("closed", file=file)
"""


def test_a_sink_of_a_users_own_is_one_file_that_the_recipe_names(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sink.py").write_text(OWN_SINK)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"output": recipe.output, "tracking": {"sinks": ["own_sink:Lines"]}}
    named = Recipe.model_validate(settings)
    check_sinks(named)
    tracked = start_run(named, None)
    train(tracked, 2)
    assert Path(f"{tracked.folder}.txt").read_text().splitlines() == [
        "1.1 online 10 stage 1.1 online/reward/mean reward/train",
        "1.1 online 11 stage 1.1 online/reward/mean reward/train",
        "closed",
    ]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own_sink:Line", "has no 'Line'; did you mean 'Lines'"),
        ("own_sink:OPEN", "it lacks 'log'"),
        ("no_such_module:Lines", "cannot be imported"),
    ],
)
def test_check_rejects_a_path_that_leads_to_no_sink(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sink.py").write_text(OWN_SINK + "\nOPEN = open\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_sink", raising=False)
    with pytest.raises(RecipeError, match=error):
        check_sinks(Recipe.model_validate({"tracking": {"sinks": [name]}}))


def test_a_recipe_names_the_sinks_that_there_are() -> None:
    with pytest.raises(RecipeError, match=r"take tensorboard, wandb, or give package.module:name"):
        Recipe.model_validate({"tracking": {"sinks": ["csv"]}})


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"
)
def test_tensorboard_shows_a_retried_node_once(recipe: Recipe) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked = tracked_with(recipe, "tensorboard")
    for node, first, steps in (
        ("1.1 online", 0, 2),
        ("1.1 online", 0, 3),
        ("1.1 online evaluation", 3, 1),
    ):
        opened = NodeSinks(tracked, node)
        for step in range(first, first + steps):
            opened.log({"reward/train": step / 10}, step)
        opened.close()
    shown = [
        (event.step, round(event.value, 3))
        for file in sorted(Path(tracked.folder, "tensorboard").iterdir())
        for event in EventAccumulator(str(file)).Reload().Scalars("reward/train")
    ]
    assert shown == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]


class StandIn(types.ModuleType):
    """As much of ``wandb`` as the sink calls; ``last`` is the summary that W&B keeps between
    attempts.
    """

    def __init__(self, mode: str, logged_in: bool) -> None:
        super().__init__("wandb")
        self.mode = mode
        self.logged_in = logged_in
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.opened: list[dict[str, Any]] = []
        self.finished = 0

    def setup(self) -> Any:
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self, prompt: bool, verify: bool) -> bool:
        assert not prompt
        return self.logged_in

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> Any:
        self.opened.append(arguments)
        return types.SimpleNamespace(
            summary=self.summary,
            define_metric=lambda *_, **__: None,
            log=self._log,
            finish=self._finish,
        )

    def _log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.summary |= row

    def _finish(self) -> None:
        self.finished += 1


def test_wandb_gets_one_run_for_all_nodes_and_no_step_twice(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = StandIn("online", logged_in=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracked = tracked_with(recipe, "wandb")
    train(tracked, 2)
    train(tracked, 4)
    assert {(one["id"], one["name"], one["project"]) for one in wandb.opened} == {
        (tracked.run_id, tracked.name, "ebbflow")
    }
    assert [row["global_step"] for row in wandb.rows] == [
        10,
        11,
        11,
        12,
        13,
    ], "the last step may have been delivered in part"
    assert wandb.finished == 2


def test_wandb_never_asks_for_a_key(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = StandIn("online", logged_in=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(tracked_with(recipe, "wandb"), 1)
    assert "set WANDB_API_KEY, or WANDB_MODE=offline" in caplog.text
    assert wandb.opened == []


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="W&B is not installed")
def test_wandb_itself_takes_the_curves_offline(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = tracked_with(recipe, "wandb")
    Path(tracked.folder).mkdir()
    train(tracked, 3)
    assert "fails" not in caplog.text
    (kept,) = Path(tracked.folder).glob("wandb/offline-run-*/*.wandb")
    assert b"reward/train" in kept.read_bytes()
