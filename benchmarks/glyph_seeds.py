"""The default recipe from several seeds: ``python -m benchmarks.glyph_seeds [--recipe glyph]
[--seeds 0 1 2]``.

Every seed gets a base model, prompts, policy and noise of its own, an MLflow store of its own and
nothing from Flyte's cache. The table of held-out means, and what the gate said, goes to
``benchmarks/results/<recipe>_seeds.json`` and, for people, to ``.md`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from benchmarks.machine import describe_commit, describe_machine
from ebbflow.report.run_facts import RunFacts
from ebbflow.tracking.store import NODE, connect_to_store

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXECUTING = "Running Execution on local."
"""What ``pyflyte`` prints when the first node begins."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--recipe", default="glyph", help="a recipe of workflows/recipes, without .yaml"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    summaries: dict[int, dict[str, Any]] = {}
    # Of the beginning: the working tree may change while the seeds run.
    commit = describe_commit()
    for seed in tqdm(arguments.seeds, unit="seed"):
        summaries[seed] = run_recipe(arguments.recipe, seed)
        tqdm.write(format_table(arguments.recipe, summaries, commit))
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{arguments.recipe}_seeds"
    stem.with_suffix(".json").write_text(
        json.dumps({"commit": commit, "machine": describe_machine(), "runs": summaries}, indent=2)
        + "\n"
    )
    stem.with_suffix(".md").write_text(format_table(arguments.recipe, summaries, commit))


def run_recipe(recipe: str, seed: int) -> dict[str, Any]:
    """The summary of one run from nothing."""
    # A store and a cache that other runs have filled would make this one faster.
    with tempfile.TemporaryDirectory(prefix="ebbflow-seeds-") as folder:
        started = time.time()
        run_folder, executing, ended = run_in_folder(Path(folder), set_seed(recipe, seed))
        seconds = {
            "wall_seconds": ended - started,
            "node_seconds": measure_node_seconds(f"sqlite:///{folder}/runs/mlflow.db", executing),
        }
        summary: dict[str, Any] = json.loads((run_folder / "summary.json").read_text())
        return summary | {name: round(value, 1) for name, value in seconds.items()}


def set_seed(recipe: str, seed: int) -> dict[str, Any]:
    """A recipe of ours with another seed, of the base model too."""
    settings: dict[str, Any] = yaml.safe_load(
        (ROOT / "workflows" / "recipes" / f"{recipe}.yaml").read_text()
    )
    # the base model too, or the spread would be that of the training alone
    model = settings.get("model", {})
    return settings | {
        "seed": seed,
        "model": model | {"training": model.get("training", {}) | {"seed": seed}},
    }


def run_in_folder(folder: Path, settings: dict[str, Any]) -> tuple[Path, float, float]:
    """The folder of one whole run, all of which is below ``folder``; when its first node began, and
    when it ended.
    """
    written = folder / "recipe.yaml"
    written.write_text(yaml.safe_dump(settings | {"output": f"{folder}/runs"}))
    (folder / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": f"{folder}/tmp", "FLYTE_LOCAL_CACHE_ENABLED": "false"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    pyflyte = str(Path(sys.executable).with_name("pyflyte"))
    command = [pyflyte, "run", "workflows/post_training.py", "post_train", "--recipe", str(written)]
    executing, ended = execute_command(command, environment)
    (summary,) = (folder / "runs").glob("*/summary.json")
    return summary.parent, executing, ended


def execute_command(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run pyflyte. Returns when it began with the first node, which it prints, and when it ended,
    in seconds since 1970.
    """
    output = []
    executing = None
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        # line by line, as the time of a line is when it arrives
        for line in run.stdout or ():
            output.append(line)
            if line.startswith(EXECUTING):
                executing = time.time()
    if run.returncode or executing is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(output)[-3000:]}")
    return executing, time.time()


def measure_node_seconds(store: str, executing: float) -> float:
    """Measure how long at least one node ran: ``start_run`` until it has opened the run in MLflow,
    every other one as MLflow says.
    """
    client = connect_to_store(store)
    nodes = {}
    started = 0.0
    for run in client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()]
    ):
        span = run.info.start_time / 1000, run.info.end_time / 1000  # MLflow's times are in ms
        name = run.data.tags.get(NODE)
        if name:
            nodes[name] = span
        # the parent, which start_run opened
        else:
            started = span[0]
    nodes["start_run"] = (executing, started)
    return RunFacts(started, "", {}, nodes=nodes).measure_wall_seconds(nodes)


def format_table(recipe: str, summaries: dict[int, dict[str, Any]], commit: str) -> str:
    """Seeds by held-out metrics, before -> after, and the commit that they were measured at."""
    # what all seeds have; "reward" repeats the metric that is trained on
    metrics = sorted(
        set.intersection(*(set(summary["before"]) for summary in summaries.values())) - {"reward"}
    )
    lines = [
        "# The demo, seed by seed",
        "",
        (
            f"Written by `python -m benchmarks.glyph_seeds --recipe {recipe}` at commit {commit};"
            " held-out means before → after."
        ),
        "",
        "| seed | "
        + " | ".join(metrics)
        + " | promoted | seconds in nodes | wall seconds | wall ÷ nodes |",
        "|" + "---|" * (len(metrics) + 5),
    ]
    for seed, summary in summaries.items():
        values = [
            f"{summary['before'][name]:.3f} → {summary['after'][name]:.3f}" for name in metrics
        ]
        promoted = "yes" if summary["promoted"] else "no"
        wall = summary["wall_seconds"]
        inside = summary["node_seconds"]
        lines.append(
            f"| {seed} | {' | '.join(values)} | {promoted} | {inside:.0f} | {wall:.0f} |"
            f" {wall / inside:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
