"""The first hour: parts that crash, hang or were finished before, and the parts themselves at tiny
size.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.first_hour import runner
from benchmarks.first_hour.kernels import DeviceTime, summarize_spans
from benchmarks.first_hour.lines import Line, Setting, judge
from benchmarks.first_hour.page import build_json, format_page, summarize
from benchmarks.first_hour.parts import PARTS, Part
from benchmarks.first_hour.runner import Outcome, run_parts
from tests.pretend_cuda.device import pretend_cuda

MACHINE = {"device": "a GPU", "command": "c", "commit": "1", "torch": "2", "minutes": 3.0}
FAKE = """
import json, os, pathlib, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name = arguments["--measure"]
path = pathlib.Path(arguments["--folder"], name + ".jsonl")
line = {"claim": "first", "verdict": "passed", "number": "1", "bar": "", "note": ""}
path.write_text(json.dumps(line) + "\\n")
if name == "crashes":
    os.abort()
if name == "hangs":
    time.sleep(3600)
line["claim"] = "second"
with path.open("a") as file:
    file.write(json.dumps(line) + "\\n")
"""
"""A process that answers the first claim of its part, and then ends as the part's name says."""


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., dict[str, Outcome]]:
    """``run(minutes=1)``: the outcomes of three parts, by name; the second crashes, and the third
    hangs until its time limit, unless the test has no use for it.
    """
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, str(script)))
    claims = ("first", "second")
    works, crashes, hangs = (
        Part(name, "", minutes, claims, "read its log")
        for name, minutes in (("works", 60), ("crashes", 60), ("hangs", 0.05))
    )

    def run_all(
        minutes: float = 200, commit: str = "1", names=(), hanging: bool = True
    ) -> dict[str, Outcome]:
        parts = (works, crashes, hangs) if hanging else (works, crashes)
        monkeypatch.setattr(runner, "PARTS", parts)
        setting = Setting(tmp_path / "folder", "tiny")
        outcomes = run_parts(setting, minutes, commit, names)
        return {outcome.part.name: outcome for outcome in outcomes}

    return run_all


def test_a_part_that_crashes_or_hangs_ends_alone(run):
    outcomes = run()
    assert [outcome.ending for outcome in outcomes.values()] == [
        "finished",
        "signal 6",
        "after 3 s",
    ]
    for name in ("crashes", "hangs"):
        last = outcomes[name].all_lines[-1]
        assert (last.claim, last.verdict) == ("second", "failed")
        assert outcomes[name].ending in last.note
    assert outcomes["crashes"].all_lines[0].verdict == "passed", "what was answered before is kept"
    works = outcomes["works"]
    assert summarize([works]) == "2 passed, 0 failed, 0 not measured"


def test_finished_parts_of_the_same_commit_are_kept(run, capfd):
    run(hanging=False)
    capfd.readouterr()
    again = run(hanging=False)
    assert capfd.readouterr().err.count("kept from an earlier start") == 1
    assert again["works"].lines == run(commit="2", hanging=False)["works"].lines
    assert capfd.readouterr().err.count("kept from an earlier start") == 0, "another commit"
    chosen = run(commit="3", names=["crashes"], hanging=False)
    assert list(chosen) == ["works", "crashes"], "an unfinished part that was not asked for"
    assert chosen["works"].commit == "2"


def test_parts_without_time_are_not_measured(run):
    outcomes = run(minutes=0)
    lines = [line for outcome in outcomes.values() for line in outcome.all_lines]
    assert {line.verdict for line in lines} == {"not measured"}
    assert all("more --minutes" in line.note for line in lines)


def test_the_page_says_what_failed_and_what_to_do():
    part = Part("memory", "memory", 1, ("a", "b"), "look there")
    lines = (judge("a", False, "3", "<= 2", "x | y"), Line("b", "passed"))
    outcome = Outcome(part, "finished", 1.0, "1", lines)
    page = format_page([outcome], MACHINE)
    assert "| memory | a | **failed** | 3 | <= 2 | x / y |" in page
    assert "- memory: look there." in page
    assert build_json([outcome], MACHINE)["parts"][0]["lines"][0]["verdict"] == "failed"
    part = Part("memory", "memory", 1, ("b",), "look there")
    page = format_page([Outcome(part, "finished", 1.0, "1", lines[1:])], MACHINE)
    assert "What to do" not in page


def test_idle_time_is_what_no_kernel_covers():
    assert summarize_spans([]) == DeviceTime(0, 0.0, 1.0)
    found = summarize_spans([(5, 6), (0, 2), (1, 3), (1, 2)])
    assert (found.kernels, found.milliseconds) == (4, 0.006)
    assert found.idle == pytest.approx(2 / 6)


def test_every_part_has_a_module_and_claims_of_its_own():
    claims = [claim for part in PARTS for claim in part.claims]
    assert len(set(claims)) == len(claims)
    for part in PARTS:
        module = importlib.import_module(f"benchmarks.first_hour.parts.{part.module}")
        assert callable(module.measure)


def measure_lines(name: str, folder: Path) -> dict[str, Line]:
    runner.measure_part(Setting(folder, "tiny"), name)
    lines = [json.loads(text) for text in (folder / f"{name}.jsonl").read_text().splitlines()]
    (part,) = (part for part in PARTS if part.name == name)
    assert [line["claim"] for line in lines] == list(part.claims)
    return {line["claim"]: Line(**line) for line in lines}


@pytest.mark.parametrize("name", ["device", "attention", "flux", "engine"])
def test_what_a_cpu_cannot_show_is_not_measured(name, tmp_path, monkeypatch):
    monkeypatch.delenv("EBBFLOW_VLLM_OMNI_PYTHON", raising=False)
    lines = measure_lines(name, tmp_path)
    assert {line.verdict for line in lines.values()} == {"not measured"}
    assert all(line.note for line in lines.values())


def test_memory_names_the_estimate_of_each_phase(tmp_path):
    lines = measure_lines("memory", tmp_path)
    assert all(line.number.startswith("estimate ") for line in lines.values())
    loading, *_, training = (float(line.number.split()[1]) for line in lines.values())
    # Of a tiny model they differ by less than the thousandth of a GiB that is printed.
    assert 0 < loading <= training


def test_rewards_profiles_and_gradients_of_pixels(tmp_path):
    network, refl, profile, _ = measure_lines("rewards", tmp_path).values()
    assert (network.verdict, refl.verdict, profile.verdict) == ("not measured", "passed", "passed")


def test_updates_on_a_pretend_gpu_have_the_digest_of_the_cpu(monkeypatch, capsys):
    updates = importlib.import_module("benchmarks.first_hour.parts.updates")
    # It sets this process for good.
    monkeypatch.setattr(updates, "use_deterministic_kernels", lambda: None)
    updates.print_digest("tiny")
    with pretend_cuda() as device:
        updates.print_digest("tiny")
    expected, digest = capsys.readouterr().out.split()
    assert digest == expected
    assert device.kernels.total() > 0


@pytest.mark.exhaustive
def test_fsdp_passes_on_a_cpu(tmp_path):
    """In a process of its own, as a user starts it."""
    (part,) = (part for part in PARTS if part.name == "fsdp")
    outcome = runner.run_part(Setting(tmp_path, "tiny"), part, limit=3600, commit="1")
    assert [line for line in outcome.all_lines if line.verdict != "passed"] == []


@pytest.mark.exhaustive
def test_updates_pass_on_a_cpu(tmp_path):
    """The part itself starts two processes, which are compared."""
    lines = measure_lines("updates", tmp_path)
    assert [line for line in lines.values() if line.verdict != "passed"] == []
