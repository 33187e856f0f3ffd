"""Which alarm and which guardrail sees a hacked reward, and when: ``python -m
benchmarks.reward_hacking [--seeds 0 1 2]``.

Rewards with planted flaws and honest ones (``reward_hacking.yaml``) are trained on by several
algorithms. Every run leaves in ``runs/benchmarks/reward_hacking`` its held-out samples before and
after, a curve of an independent metric, the metrics of every step and the pictures that it trained
on; a run that is there already is not repeated. What the detectors say of them goes to
``benchmarks/results/reward_hacking.json``, the table and the plot next to it: ``--report`` repeats
that part alone.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import yaml
from tqdm import tqdm

from benchmarks.algorithms import WORK, prepare_inputs
from benchmarks.reward_hacking_report import write_results
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import Evaluation
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.rewards.combine import load_scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import write_text
from ebbflow.storage.tables import read_table, write_table
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy_io import open_model, open_policy
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.update import PolicyUpdater

ENTRIES = Path(__file__).with_suffix(".yaml")
RUNS = WORK / "reward_hacking"
DONE = "run.json"
"""The last file of a run: a folder without it is repeated."""
SAMPLES = 4
REPEATED = 16
"""Of the evaluations before and after: samples of a prompt, and the prompts that have so many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="entries of reward_hacking.yaml")
    parser.add_argument(
        "--report", action="store_true", help="write the results of the runs that are there"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="FILE",
        help="write honest and hacked pictures of the planted runs that are there as pairs",
    )
    arguments = parser.parse_args()
    if arguments.pictures:
        write_hacked_pairs(
            sorted(path.parent for path in RUNS.glob(f"*/{DONE}")), arguments.pictures
        )
        return
    runs = [] if arguments.report else list(list_runs(arguments.seeds, arguments.only))
    for asked in tqdm(runs, unit="run"):
        folder = RUNS / f"{asked['name']}-{asked['algorithm']}-{asked['seed']}"
        if not (folder / DONE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            train_entry(asked, folder)
    write_results(sorted(path.parent for path in RUNS.glob(f"*/{DONE}")), build_recipe)


def list_runs(seeds: list[int], only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every run: its name, kind, algorithm and seed. All runs of a seed come before those of the
    next.
    """
    entries = yaml.safe_load(ENTRIES.read_text())
    # seeds outside: an interrupted benchmark has every entry with the first seeds
    for seed in seeds:
        for kind in ("planted", "honest"):
            for name in entries[kind]:
                for algorithm in entries[kind][name].get("run_by", entries["run_by"]):
                    if only is None or name in only:
                        independent = entries[kind][name].get("independent", "ocr")
                        yield {
                            "name": name,
                            "kind": kind,
                            "algorithm": algorithm,
                            "seed": seed,
                            "independent": independent,
                        }


def write_hacked_pairs(folders: Sequence[Path], path: Path) -> None:
    """Write a held-out sample of each prompt from before and from after each planted run, as pairs
    of which the one from before is chosen: what ``reward_model.hacked`` names.
    """
    rows = []
    for folder in folders:
        run = json.loads((folder / DONE).read_text())
        if run["kind"] != "planted":
            continue
        sides = [
            {
                row["prompt_id"]: row
                for row in read_table(folder / f"{side}.parquet").to_pylist()
                if row["sample"] == 0 and row["split"] == "held_out"
            }
            for side in ("before", "after")
        ]
        for prompt_id in sorted(sides[0].keys() & sides[1].keys()):
            before, after = (side[prompt_id] for side in sides)
            rows.append(
                {
                    "prompt": before["prompt"],
                    "chosen": before["image"],
                    "rejected": after["image"],
                    "kind": run["name"],
                }
            )
    table = pa.Table.from_pylist(rows)
    write_table(path, table.schema, table.to_batches(), {})


def build_recipe(asked: Mapping[str, Any], samples: int = SAMPLES) -> Recipe:
    """The recipe of a run: an online stage that keeps the pictures of every step."""
    entries = yaml.safe_load(ENTRIES.read_text())
    entry = entries[asked["kind"]][asked["name"]]
    # 8 x 8 = 64 samples a step, all of them kept: statistics of pictures are compared afterwards
    stage = {
        "kind": "online",
        "steps": entries["steps"],
        "prompts_per_step": 8,
        "group_size": 8,
        "dumps": {"every": 1, "samples": 64},
    }
    stage |= entries["algorithms"][asked["algorithm"]] | {
        key: entry[key] for key in ("optimizer",) if key in entry
    }
    return Recipe.model_validate(
        {
            "name": f"{asked['name']}-{asked['algorithm']}",
            "seed": asked["seed"],
            "prompts": {"validation": 1, "held_out": 96},
            "rewards": entry["rewards"],
            "guardrails": entry.get("guardrails", ["ocr", "similarity"]),
            "policy": entry.get("policy", {}),
            "evaluation": {"samples": samples, "repeated_prompts": REPEATED},
            "stages": [stage],
        }
    )


def train_entry(asked: dict[str, Any], folder: Path) -> None:
    """Train one entry, and leave in its folder what the detectors need."""
    # Base model and prompts are those of benchmarks.algorithms; the untouched policy is of the
    # entry's own kind, full or LoRA.
    recipe = build_recipe(asked)
    torch.set_num_threads(recipe.threads)
    base, _, table = prepare_inputs(recipe)
    policy_folder = RUNS / f"untouched-{recipe.policy.train}"
    if not policy_folder.exists():
        write_base_policy(policy_folder, verify_folder(base), "", recipe.policy)
    held_out = read_prompts(table, "held_out")
    ctx = StageContext(recipe, 0, 0)
    model = open_model(recipe, base)
    policy, metadata = open_policy(ctx, model, policy_folder)
    updater = PolicyUpdater(policy, ctx.config, metadata)
    scorer = load_scorer(recipe.rewards, recipe.guardrails)

    def score_samples(samples: int, name: str) -> Evaluation:
        return evaluate_on_prompts(
            build_recipe(asked, samples),
            model,
            policy,
            0,
            scorer,
            held_out,
            name,
            folder / f"{name}.parquet",
        )

    curve = {0: score_samples(SAMPLES, "before")}
    every = yaml.safe_load(ENTRIES.read_text())["evaluate_every"]
    with zipfile.ZipFile(folder / "rollouts.zip", "w") as pictures:
        recorder = _Recorder(pictures)

        def evaluate_if_due(step: int) -> None:
            if (step + 1) % every == 0:
                # Few samples in between: one is enough for a curve, and the gate compares the ends.
                last = step + 1 == ctx.online_config.steps
                curve[step + 1] = score_samples(
                    SAMPLES if last else 1, "after" if last else "between"
                )

        recorder.after_step = evaluate_if_due
        started = time.process_time()
        stopped = train_stage(ctx, updater, read_prompts(table, "train"), recorder)
    # stopped by a TrainingError: what it had learnt by then is judged
    if ctx.online_config.steps not in curve:
        curve[len(recorder.metrics_rows)] = score_samples(SAMPLES, "after")
    run_result = asked | {
        "steps": recorder.metrics_rows,
        "curve": [
            {"step": step, **evaluation.model_dump()} for step, evaluation in sorted(curve.items())
        ],
        "alarms": updater.alarms,
        "stopped": stopped,
        "cpu_seconds": time.process_time() - started,
    }
    # last, and atomically: its presence says that the folder is whole
    write_text(folder / DONE, json.dumps(run_result, indent=1) + "\n")


def train_stage(
    ctx: StageContext, updater: PolicyUpdater, prompts: list[Prompt], recorder: MetricsRecorder
) -> str:
    """The stage in this process; why it stopped early, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # alarms are in the results
        try:
            run_online_stage(
                ctx,
                open_local_workers(ctx, updater, load_scorer(ctx.recipe.rewards, ())),
                prompts,
                recorder,
            )
        except TrainingError as error:
            return str(error)
    return ""


class _Recorder(MetricsRecorder):
    """Keeps the metrics of every step and the pictures that were trained on, and calls
    ``after_step``.
    """

    def __init__(self, pictures: zipfile.ZipFile) -> None:
        super().__init__()
        self.pictures = pictures
        self.after_step = lambda step: None

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        super().log_metrics(values, step)
        self.after_step(step)

    def log_file(self, name: str, content: bytes) -> None:
        if name.startswith("dumps/"):
            self.pictures.writestr(name, content)


if __name__ == "__main__":
    main()
