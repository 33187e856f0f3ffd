"""``ebbflow compare``: two runs on one page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result

from ebbflow.cli import main
from ebbflow.comparison.runs import find_common_prompts, find_recipe_differences, read_run_folder
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.run_summary import write_summary_file
from ebbflow.storage.tables import write_table
from tests.report.page_structure import parse, problems


def write_samples(path: Path, prompts: list[Prompt], score: float) -> None:
    """Each prompt has the score; the first one also a second sample, which is higher by 1."""
    rows = [
        {key: vars(prompt)[key] for key in ("prompt_id", "split", "source", "prompt", "target")}
        | {"sample": sample, "reward": score + sample, "ocr": score + sample, "failure": None}
        for prompt in prompts
        for sample in ((0, 1) if prompt.prompt_id == 0 else (0,))
    ]
    pngs = encode_pngs(np.full((len(rows), 8, 8, 3), int(100 * score), np.uint8))
    rows = [row | {"image": png} for row, png in zip(rows, pngs, strict=True)]
    table = pa.Table.from_pylist(rows, build_evaluation_schema(["reward", "ocr"]))
    path.parent.mkdir(parents=True)
    write_table(path, table.schema, table.to_batches(), {})


@pytest.fixture
def make_run(tmp_path: Path, make_prompts: Callable[..., list[Prompt]]) -> Callable[..., Path]:
    """``make_run("a", 0.3)``: a run whose reward rose by .3."""

    def make(name: str, gain: float, finished: bool = True, number: int = 4) -> Path:
        home = tmp_path / name
        nodes = home / "nodes"
        prompts = make_prompts(number, "held_out")
        write_samples(nodes / "before-evaluation" / "samples.parquet", prompts, 0.25)
        write_samples(nodes / "1.1-online-evaluation" / "samples.parquet", prompts, 0.25 + gain)
        steps = [{"step": step, "reward/mean": 0.2 + gain * step} for step in range(3)]
        (nodes / "1.1-online").mkdir()
        (nodes / "1.1-online" / "metrics.json").write_text(json.dumps(steps))
        recipe = {"name": "glyph", "seed": 3, "stages": [{"optimizer": {"lr": gain}}]}
        (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        if finished:
            summary = {
                "candidate": "1.1 online",
                "champion": "before",
                "promoted": True,
                "model_version": "4",
                "seconds": {"total": 12.0},
            }
            write_summary_file(home / "summary.json", summary)
        return home

    return make


def compare(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, words)])


def test_the_page_has_recipes_curves_and_pictures_of_both_runs(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    first = make_run("first", 0.1)
    second = make_run("second", 0.3)
    page = tmp_path / "page.html"
    result = compare(first, second, "--output", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["stages.0.optimizer.lr: 0.1 -> 0.3", f"page    {page}"]
    text = page.read_text()
    assert problems(text) == []
    root = parse(text)
    cells = [cell.whole_text for cell in root.all("td", "th")]
    assert {"stages.0.optimizer.lr", "promoted, version 4", "0.475 · 0.675"} < set(cells)
    # The reward of the held-out prompts and of the stage, with a line for each run.
    labels = [svg.attributes["aria-label"] for svg in root.all("svg")]
    assert "Reward, last values: first 0.475, second 0.675" in labels
    assert any("first 0.4, second 0.8" in label for label in labels)
    assert text.count('id="picture-') == 2 * 4


def test_copies_of_runs_at_a_uri_give_the_same_page(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    first = make_run("first", 0.1)
    second = make_run("second", 0.3)
    store = fsspec.filesystem("memory")
    store.put(str(first), "/bucket/runs/first", recursive=True)
    pages = [tmp_path / "local.html", tmp_path / "copies.html"]
    compare(first, second, "--output", pages[0])
    result = compare("memory://bucket/runs/first/", f"file://{second}", "--output", pages[1])
    assert result.exit_code == 0, result.output
    assert pages[1].read_text() == pages[0].read_text()
    missing = compare("memory://bucket/runs/other", second, "--output", pages[1])
    assert missing.exit_code == 1
    assert "memory://bucket/runs/other has no recipe.yaml" in missing.output
    store.rm("/bucket", recursive=True)


def test_a_comparison_in_the_root_folder_leaves_nothing_there(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(make_run(name, 0.1)) for name in ("one-of-root", "other-of-root")]
    monkeypatch.chdir("/")
    result = CliRunner().invoke(main, ["compare", *runs])
    assert result.exit_code == 1
    page = "one-of-root-and-other-of-root.html"
    assert f"output = '{page}' would be /{page}, as the working directory is /;" in result.output
    assert not Path("/", page).exists()


def test_a_prompt_counts_once_however_many_samples_it_has(make_run: Callable[..., Path]) -> None:
    run = read_run_folder(make_run("run", 0.1))
    # Three prompts with .25, and one with .25 and 1.25.
    assert run.held_out["before"]["reward"] == pytest.approx((3 * 0.25 + 0.75) / 4)
    assert list(run.evaluations) == ["before", "1.1 online"]


def test_runs_of_other_prompts_have_no_common_pictures(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    first = read_run_folder(make_run("first", 0.1))
    second = read_run_folder(make_run("second", 0.1, number=6))
    # Ids are the same and prompts are not, as random strings of another number.
    assert find_common_prompts(first, first) == {0, 1, 2, 3}
    assert len(find_common_prompts(first, second)) <= 4
    assert find_recipe_differences(first, second) == []


def test_a_run_that_has_not_finished_is_compared_by_its_last_evaluation(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    first = make_run("first", 0.1)
    second = make_run("second", 0.3, finished=False)
    page = tmp_path / "page.html"
    assert compare(first, second, "--output", page).exit_code == 0
    assert "not finished" in page.read_text()


def test_a_folder_that_is_no_run_is_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    result = compare(make_run("run", 0.1), tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} is not the folder of a run" in result.output
    damaged = make_run("damaged", 0.1)
    (damaged / "nodes" / "1.1-online" / "metrics.json").write_text("{")
    assert f"{damaged} cannot be read" in compare(damaged, damaged).output
