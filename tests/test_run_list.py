"""``ebbflow runs``: the runs in a folder, from their files."""

from __future__ import annotations

import json
import os
import random
import re
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.run_list import ATTEMPTS, RESOLVED_RECIPE, ListedRun, list_runs, record_attempt
from ebbflow.run_summary import read_summary, write_summary_file
from ebbflow.storage.locks import LOCK, lock_folder
from tests.cpu_time import at_most_cpu_seconds


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
        write_summary_file(home / "summary.json", summary)
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


def test_a_resumed_run_says_when_it_began_and_how_long_it_was_dead(tmp_path: Path) -> None:
    home = new_run(tmp_path, "glyph-1", 5000, ["1.1-online"])
    record_attempt(home)
    start = time.time()
    [run] = list_runs(tmp_path)
    assert run.state == "stopped in 1.1 online"
    # It wrote for the last time ten minutes ago, and is resumed now.
    for path in home.rglob("nodes/*"):
        os.utime(path, (start - 600, start - 600))
    (home / ATTEMPTS).write_text(json.dumps({"started": start - 900, "idle_since": None}) + "\n")
    os.utime(home / ATTEMPTS, (start - 900, start - 900))
    record_attempt(home)
    [run] = list_runs(tmp_path)
    assert run.started == start - 900
    assert re.fullmatch(r"stopped in 1.1 online, resumed once after 10 min \d\d s idle", run.state)


def test_a_run_that_was_killed_before_it_wrote_anything_was_dead_since_it_began(
    tmp_path: Path,
) -> None:
    home = new_run(tmp_path, "glyph-1", 5000, [])
    record_attempt(home)
    start = time.time()
    os.utime(home / ATTEMPTS, (start - 120, start - 120))
    record_attempt(home)
    [run] = list_runs(tmp_path)
    assert re.search(
        r", resumed once after 2:0\d idle|, resumed once after 2 min .* idle", run.state
    )


def test_attempts_that_cannot_be_read_leave_the_other_runs_in_the_list(tmp_path: Path) -> None:
    new_run(tmp_path, "glyph-1", 100, [], SUMMARY)
    damaged = new_run(tmp_path, "glyph-2", 300, [])
    for text in ("[1]\n", '{"started": NaN, "idle_since": null}\n', "{\n", '{"started": "x"}\n'):
        (damaged / ATTEMPTS).write_text(text)
        assert [run.state[:8] for run in list_runs(tmp_path)] == ["damaged:", "finished"]


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


@pytest.mark.parametrize(
    ("currency", "gpu_hours", "shown"),
    [("EUR", 1.5, "12.50 EUR"), ("", 1.5, "1.50 GPU-h"), ("", 0.0, "0.25 core-h")],
)
def test_a_finished_run_has_its_cost(
    tmp_path: Path, currency: str, gpu_hours: float, shown: str
) -> None:
    total = {"gpu_hours": gpu_hours, "core_hours": 0.25, "money": 12.5}
    ledger = {"currency": currency, "parts": {"total": total}}
    new_run(tmp_path, "glyph-1", 100, [], SUMMARY | {"cost": ledger})
    assert list_runs(tmp_path)[0].format_cells()[6] == shown


def test_the_command_prints_a_table_or_how_to_start(tmp_path: Path) -> None:
    new_run(tmp_path / "runs", "glyph-1", 100, [], SUMMARY)
    head, line = CliRunner().invoke(main, ["runs", str(tmp_path / "runs")]).output.splitlines()
    assert head.split() == [
        "run",
        "recipe",
        "seed",
        "state",
        "reward",
        "verdict",
        "cost",
        "started",
    ]
    assert line.index("finished") == head.index("state")
    empty = CliRunner().invoke(main, ["runs", str(tmp_path)])
    assert empty.exit_code == 1
    assert "start one with `ebbflow run RECIPE`" in empty.output


DAMAGED = {
    "no JSON": lambda home: (home / "summary.json").write_text("{"),
    "nested": lambda home: (home / "summary.json").write_text("[" * 100_000),
    "another number": lambda home: (home / "summary.json").write_text(
        (home / "summary.json").read_text().replace("0.9734", "0.9934")
    ),
    "a list": lambda home: (home / "summary.json").write_text("[1]"),
    "no mapping": lambda home: (home / RESOLVED_RECIPE).write_text("- 1"),
    "an alias bomb": lambda home: (home / RESOLVED_RECIPE).write_text(
        "a0: &a0 [1, 1]\n"
        + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
        + "name: *a39\n"
    ),
    "an endless alias": lambda home: (home / RESOLVED_RECIPE).write_text("name: &a [*a]"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_run_hides_no_other(tmp_path: Path, damage: str) -> None:
    new_run(tmp_path, "glyph-1", 100, [], SUMMARY)
    home = new_run(tmp_path, "glyph-2", 200, [], SUMMARY)
    DAMAGED[damage](home)
    with at_most_cpu_seconds(30):
        damaged, whole = list_runs(tmp_path)
    assert damaged.state.startswith("damaged: ")
    assert damaged.reward is None
    assert (whole.state, whole.reward) == ("finished", (0.5231, 0.9734))


def test_a_run_of_an_earlier_version_is_not_said_to_be_changed(tmp_path: Path) -> None:
    home = new_run(tmp_path, "glyph-1", 100, [], SUMMARY)
    (home / "summary.json").write_text(json.dumps(SUMMARY))
    (run,) = list_runs(tmp_path)
    assert run.state == (
        "damaged: summary.json has no digest, as one of an earlier version of Ebbflow"
    )


def test_mutated_summaries_never_show_other_numbers(tmp_path: Path) -> None:
    home = new_run(tmp_path, "glyph-1", 100, [], SUMMARY)
    content = (home / "summary.json").read_bytes()
    generator = random.Random(0)
    num_whole = 0
    for _ in range(500):
        position = generator.randrange(len(content))
        byte = bytes([generator.randrange(256)])
        (home / "summary.json").write_bytes(content[:position] + byte + content[position + 1 :])
        (run,) = list_runs(tmp_path)
        # White space may change.
        num_whole += run.state == "finished"
        assert run.state.startswith("damaged") or run.format_cells()[4:6] == (
            "0.523 -> 0.973",
            "promoted, version 4",
        )
    assert num_whole < 100
    (home / "summary.json").write_bytes(content)
    assert read_summary(home / "summary.json") == SUMMARY


def test_names_with_control_codes_do_not_reach_the_terminal(tmp_path: Path) -> None:
    home = new_run(tmp_path, "glyph\x1b[2J-1", 100, ["1.1-on\x1b]0;x\x07"], None)
    (home / RESOLVED_RECIPE).write_text(yaml.safe_dump({"name": "a\x1b[31mb\nc", "seed": 1}))
    summary = SUMMARY | {"model_version": "4\x1b[2J"}
    new_run(tmp_path, "other-1", 50, [], summary)
    output = CliRunner().invoke(main, ["runs", str(tmp_path)], color=True).output
    assert "\x1b" not in output
    assert "\x07" not in output
    assert len(output.splitlines()) == 3
