"""Specialists and the policy that they are merged into, set by set: ``python -m
benchmarks.specialists [--seeds 0 1 2]``.

Every seed is a whole run of the recipe ``glyph_specialists`` with a base model and noise of its
own. Then the base, each specialist and the merged policy draw the held-out prompts of each set from
the same noise, and the recipe's reward scores them. No policy was trained on these prompts, and
none was chosen by them. A difference is the mean over prompts of merged - specialist, its standard
error that of paired samples; the last row of a set has the mean over seeds and its standard error.
Scores by prompt stay in ``benchmarks/results/specialists.json``, those of other seeds too; the
table goes to ``.md`` beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from benchmarks.glyph_seeds import RESULTS, run_in_folder, set_seed
from benchmarks.machine import describe_machine
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import evaluate_folder
from ebbflow.models.prepare import train_base_folder
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table, write_table
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy

RECIPE = "glyph_specialists"
WITHIN = 0.02
"""How much worse than its specialist the merged policy may be on the prompts of a set."""
POLICIES = ("base", "specialist", "merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    results_path = RESULTS / "specialists.json"
    runs: dict[str, dict[str, Any]] = (
        json.loads(results_path.read_text())["runs"] if results_path.exists() else {}
    )
    for seed in tqdm(arguments.seeds, unit="seed"):
        runs[str(seed)] = run_recipe(seed)
        runs = dict(sorted(runs.items()))
        tqdm.write(format_table(runs))
        results_path.write_text(json.dumps({"machine": describe_machine(), "runs": runs}) + "\n")
        results_path.with_suffix(".md").write_text(format_table(runs))


def run_recipe(seed: int) -> dict[str, Any]:
    """One whole run: scores by set and policy, what the gates of the branches said, and seconds."""
    with tempfile.TemporaryDirectory(prefix="ebbflow-specialists-") as name:
        folder = Path(name)
        started = time.perf_counter()
        # The base is trained here and named by its path: it is needed again, to be scored.
        settings = set_seed(RECIPE, seed)
        train_base_folder(Recipe.model_validate(settings).model.training, 1, folder / "base")
        run_folder, _, _ = run_in_folder(
            folder, settings | {"model": settings["model"] | {"path": str(folder / "base")}}
        )
        wall = time.perf_counter() - started
        recipe = load_recipe(folder / "recipe.yaml")
        write_base_policy(folder / "untouched", verify_folder(folder / "base"), "", recipe.policy)
        policies = list_policies(recipe, run_folder) | {"base": folder / "untouched"}
        scores = {
            part: score_policies(recipe, folder, run_folder, policies, part)
            for part in recipe.branches
        }
        return {
            "scores": scores,
            "promoted": json.loads((run_folder / "summary.json").read_text())["promoted"],
            "wall_seconds": round(wall),
        }


def list_policies(recipe: Recipe, run_folder: Path) -> dict[str, Path]:
    """The policy folders of a run: by branch, and the merged one, whose teachers they must have
    been.

    Raises:
        SystemExit: a gate refused a specialist, so that the base taught its prompts.
    """
    nodes = [
        run_folder / "nodes" / recipe.stage_label(0, index).replace(" ", "-") / "policy"
        for index in range(len(recipe.stages))
    ]
    policies = {
        str(stage.branch or "merged"): node
        for stage, node in zip(recipe.stages, nodes, strict=True)
    }
    # A branch whose gate refuses has the base as its teacher, and merged - specialist would compare
    # with a policy that the merged one never saw.
    teachers = read_policy_metadata(policies["merged"]).teachers
    for name in recipe.branches:
        if teachers[name] != verify_folder(policies[name]):
            raise SystemExit(
                f"the gate of branch {name} refused its specialist, so there is nothing to compare;"
                " train it longer"
            )
    return policies


def score_policies(
    recipe: Recipe, folder: Path, run_folder: Path, policies: dict[str, Path], part: str
) -> dict[str, list[float]]:
    """The rewards of base, specialist and merged policy on the held-out prompts of a set, in the
    order of their ids.
    """
    # split by source: the prompts of a set carry its name
    prompts = read_table(run_folder / "nodes" / "prompts" / "prompts.parquet", PROMPTS)
    held_out_prompts = prompts.filter(
        pc.and_(pc.equal(prompts["source"], part), pc.equal(prompts["split"], "held_out"))
    )
    chosen = folder / f"{part}.parquet"
    write_table(chosen, PROMPTS, held_out_prompts.to_batches(), {})
    scores = {}
    rewards_alone = recipe.model_copy(update={"guardrails": []})
    for label, policy in (
        ("base", policies["base"]),
        ("specialist", policies[part]),
        ("merged", policies["merged"]),
    ):
        samples = folder / f"{part}-{label}.parquet"
        evaluate_folder(rewards_alone, folder / "base", policy, chosen, label, samples)
        # by id: the pairs of a difference are scores of the same prompt
        rows = read_rewards(samples)
        scores[label] = [rows[prompt.prompt_id] for prompt in read_prompts(chosen)]
    return scores


def read_rewards(samples: Path) -> dict[int, float]:
    """The reward of each prompt."""
    table = pq.read_table(samples, columns=["prompt_id", "reward"])
    return dict(zip(table["prompt_id"].to_pylist(), table["reward"].to_pylist(), strict=True))


def format_table(runs: dict[str, dict[str, Any]]) -> str:
    """Sets and seeds by policies, with standard errors."""
    sets = list(next(iter(runs.values()))["scores"])
    prompts = [len(run["scores"][part]["base"]) for run in runs.values() for part in sets]
    lines = [
        "# Specialists, merged",
        "",
        (
            "Written by `python -m benchmarks.specialists`: held-out rewards of the recipe"
            f" `{RECIPE}`, on {min(prompts)} to {max(prompts)} prompts a set that no policy has"
            " seen, one image each from the same noise. ± is the standard error, over prompts in"
            " the rows of seeds, over seeds in those of means; a difference is paired by prompt."
        ),
        "",
        "| prompts | seed | base | specialist | merged | merged − specialist |",
        "|---|---|---|---|---|---|",
    ]
    for part in sets:
        for seed, run in runs.items():
            scores = {name: np.array(values) for name, values in run["scores"][part].items()}
            lines.append(format_row(part, seed, scores))
        # [seeds] means; their spread is what another seed would change
        if len(runs) > 1:
            means = {
                name: np.array([np.mean(run["scores"][part][name]) for run in runs.values()])
                for name in POLICIES
            }
            lines.append(format_row(part, "mean", means))
    worst = min(
        float(np.mean(paired_difference(run["scores"][part])))
        for run in runs.values()
        for part in sets
    )
    lines += [
        "",
        (
            f"The worst difference of any set and seed is {format_signed(worst)}; wanted is no less"
            f" than {format_signed(-WITHIN)}."
        ),
    ]
    promoted = sum(run["promoted"] for run in runs.values())
    return (
        "\n".join(
            [*lines, f"The run's own gate promoted {promoted} of {len(runs)} merged policies."]
        )
        + "\n"
    )


def paired_difference(scores: dict[str, Any]) -> np.ndarray:
    """Subtract by prompt. What makes a prompt hard is in both scores and cancels out."""
    difference: np.ndarray = np.subtract(scores["merged"], scores["specialist"])
    return difference


def format_row(part: str, seed: str, values: dict[str, np.ndarray]) -> str:
    cells = [
        f"{values[name].mean():.3f} ± {compute_standard_error(values[name]):.3f}"
        for name in POLICIES
    ]
    differences = paired_difference(values)
    return (
        f"| {part} | {seed} | {' | '.join(cells)} | {format_signed(differences.mean())} ±"
        f" {compute_standard_error(differences):.3f} |"
    )


def compute_standard_error(values: np.ndarray) -> float:
    # ddof=1: of a sample, whose mean is estimated too
    return float(values.std(ddof=1) / len(values) ** 0.5)


def format_signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


if __name__ == "__main__":
    main()
