"""Every algorithm on the glyph task: ``python -m benchmarks.algorithms [--seeds 0 1 2] [--seconds
45] [--only NAME ...]``.

All start from the same base model with the same prompts and get the same CPU-seconds, in which
rollouts, OCR and updates count and evaluations do not. Each seed has prompts held out of its own.
The entries are in ``algorithms.yaml`` in the same folder; those that are meant to collapse run with
the first seed only. A run whose result is there already is not repeated unless asked for by
``--again``; results go to ``benchmarks/results/algorithms.json``, the table and the plot next to
it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from benchmarks.algorithms_report import write_report
from benchmarks.machine import describe_commit, describe_machine
from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.models import Model
from ebbflow.models.prepare import train_base_folder
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_epochs
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.combine import Scorer, load_scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import write_table
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_model, open_policy, save_policy
from ebbflow.training.policy_metadata import PolicyMetadata, write_base_policy
from ebbflow.training.update import PolicyUpdater

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "benchmarks"
ENTRIES = Path(__file__).with_suffix(".yaml")
RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
ONE_SEED = ("collapse",)
"""Kinds that run with the first seed only: they show that an alarm rings, and no mean is taken."""
EVALUATE_EVERY = 2.0
"""CPU-seconds of training between evaluations, at least."""
EVALUATE_SHARE = 0.2
"""Of the CPU-seconds at an evaluation: the next one is that much later, where that is longer."""
STEPS = 1000
"""Or epochs: more than any entry takes in its seconds."""


class OutOfTimeError(Exception):
    """The run has had its CPU-seconds."""


def main() -> None:
    entries = {
        name: (kind, settings)
        for kind, group in yaml.safe_load(ENTRIES.read_text()).items()
        for name, settings in group.items()
    }
    arguments = parse_arguments(list(entries))
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    # Before the first result is written, which changes a file of the repository.
    conditions = {"cpu": describe_machine()["cpu"], "commit": describe_commit()}
    # Seeds outside, entries inside: an interrupted benchmark has whole seeds, and an entry finds
    # the teacher that an earlier entry of the same seed has left.
    for seed in arguments.seeds:
        for name in tqdm(arguments.only, desc=f"seed {seed}", unit="run"):
            kind, settings = entries[name]
            if kind in ONE_SEED and seed != arguments.seeds[0]:
                continue
            seconds = settings.get("cpu_seconds", arguments.seconds)
            asked = {
                "name": name,
                "kind": kind,
                "seed": seed,
                "cpu_seconds": seconds,
                "settings": settings,
            }
            # a run with other settings under the same name is not this one
            finished = [run for run in results["runs"] if asked.items() <= run.items()]
            if finished and not arguments.again:
                continue
            run_result = asked | conditions | train_entry(asked)
            tqdm.write(
                f"{name} {seed}: {run_result['before']['ocr']:.2f} ->"
                f" {run_result['after']['ocr']:.2f}, drift {run_result['drift']:.3f}"
            )
            results = add_run(results, run_result, order=list(entries))
            # Written after each run, so that an interrupted benchmark keeps what it has.
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_report(RESULTS)


def parse_arguments(entries: Sequence[str]) -> argparse.Namespace:
    """Parse the command line: which entries, seeds and CPU-seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=45.0, help="CPU-seconds of every run")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=entries,
        metavar="NAME",
        default=entries,
        help=", ".join(entries),
    )
    parser.add_argument("--again", action="store_true", help="repeat runs whose results are there")
    return parser.parse_args()


def add_run(
    results: Mapping[str, Any], run_result: Mapping[str, Any], order: Sequence[str]
) -> dict[str, Any]:
    """Return the results with a run in place of the one of the same entry and seed, in the order of
    the YAML. Entries that are gone from the YAML leave the results as well.
    """
    other_runs = [
        run
        for run in results["runs"]
        if run["name"] in order
        and (run["name"], run["seed"]) != (run_result["name"], run_result["seed"])
    ]
    runs = sorted(
        [*other_runs, run_result], key=lambda run: (order.index(run["name"]), run["seed"])
    )
    # The machine of the first runs: later ones say where theirs was another.
    return {"machine": results.get("machine") or describe_machine(), "runs": runs}


class LearningCurve:
    """Held-out scores of a run over its CPU-seconds of training, in which evaluations do not count:
    every entry gets the same seconds however often it is evaluated.

    Process time is measured, as the machine is shared.

    Args:
        score: scores the policy as it is, with these guardrails.
        cpu_seconds: after which the run ends.

    Attributes:
        points: scores of each evaluation, with ``cpu_seconds`` and ``steps``.
        training: metrics of each training step, with ``cpu_seconds``.
    """

    def __init__(
        self, score: Callable[[tuple[str, ...]], dict[str, float]], cpu_seconds: float
    ) -> None:
        self.score = score
        self.cpu_seconds = cpu_seconds
        self.points: list[dict[str, float]] = []
        self.training: list[dict[str, float]] = []

    def start(self, before: dict[str, float]) -> None:
        """Begin to count, from the scores of the untouched policy."""
        self.points.append({"cpu_seconds": 0.0, "steps": 0, **before})
        self._start = time.process_time()

    def log_step(self, metrics: dict[str, float], step: int) -> None:
        """Take the metrics of a training step, and evaluate the policy where that is due.

        Raises:
            OutOfTimeError: the run has had its seconds; a callback can end a stage by an exception
                alone.
        """
        spent = time.process_time() - self._start
        self.training.append({"cpu_seconds": spent, **metrics})
        # Closer at first, where scores rise fast.
        evaluated = self.points[-1]["cpu_seconds"]
        if spent >= evaluated + max(EVALUATE_EVERY, EVALUATE_SHARE * evaluated):
            evaluation_start = time.process_time()
            scores = self.score(UNTRAINED_READER)
            self.points.append({"cpu_seconds": spent, "steps": step + 1, **scores})
            # The time of an evaluation is not the training's: its start moves by it.
            self._start += time.process_time() - evaluation_start
        if spent >= self.cpu_seconds:
            raise OutOfTimeError

    def finish(self, after: dict[str, float]) -> None:
        """Add the scores of the trained policy."""
        # The very first update may stop a run.
        spent = self.training[-1]["cpu_seconds"] if self.training else 0.0
        self.points.append({"cpu_seconds": spent, "steps": len(self.training), **after})


def train_entry(asked: dict[str, Any]) -> dict[str, Any]:
    """Train one entry with one seed; held-out scores over its CPU-seconds, guardrails and drift at
    the end.
    """
    recipe = build_recipe(asked)
    base, policy_folder, table = prepare_inputs(recipe, recipe.seed)
    prompts = read_prompts(table, "train")
    held_out = read_prompts(table, "held_out")
    ctx = StageContext(recipe, 0, 0)
    model = open_model(recipe, base)
    policy, metadata = open_policy(ctx, model, policy_folder, load_teachers(ctx))
    updater = PolicyUpdater(policy, ctx.config, metadata)
    scorer = load_scorer(recipe.rewards, ())
    score = partial(score_policy, recipe, model, policy, held_out)
    curve = LearningCurve(score, asked["cpu_seconds"])
    before = score(GUARDRAILS)
    warm_up_rewards(model, scorer, prompts[0])
    stopped = ""
    curve.start(before)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            # how a run ends that nothing stops before
            with suppress(OutOfTimeError):
                train_policy(ctx, model, updater, scorer, prompts, curve.log_step)
        except TrainingError as error:
            stopped = str(error)
    after = score(GUARDRAILS)
    curve.finish(after)
    # a student can only be as good as its teacher with the student's steps
    teacher_scores = {}
    if "teacher" in policy.copies:
        with policy.use_copy("teacher"):
            teacher_scores = {"teacher": score(GUARDRAILS)}
    save_teacher(ctx, updater, metadata, asked)
    return {
        "before": before,
        "after": after,
        **teacher_scores,
        "drift": after["velocity_drift"],
        "steps": len(curve.training),
        "updates": updater.updates,
        "alarms": updater.alarms,
        "warnings": sorted({str(warning.message) for warning in raised} - set(updater.alarms)),
        "stopped": stopped,
        "curve": curve.points,
        "first_metrics": curve.training[0] if curve.training else {},
        "last_metrics": curve.training[-1] if curve.training else {},
    }


UNTRAINED_READER = ("tesseract",)
GUARDRAILS = (*UNTRAINED_READER, "similarity")
"""Rewards that no entry is trained on."""


def build_recipe(asked: dict[str, Any]) -> Recipe:
    """The recipe of one run: the entry is its only stage, with steps or epochs enough for its
    seconds.

    Not with many more: an online stage chooses the prompts of all its steps before the first.
    """
    settings = dict(asked["settings"])
    rewards = settings.pop("rewards", [{"name": "ocr"}])
    settings.pop("cpu_seconds", None)
    # students of few denoising steps are evaluated with as few
    steps = {"steps": settings.pop("evaluation_steps")} if "evaluation_steps" in settings else {}
    kind = settings.get("kind", "online")
    stage = {"kind": kind, "steps" if kind == "online" else "epochs": STEPS} | settings
    # No candidate is chosen, so validation is as small as it may be. The standard error of a score
    # over 96 strings is about .02.
    prompts = {"validation": 1, "held_out": 96}
    return Recipe.model_validate(
        {
            "name": asked["name"],
            "seed": asked["seed"],
            "prompts": prompts,
            "rewards": rewards,
            "guardrails": [],
            "evaluation": {"samples": 1, **steps},
            "stages": [stage],
        }
    )


Log = Callable[[dict[str, float], int], None]
"""Takes the metrics of a training step and the step's number."""


class CallbackRecorder(MetricsRecorder):
    """A recorder that tells a function of every step."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        self.log(dict(values), step)


def train_policy(
    ctx: StageContext,
    model: Model,
    updater: PolicyUpdater,
    scorer: Scorer,
    prompts: list[Prompt],
    log: Log,
) -> None:
    """The stage of an entry, all of it in this process."""
    if ctx.config.kind == "online":
        run_online_stage(
            ctx, open_local_workers(ctx, updater, scorer), prompts, CallbackRecorder(log)
        )
        return
    # Offline: one shard, generated and scored once and inside of the timed seconds, then epochs.
    with tempfile.TemporaryDirectory() as folder:
        rollouts, scores, advantages = (
            Path(folder) / f"{name}.parquet" for name in ("rollouts", "scores", "advantages")
        )
        generate_shard(ctx, model, updater.policy, 0, prompts, 0, rollouts)
        score_shard(ctx, scorer, prompts, rollouts, scores)
        write_advantages(ctx, [scores], advantages)
        train_epochs(ctx, model, updater, prompts, [rollouts], advantages, CallbackRecorder(log))


def score_policy(
    recipe: Recipe, model: Model, policy: Policy, prompts: list[Prompt], guardrails: tuple[str, ...]
) -> dict[str, float]:
    """Held-out means of the OCR and of the guardrails, and the velocity drift from the base
    model."""
    scorer = load_scorer(
        [configure_reward("ocr")], [configure_reward(guardrail) for guardrail in guardrails]
    )
    with tempfile.TemporaryDirectory() as folder:
        evaluation = evaluate_on_prompts(
            recipe, model, policy, 0, scorer, prompts, recipe.name, Path(folder) / "samples.parquet"
        )
    return {**evaluation.held_out, "velocity_drift": evaluation.velocity_drift}


def warm_up_rewards(model: Model, scorer: Scorer, prompt: Prompt) -> None:
    """Load what rewards load at their first image; the recogniser is trained then, once on a
    machine.
    """
    # two: a reward may compare images
    scorer(model.decode_latents(torch.zeros(2, *model.latent_shape)), [prompt] * 2)


def prepare_inputs(recipe: Recipe, split_seed: int = 0) -> tuple[Path, Path, Path]:
    """(base model, untouched policy, prompt table); the base model is trained once and shared by
    all runs.

    Args:
        split_seed: by which prompts are held out. Benchmarks that compare runs of different seeds
            prompt by prompt have one for all.
    """
    base = WORK / "base"
    if not base.exists():
        train_base_folder(GlyphTrainingConfig(), recipe.threads, base)
    policy = WORK / "untouched"
    if not policy.exists():
        write_base_policy(policy, verify_folder(base), "", recipe.policy)
    prompts = WORK / f"prompts-{split_seed}.parquet"
    if not prompts.exists():
        table, _ = prepare_prompt_table(recipe.model_copy(update={"seed": split_seed}))
        write_table(prompts, PROMPTS, table.to_batches(), {})
    return base, policy, prompts


def save_teacher(
    ctx: StageContext, updater: PolicyUpdater, metadata: PolicyMetadata, asked: dict[str, Any]
) -> None:
    """Leave the trained policy where a later entry finds its teacher."""
    record = StageRecord(
        label=asked["name"],
        algorithm=asked["name"],
        samples=0,
        optimizer_steps=updater.updates,
        seconds={},
    )
    folder = WORK / "policies" / f"{asked['name']}-{asked['seed']}"
    shutil.rmtree(folder, ignore_errors=True)
    save_policy(ctx, updater, metadata, record, folder)


def load_teachers(ctx: StageContext) -> dict[str, Path]:
    """The policies that earlier entries left behind for the same seed."""
    seed = ctx.recipe.seed
    folders = {
        copy: WORK / "policies" / f"{entry}-{seed}" for copy, entry in ctx.teacher_folders.items()
    }
    for copy, entry in ctx.teacher_folders.items():
        if not folders[copy].exists():
            raise SystemExit(
                f"{ctx.recipe.name} learns from the policy of {entry} with seed {seed}, and there"
                f" is none in {folders[copy]}; make it: python -m benchmarks.algorithms --only"
                f" {entry} --seeds {seed} --again"
            )
    return folders


if __name__ == "__main__":
    main()
