"""Three turns of the circle on the glyph model: ``python -m benchmarks.flywheel [--seeds 0 1 2]``.

The base model is fine-tuned on a few captioned pictures (SFT), which then anchor all later
training. A turn labels pairs of the policy's pictures with a stand-in, whose taste is the OCR score
and who errs in 10 % of the pairs; trains the reward model on all labels so far; lets its gate
decide; and trains the policy on the reward model that the gate has left, with the seed that
``ebbflow turn`` gives a turn, so that each has other prompts and noise. Two other policies get as
many steps on a reward that never changes: the reward model of the first turn, and the size of the
JPEG file (the compressibility of 2305.13301), where nothing begins anew after a turn: its policies
of one, two and three turns are stages of as many steps. The true score is the OCR score on held-out
prompts.

A run that is there already, in ``runs/benchmarks/flywheel``, is not repeated, nor are reward models
and policies of a run that was killed. The results go to ``benchmarks/results/flywheel.json``, the
table and the plot next to it; ``--report`` repeats that part alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.algorithms import WORK, CallbackRecorder, prepare_inputs
from benchmarks.flywheel_report import write_report
from benchmarks.machine import describe_machine
from ebbflow.data.labels import LABELS, read_labels
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.labeling.results import write_results
from ebbflow.labeling.session import Settings, open_session
from ebbflow.labeling.sources import load_queue
from ebbflow.labeling.stand_in import answer_as_stand_in
from ebbflow.models.glyph_training.pictures import write_pictures
from ebbflow.offline.anchor import open_anchor
from ebbflow.offline.data import encode_data, import_data
from ebbflow.offline.training import train_offline_folder
from ebbflow.online.loop import run_online_stage
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.reward_training.folder import (
    RewardModelRecord,
    read_record,
    train_reward_folder,
)
from ebbflow.reward_training.queue import generate_queue
from ebbflow.reward_training.turn import choose_turn_seed
from ebbflow.rewards.combine import load_reward, load_scorer
from ebbflow.stage import AnchorFiles, MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.disk import write_text
from ebbflow.training.policy_io import load_policy, open_model, save_policy
from ebbflow.training.update import PolicyUpdater

RUNS = WORK / "flywheel"
RESULTS = Path(__file__).parent / "results" / "flywheel.json"
TURNS = 3
STEPS = 4
"""Of a turn: with more, the first turn leaves the others little to learn."""
HELD_OUT = 96
"""Prompts of an evaluation, with two samples each."""
PAIRS = 400
"""Labels of a turn. Of those on held-out prompts about seven in ten are no tie: enough for the gate
to tell a reward model that agrees with 7 of 10 answers from chance.
"""
PICTURES = 256
"""Captioned pictures of the fine-tuning and of the anchor."""
ERROR_RATE = 0.1
FINE_TUNING = 0
TRAINING = 1
"""Stages of the recipe."""
DONE = "run.json"
OCR = {"name": "ocr"}
FIXED_PROXY = {"name": "jpeg_compressibility"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--report", action="store_true", help="write the results of the runs that are there"
    )
    arguments = parser.parse_args()
    seeds = [] if arguments.report else arguments.seeds
    for seed in tqdm(seeds, unit="seed"):
        folder = RUNS / str(seed)
        if not (folder / DONE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            run_seed(seed, folder)
    runs = [json.loads((RUNS / str(seed) / DONE).read_text()) for seed in arguments.seeds]
    results = {
        "machine": describe_machine(),
        "settings": {
            "turns": TURNS,
            "steps": STEPS,
            "pairs": PAIRS,
            "pictures": PICTURES,
            "error_rate": ERROR_RATE,
        },
        "runs": runs,
    }
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")
    write_report(RESULTS)


def build_recipe(
    seed: int, rewards: Sequence[Mapping[str, Any]], folder: Path, steps: int = STEPS
) -> Recipe:
    """The recipe of a turn: fine-tuning, which only the first turn runs, an online stage, and the
    reward model that is trained before it.
    """
    data = {"path": str(folder / "pictures"), "caption_dropout": 0.0}
    fine_tuning = {
        "kind": "offline",
        "algorithm": {"name": "sft"},
        "data": data,
        "epochs": 1,
        "batch_size": 64,
        "optimizer": {"lr": 3.0e-4, "weight_decay": 0.0},
    }
    stage = {
        "kind": "online",
        "steps": steps,
        "prompts_per_step": 8,
        "group_size": 8,
        "updates_per_step": 2,
        # As in workflows/recipes/glyph.yaml, which says why a small model needs these.
        "algorithm": {
            "name": "diffusion_nft",
            "beta": 0.1,
            "noise_levels": 2,
            "sigma": {"kind": "uniform"},
            "old": {"slope": 0.04, "max_decay": 0.5},
        },
        "reference": {"weight": 0.01},
        "anchor": {"data": data},
        "sampler": {"name": "ode", "steps": 4},
        "optimizer": {"lr": 5.0e-4, "weight_decay": 0.0},
    }
    return Recipe.model_validate(
        {
            "name": "flywheel",
            "seed": seed,
            "prompts": {"validation": 1, "held_out": HELD_OUT},
            "rewards": list(rewards),
            "guardrails": [],
            "evaluation": {"samples": 2},
            "reward_model": {
                "name": "legible",
                "labels": [str(folder / "labels")],
                "held_out": 0.25,
                "epochs": 6,
                "lr": 3.0e-4,
            },
            "stages": [fine_tuning, stage],
        }
    )


def run_seed(seed: int, folder: Path) -> None:
    """Run all arms of a seed."""
    # Of a run that was killed, nobody knows what the first attempt took.
    is_whole = not any(folder.iterdir())
    started = time.process_time()
    recipe = build_recipe(seed, [OCR], folder)
    torch.set_num_threads(recipe.threads)
    base, untrained, table = prepare_inputs(recipe)
    bench = Bench(seed, folder, base, table)
    base_scores = bench.measure(untrained, {})
    start = folder / "fine-tuned"
    if not start.exists():
        bench.fine_tune(untrained, start)
    before = bench.measure(start, {})
    turns = run_turns(bench, start)
    first = turns[0]
    if not first["record"]["decision"]["promote"]:
        # There is nothing to train on: a person would label more pairs.
        stopped = {"seed": seed, "base": base_scores, "arms": {}}
        stopped["reward_models"] = [first["record"]]
        stopped["cpu_seconds"] = time.process_time() - started if is_whole else None
        write_text(folder / DONE, json.dumps(stopped, indent=1) + "\n")
        return
    first_model = {"name": "model", "uri": first["reward_model"]}
    arms = {
        "flywheel": [before, *(turn["scores"] for turn in turns)],
        "first_model": [
            before,
            first["scores"],
            *bench.train_on(
                first_model, Path(first["policy"]), [turn["seed"] for turn in turns[1:]], "first"
            ),
        ],
        "jpeg": [before, *bench.train_in_one_stage(FIXED_PROXY, start)],
    }
    result = {
        "seed": seed,
        "base": base_scores,
        "arms": arms,
        "reward_models": [turn["record"] for turn in turns],
        "cpu_seconds": time.process_time() - started if is_whole else None,
    }
    write_text(folder / DONE, json.dumps(result, indent=1) + "\n")


class Bench:
    """The base model, the prompts and the folder of a seed.

    Every policy has a model of its own, as in the tasks of a run: the reference of a policy is what
    its model was before, and must be the base model.
    """

    def __init__(self, seed: int, folder: Path, base: Path, table: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.base = base
        self.table = table
        self.prompts = read_prompts(table, "train")
        self.held_out = read_prompts(table, "held_out")
        self.stand_in = load_reward(configure_reward("ocr"))
        self.data = self.import_pictures()

    def build_recipe(self, reward: Mapping[str, Any]) -> Recipe:
        return build_recipe(self.seed, [reward], self.folder)

    def import_pictures(self) -> AnchorFiles:
        """Make captioned pictures, and encode them for the fine-tuning and for the anchor."""
        pictures = self.folder / "pictures"
        write_pictures(pictures, PICTURES, self.seed + 1)
        ctx = StageContext(self.build_recipe(OCR), 0, FINE_TUNING)
        config = ctx.config.captioned_data
        assert config
        latents = self.folder / "latents"
        shutil.rmtree(latents, ignore_errors=True)
        latents.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strings that are held-out prompts are left out
            imported = import_data(ctx, config, pictures, self.base, self.table, self.folder)
        model = open_model(ctx.recipe, self.base)
        shards = encode_data(ctx, config, model, pictures, imported.encoding, latents)
        return AnchorFiles(imported.prompts, imported.advantages, shards)

    def fine_tune(self, start: Path, policy_folder: Path) -> None:
        """Train a policy on the captioned pictures."""
        train_offline_folder(
            StageContext(self.build_recipe(OCR), 0, FINE_TUNING),
            StageFolders(self.base, start, self.data.prompts, policy_folder),
            list(self.data.latents),
            self.data.advantages,
            MetricsRecorder(),
        )

    def measure(self, policy_folder: Path, reward: Mapping[str, Any]) -> dict[str, float]:
        """Held-out means of the true score and of the reward that is trained on."""
        recipe = self.build_recipe(OCR)
        # With the recipe of the true score: the reward that is trained on is only looked at.
        policy, _ = load_policy(StageContext(recipe, 0, TRAINING), self.base, policy_folder)
        rewards = [configure_reward("ocr")]
        if reward:
            keys = {key: value for key, value in reward.items() if key != "name"}
            rewards.append(configure_reward(reward["name"], label="trained", **keys))
        samples = self.folder / "samples.parquet"
        evaluation = evaluate_on_prompts(
            recipe, policy.model, policy, 0, load_scorer(rewards, ()), self.held_out, "x", samples
        )
        scores = {"true": evaluation.held_out["ocr"]}
        if reward:
            scores["trained"] = evaluation.held_out["trained"]
        return scores

    def label(self, policy_folder: Path, turn: int, reward_model: Path | None) -> None:
        """Answer pairs of a policy's pictures as a stand-in."""
        recipe = self.build_recipe(OCR)
        policy, _ = load_policy(StageContext(recipe, 0, TRAINING), self.base, policy_folder)
        queue = self.folder / f"queue-{turn}.parquet"
        scorer = (
            load_reward(configure_reward("model", uri=str(reward_model))) if reward_model else None
        )
        seed = 10 * self.seed + turn
        # Other prompts in each turn, as people would not label the same ones again.
        order = np.random.default_rng(seed).permutation(len(self.prompts))[:PAIRS]
        prompts: list[Prompt] = [self.prompts[index] for index in order]
        generate_queue(recipe, policy.model, policy, prompts, scorer, PAIRS, seed, queue)
        task = load_queue(queue, PAIRS)
        folder = self.folder / "labels" / f"turn-{turn}"
        with open_session(task, folder, Settings(seed=seed)) as session:
            answer_as_stand_in(session, self.stand_in, 1, ERROR_RATE)
            write_results(session)

    def train(
        self,
        reward: Mapping[str, Any],
        start: Path,
        policy_folder: Path,
        seed: int,
        turns: int = 1,
    ) -> None:
        """Train a policy for the steps of some turns, unless it is there.

        Args:
            seed: of the prompts and of the noise.
        """
        if policy_folder.exists():
            return
        recipe = build_recipe(seed, [reward], self.folder, turns * STEPS)
        ctx = StageContext(recipe, 0, TRAINING)
        policy, metadata = load_policy(ctx, self.base, start)
        updater = PolicyUpdater(policy, ctx.config, metadata)
        updater.anchor = open_anchor(ctx, policy.model, self.data)
        workers = open_local_workers(ctx, updater, load_scorer(recipe.rewards, ()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # alarms of a hacked reward are what is wanted
            run_online_stage(ctx, workers, self.prompts, CallbackRecorder(lambda *_: None))
        record = StageRecord(
            label="1.2 online",
            algorithm="diffusion_nft",
            samples=0,
            optimizer_steps=updater.updates,
            seconds={},
        )
        save_policy(ctx, updater, metadata, record, policy_folder)

    def train_on(
        self, reward: Mapping[str, Any], start: Path, seeds: Sequence[int], name: str
    ) -> list[dict[str, float]]:
        """Train for a turn with each of some seeds on a reward that does not change; the scores
        after each.
        """
        scores = []
        for turn, seed in enumerate(seeds, start=1):
            trained = self.folder / f"{name}-{turn}"
            self.train(reward, start, trained, seed)
            scores.append(self.measure(trained, reward))
            start = trained
        return scores

    def train_in_one_stage(self, reward: Mapping[str, Any], start: Path) -> list[dict[str, float]]:
        """Train for the steps of one, two and three turns in one stage; the scores after each."""
        scores = []
        for turns in range(1, TURNS + 1):
            trained = self.folder / f"{reward['name']}-{turns}"
            self.train(reward, start, trained, self.seed, turns)
            scores.append(self.measure(trained, reward))
        return scores


def train_reward_model(
    bench: Bench, policy: Path, turn: int, champion: Path | None
) -> RewardModelRecord:
    """Label pictures of a policy, and train a reward model on all labels, unless it is there."""
    trained = bench.folder / f"reward-model-{turn}"
    if trained.exists():
        return read_record(trained)
    labels = bench.folder / "labels" / f"turn-{turn}"
    if not (labels / LABELS).exists():
        shutil.rmtree(labels, ignore_errors=True)
        bench.label(policy, turn, champion)
    return train_reward_folder(
        bench.build_recipe(OCR),
        read_labels([bench.folder / "labels"]),
        trained,
        bench.folder / f"checkpoint-{turn}",
        champion,
        None if champion is None else champion.name,
    )


def run_turns(bench: Bench, policy: Path) -> list[dict[str, Any]]:
    """Label, train the reward model, let its gate decide, train the policy; three times."""
    champion: Path | None = None
    turns = []
    for turn in range(1, TURNS + 1):
        record = train_reward_model(bench, policy, turn, champion)
        if record.decision.promote:
            champion = bench.folder / f"reward-model-{turn}"
        result = record.model_dump(mode="json", exclude={"measurement": {"by_prompt"}})
        if champion is None:
            return [{"record": result}]
        reward = {"name": "model", "uri": str(champion)}
        next_policy = bench.folder / f"policy-{turn}"
        seed = choose_turn_seed(bench.build_recipe(OCR), record)
        bench.train(reward, policy, next_policy, seed)
        policy = next_policy
        turns.append(
            {
                "policy": str(policy),
                "reward_model": str(champion),
                "seed": seed,
                "scores": bench.measure(policy, reward),
                "record": result,
            }
        )
        tqdm.write(f"seed {bench.seed}, turn {turn}: {turns[-1]['scores']}")
    return turns


if __name__ == "__main__":
    main()
