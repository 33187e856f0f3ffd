"""Thirty nights of a schedule with a prompt file that changes: ``python -m benchmarks.nights``.

The schedule's workflow is the real one: it reads the prompt file, gives each night its seed, ends
nights without a change, and records what was trained from what. So are MLflow's store, the tests of
the gate with their error budget, promotion and retention. Training is simulated: a night's
candidate is the champion plus a random change of its quality, its scores on held-out prompts are
drawn, and its folders have the layout and a fraction of the size of a real run's. The table goes to
``benchmarks/results/nights.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from benchmarks.gate import DEVIATION, draw_scores, prove_gain
from ebbflow.data.records import Comparison, GateDecision, Registration, TrackedRun
from ebbflow.evaluation.look import compute_look_error
from ebbflow.recipe import Recipe
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.promotion import ensure_registered_model, promote_version
from ebbflow.retention import clean, count_bytes
from ebbflow.run_list import RESOLVED_RECIPE
from ebbflow.run_summary import SUMMARY, write_summary_file
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.storage.locks import LOCK
from ebbflow.tracking.parent_run import finish_run
from ebbflow.tracking.parent_run import start_run as open_parent_run
from ebbflow.tracking.store import RUN, connect_to_store
from workflows import retraining

RESULTS = Path(__file__).parent / "results" / "nights.md"
FIRST_NIGHT = datetime(2026, 1, 1, 2, tzinfo=UTC)
UNCHANGED_EVERY = 4
"""Every fourth night, nobody has changed the prompt file."""
CHANGE = 0.25
"""Standard deviation of what a night changes, in that of the prompts."""
PROMPTS = 256
SAMPLES = 4
"""Held-out prompts, and samples of each."""
KEEP_RUNS = 3
BASE_BYTES = 1_000_000
POLICY_BYTES = 300_000
REPORT_BYTES = 20_000
TITLE = "# Thirty nights of a schedule"


@dataclass
class Night:
    """What a night came to."""

    number: int
    seed: int | None
    num_prompts: int
    outcome: str
    champion: str
    megabytes: float


class Schedule:
    """A schedule on this machine, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.prompts = folder / "prompts.txt"
        self.recipe = Recipe.model_validate(
            {
                "name": "nightly",
                "output": str(folder / "runs"),
                "policy": {"start": "champion"},
                "prompts": {"source": str(self.prompts)},
                "promotion": {"model_name": "nightly", "looks_per_year": 365},
                "retention": {"keep_runs": KEEP_RUNS, "keep_rejected_days": 0},
            }
        )
        self.output = Path(self.recipe.output)
        self.generator = np.random.default_rng(0)
        self.quality = {"none": 0.0}
        """True quality of each version; that of the base model first."""
        self.spent = 0.0
        self.trained: TrackedRun | None = None
        self.seed: int | None = None

    def run_night(self, number: int) -> Night:
        """Run a night, after somebody has changed the prompt file or not."""
        if number % UNCHANGED_EVERY:
            with self.prompts.open("a") as file:
                file.write(f"a sign that reads {number}\n")
        self.seed = None
        kickoff = FIRST_NIGHT + timedelta(days=number - 1)
        outcome = retraining.retrain(recipe=self.recipe, kickoff_time=kickoff)
        champion = self.find_champion()
        # Together, as files that are shared count once.
        databases = sum(map(count_bytes, self.output.glob("mlflow.db*")))
        return Night(
            number,
            self.seed,
            len(self.prompts.read_text().splitlines()),
            str(outcome),
            champion or "none",
            (count_bytes(self.output) - databases) / 1e6,
        )

    def find_champion(self) -> str | None:
        uri = f"sqlite:///{self.output.absolute() / 'mlflow.db'}"
        champion = find_champion(uri, self.recipe.promotion.model_name)
        return champion.version if champion else None

    def train(self, recipe: Recipe) -> Any:
        """Stand for ``post_train``: a run, a decision, a version, and perhaps a promotion."""
        run = open_parent_run(recipe, None)
        clean(recipe, run.tracking_uri)
        champion = self.find_champion()
        quality = self.quality[champion or "none"] + CHANGE * self.generator.normal()
        decision = self.decide(quality, champion)
        registration = self.register(run, decision)
        self.quality[registration.version] = quality
        if decision.promote:
            registration = promote_version(
                run, registration, {"promoted_in": "nights"}, expected_champion=champion
            )
        self.write_report(run, registration)
        finish_run(run, "FINISHED")
        self.seed = recipe.seed
        return _Result(run, decision, registration)

    def decide(self, quality: float, champion: str | None) -> GateDecision:
        """Decide as the gate does about the reward, at the look's share of the error budget."""
        old = draw_scores(
            self.generator, np.array([self.quality[champion or "none"]]), PROMPTS, SAMPLES
        )
        new = draw_scores(self.generator, np.array([quality]), PROMPTS, SAMPLES)
        error = compute_look_error(self.recipe.promotion, self.spent)
        self.spent += error
        promote = bool(prove_gain(new, old, error)[0])
        difference = float(new.mean() - old.mean())
        verdict = "proven" if promote else "not proven"
        return GateDecision(
            promote=promote,
            candidate="1.1 online",
            champion=champion or "the base model",
            target=Comparison(
                metric="reward",
                champion=float(old.mean()),
                candidate=float(new.mean()),
                difference=difference,
                low=0.0,
                high=0.0,
                prompts=PROMPTS,
            ),
            guardrails=[],
            coverage=1.0,
            reasons=[
                f"reward {old.mean():.3f} -> {new.mean():.3f}: a gain is {verdict} at p {error:.2g}"
            ],
        )

    def register(self, run: TrackedRun, decision: GateDecision) -> Registration:
        """Write the folders of a run, and register a version with copies of them."""
        nodes = Path(run.folder) / "nodes"
        _write_folder(nodes / "base-model" / "base", bytes(BASE_BYTES))
        _write_folder(nodes / "1.1-online" / "policy", self.generator.bytes(POLICY_BYTES))
        stored = self.output / "mlartifacts" / run.run_id
        shutil.copytree(nodes / "base-model" / "base", stored / "data" / "base")
        shutil.copytree(nodes / "1.1-online" / "policy", stored / "data" / "policy")
        (stored / "evidence").mkdir()
        (stored / "evidence" / "gate.json").write_text(decision.model_dump_json())
        client = connect_to_store(run.tracking_uri)
        name = self.recipe.promotion.model_name
        ensure_registered_model(client, name)
        version = client.create_model_version(
            name, stored.as_uri(), run.run_id, tags={RUN: run.run_id}
        )
        client.set_registered_model_alias(name, "challenger", version.version)
        return Registration(
            model_name=name, version=str(version.version), champion=False, previous=None
        )

    def write_report(self, run: TrackedRun, registration: Registration) -> None:
        """Write what a finished run has beside its nodes."""
        folder = Path(run.folder)
        (folder / LOCK).touch()
        (folder / RESOLVED_RECIPE).write_text(yaml.safe_dump({"name": self.recipe.name}))
        (folder / "report.html").write_bytes(bytes(REPORT_BYTES))
        rewards = {"before": {"reward": 0.0}, "after": {"reward": 0.0}}
        verdict = {"promoted": registration.champion, "model_version": registration.version}
        write_summary_file(folder / SUMMARY, rewards | verdict)


@dataclass
class _Result:
    """The outputs of ``post_train`` that the schedule reads."""

    run: TrackedRun
    decision: GateDecision
    registration: Registration


def _write_folder(folder: Path, content: bytes) -> None:
    with write_new_folder(folder) as unfinished:
        (unfinished / "model.safetensors").write_bytes(content)


def simulate_nights(count: int, folder: Path) -> list[Night]:
    """Simulate nights in a folder."""
    schedule = Schedule(folder)
    original = retraining.post_train
    retraining.post_train = schedule.train  # type: ignore[assignment]
    try:
        return [schedule.run_night(number) for number in tqdm(range(1, count + 1), unit="night")]
    finally:
        retraining.post_train = original


def compute_bound(num_nights: int, num_promoted: int) -> float:
    """Compute the megabytes that the nights may take.

    One base model for all, as equal folders share their files, and the two copies of the last
    night, which are linked the night after. The policies of the runs that are kept, twice that of
    the last night, and those of the runs of champions and of the challenger before; versions share
    theirs with their runs. A report a night.
    """
    policies = KEEP_RUNS + 3 + num_promoted
    small = num_nights * (REPORT_BYTES + 10_000)
    return (3 * BASE_BYTES + policies * POLICY_BYTES + small) / 1e6


def format_page(nights: list[Night]) -> str:
    """Format the page of results."""
    trained = [night for night in nights if night.seed is not None]
    promoted = len({night.champion for night in nights} - {"none"})
    bound = compute_bound(len(nights), promoted)
    everything = len(trained) * 2 * (BASE_BYTES + POLICY_BYTES) / 1e6
    lines = [
        TITLE,
        "",
        f"`python -m benchmarks.nights`: {len(nights)} nights, of which {len(trained)} trained,"
        f" with {len({night.seed for night in trained})} seeds; {promoted} versions became"
        f" champion. At most {max(night.megabytes for night in nights):.1f} MB were on disk (bound"
        f" {bound:.1f} MB; without retention {everything:.0f} MB). Training is simulated: a night"
        f" changes the quality of the champion by a normal number of {CHANGE} standard deviations"
        f" of the prompts (their scores spread by {DEVIATION}), and the gate sees {PROMPTS}"
        f" held-out prompts with {SAMPLES} samples each. A base model has {BASE_BYTES / 1e6:g} MB,"
        f" a policy {POLICY_BYTES / 1e6:g} MB. Schedule, registry, the gate's test of the reward,"
        f" promotion and retention (`keep_runs: {KEEP_RUNS}`, `keep_rejected_days: 0`) are the real"
        " ones.",
        "",
        "| night | seed | prompts | champion | MB | outcome |",
        "|---|---|---|---|---|---|",
    ]
    for night in nights:
        # Names of runs and folders differ from one simulation to the next.
        outcome = night.outcome.partition(" (")[0]
        if night.seed is None:
            outcome = "nothing changed; nothing was trained"
        lines.append(
            f"| {night.number} | {night.seed or '–'} | {night.num_prompts} | {night.champion} |"
            f" {night.megabytes:.1f} | {outcome} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nights", type=int, default=30)
    arguments = parser.parse_args()
    for package in ("ebbflow", "tasks"):
        logging.getLogger(package).setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        nights = simulate_nights(arguments.nights, Path(folder))
    RESULTS.write_text(format_page(nights))
    print(json.dumps({"nights": len(nights), "page": str(RESULTS)}))


if __name__ == "__main__":
    main()
