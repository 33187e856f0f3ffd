"""The default recipe from several seeds: ``python -m benchmarks.glyph_seeds [--recipe glyph] [--seeds 0 1 2]``.

Every seed gets a base model, prompts, policy and noise of its own, an MLflow store of its own and nothing from Flyte's cache. The
table of held-out means, and what the gate said, goes to ``benchmarks/results/<recipe>_seeds.json`` and, for people, to
``.md`` beside it.
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

from benchmarks.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="glyph", help="a recipe of workflows/recipes, without .yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    summaries: dict[int, dict[str, Any]] = {}
    for seed in tqdm(arguments.seeds, unit="seed"):
        summaries[seed] = run(arguments.recipe, seed)
        tqdm.write(table(arguments.recipe, summaries))
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{arguments.recipe}_seeds"
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine(), "runs": summaries}, indent=2) + "\n")
    stem.with_suffix(".md").write_text(table(arguments.recipe, summaries))


def run(recipe: str, seed: int) -> dict[str, Any]:
    """The summary of one run from nothing."""
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / f"{recipe}.yaml").read_text())
    model = settings.get("model", {})
    settings |= {"seed": seed, "model": model | {"training": model.get("training", {}) | {"seed": seed}}}
    with tempfile.TemporaryDirectory(prefix="ebbflow-seeds-") as folder:
        written = Path(folder) / "recipe.yaml"
        written.write_text(yaml.safe_dump(settings | {"output": f"{folder}/runs"}))
        (Path(folder) / "tmp").mkdir()
        environment = os.environ | {"TMPDIR": f"{folder}/tmp", "FLYTE_LOCAL_CACHE_ENABLED": "false"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        pyflyte = str(Path(sys.executable).with_name("pyflyte"))
        command = [pyflyte, "run", "workflows/post_training.py", "post_train", "--recipe", str(written)]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        wall = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"seed {seed} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        (summary,) = Path(folder, "runs").glob("*/summary.json")
        return json.loads(summary.read_text()) | {"wall_seconds": round(wall, 1)}


def table(recipe: str, summaries: dict[int, dict[str, Any]]) -> str:
    """Seeds by held-out metrics, before -> after."""
    metrics = sorted(set.intersection(*(set(summary["before"]) for summary in summaries.values())) - {"reward"})
    lines = [
        "# The demo, seed by seed",
        "",
        f"Written by `python -m benchmarks.glyph_seeds --recipe {recipe}`; held-out means before → after.",
        "",
        "| seed | " + " | ".join(metrics) + " | promoted | seconds in stages | wall seconds |",
        "|" + "---|" * (len(metrics) + 4),
    ]
    for seed, summary in summaries.items():
        values = [f"{summary['before'][name]:.3f} → {summary['after'][name]:.3f}" for name in metrics]
        promoted = "yes" if summary["promoted"] else "no"
        lines.append(
            f"| {seed} | {' | '.join(values)} | {promoted} | {summary['seconds']['total']:.0f} | {summary['wall_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
