"""``ebbflow runs``: the runs in a folder, from their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.run_list import RESOLVED_RECIPE, ListedRun, list_runs
from ebbflow.storage.locks import LOCK, lock_folder


def new_run(
    folder: Path,
    name: str,
    started: int,
    nodes: list[str],
    summary: dict[str, object] | None = None,
) -> Path:
    home = folder / name
    for seconds, node in enumerate(nodes):
        (home / "nodes" / node).mkdir(parents=True)
        os.utime(home / "nodes" / node, (seconds, seconds))
    home.mkdir(parents=True, exist_ok=True)
    (home / LOCK).touch()
    (home / RESOLVED_RECIPE).write_text(yaml.safe_dump({"name": "glyph", "seed": 3}))
    os.utime(home / RESOLVED_RECIPE, (started, started))
    if summary:
        (home / "summary.json").write_text(json.dumps(summary))
    return home


SUMMARY = {
    "before": {"reward": 0.5231},
    "after": {"reward": 0.9734},
    "promoted": True,
    "model_version": "4",
}


def test_every_run_has_its_state_and_verdict_the_newest_first(tmp_path: Path) -> None:
    new_run(tmp_path, "glyph-1", 100, ["prompts", "registry"], SUMMARY)
    new_run(tmp_path, "glyph-2", 300, ["prompts", "1.2-offline-rollout-0"])
    busy = new_run(tmp_path, "glyph-3", 200, ["1.1-online"])
    new_run(tmp_path, "glyph-4", 50, [])
    (tmp_path / "mlartifacts").mkdir()
    with lock_folder(busy):
        found = list_runs(tmp_path)
    assert [(run.name, run.state) for run in found] == [
        ("glyph-2", "stopped in 1.2 offline-rollout-0"),
        ("glyph-3", "running in 1.1 online"),
        ("glyph-1", "finished"),
        ("glyph-4", "stopped"),
    ]
    assert found[2].format_cells()[:6] == (
        "glyph-1",
        "glyph",
        "3",
        "finished",
        "0.523 -> 0.973",
        "promoted, version 4",
    )
    assert found[0].format_cells()[4:6] == ("-", "-")
    with lock_folder(busy):
        pass  # looking at a run leaves it unlocked


def test_a_reward_of_any_scale_can_be_read() -> None:
    small, large = (
        ListedRun("a", "a", "0", "finished", 0.0, reward)
        for reward in ((0.00123, 0.00234), (-21012.5, -20400.2))
    )
    assert (small.format_cells()[4], large.format_cells()[4]) == (
        "0.00123 -> 0.00234",
        "-21,012 -> -20,400",
    )


def test_a_run_without_its_recipe_is_listed_by_its_folder(tmp_path: Path) -> None:
    home = new_run(tmp_path, "my-own-1a2b", 100, [], SUMMARY | {"promoted": False})
    (home / RESOLVED_RECIPE).unlink()
    assert list_runs(tmp_path)[0].format_cells()[1:6] == (
        "my-own",
        "-",
        "finished",
        "0.523 -> 0.973",
        "not promoted, version 4",
    )


def test_the_command_prints_a_table_or_how_to_start(tmp_path: Path) -> None:
    new_run(tmp_path / "runs", "glyph-1", 100, [], SUMMARY)
    head, line = CliRunner().invoke(main, ["runs", str(tmp_path / "runs")]).output.splitlines()
    assert head.split() == ["run", "recipe", "seed", "state", "reward", "verdict", "started"]
    assert line.index("finished") == head.index("state")
    empty = CliRunner().invoke(main, ["runs", str(tmp_path)])
    assert empty.exit_code == 1
    assert "start one with `ebbflow run RECIPE`" in empty.output
