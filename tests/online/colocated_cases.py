"""Online stages that one process and a group of processes run, and what they leave behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models.pipeline import PipelineModel
from ebbflow.online import train_folder
from ebbflow.online.messages import RolloutBatch
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe
from ebbflow.recipe.families import FAMILIES
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Rollouts
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.distributed import Ranks, join_process_group
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.stop_conditions import Preempted
from tests.conftest import Darkness
from tests.glyph_stages import small_stage

LORA = {"train": "lora", "rank": 4, "alpha": 8}
ODE = {"sampler": {"name": "ode", "steps": 3}}
NFT = {"algorithm": {"name": "diffusion_nft", "noise_levels": 1}, **ODE}
TIMED = ("seconds", "ms_per", "images_per", "push", "utilisation")
CASES: dict[str, dict[str, Any]] = {
    "trajectories": {"algorithm": {"name": "mix_grpo"}},
    "average": {
        **NFT,
        "policy": LORA | {"ema": {"slope": 0.5, "max_decay": 0.5}},
        "validation": {"every": 1, "prompts": 5},
        "dumps": {"every": 1, "samples": 9},
    },
    "groups": {"algorithm": {"name": "dgpo", "noise_levels": 2}, **ODE, "updates_per_step": 4},
    "corrected": {
        "algorithm": {"name": "grpo_guard"},
        "rollout_precision": "bfloat16",
        "correction": {"weights": "truncated"},
        "policy": LORA,
    },
    "tree": {"algorithm": {"name": "branch_grpo"}, "tree": {"splits": [0, 1]}, "group_size": 4},
    "student": {"algorithm": {"name": "tdm", "fake_updates": 2}, **ODE, "policy": LORA},
    "reward gradients": {"algorithm": {"name": "draft", "last_steps": 2}, **ODE},
    "branches": {"algorithm": {"name": "srpo", "discount": [200, 300], "target": None}, **ODE},
    "chosen prompts": {
        **NFT,
        "refill_rounds": 2,
        "prompt_filter": {"samples": 2, "max_reward": 0.999},
        "curriculum": {},
    },
    "one step off": {"algorithm": {"name": "mix_grpo"}, "mode": "one_step_off"},
    "ahead": {"algorithm": {"name": "mix_grpo"}, "mode": "async", "staleness": 2},
    "in main memory": {**NFT, "model": {"cpu_offload": True}, "policy": LORA},
}


class Flat(Darkness):
    """As ``Darkness``, but all samples of every third prompt score the same."""

    def __call__(self, images: Any, prompts: Any) -> Any:
        # Frames of a video, [N, F, H, W, 3], one below the other.
        tall = images.reshape(len(images), -1, *images.shape[-2:])
        result = super().__call__(tall, prompts)
        result.values[[prompt.prompt_id % 3 == 0 for prompt in prompts]] = 0.5
        return result


def make_prompts() -> list[Prompt]:
    texts = [f'"{"ABCDEFGHIJKLMNOP"[start : start + 4]}"' for start in range(12)]
    return [
        Prompt(number, text, "", text[1:5], "test", split, "{}")
        for split in ("train", "validation")
        for number, text in enumerate(texts)
    ]


def recipe_of(case: str, placement: str, **online: Any) -> Recipe:
    stage = {
        "kind": "online",
        "placement": placement,
        "steps": 3,
        "group_size": 3,
        "prompts_per_step": 5,
        "micro_batch": 4,
        "updates_per_step": 2,
        "sampler": {"steps": 4},
        "reference": {"weight": 0.1, "guidance": 1},
        # Adam's first steps are signs otherwise, which turn rounding into full steps.
        "optimizer": {"lr": 0.05, "max_grad_norm": 0.5, "eps": 1.0},
        **CASES[case],
        **online,
    }
    policy = stage.pop("policy", {"train": "full"})
    model = stage.pop("model", {})
    if stage["sampler"].get("name") != "ode" and "tree" not in stage:
        stage["window"] = {"kind": "fixed", "size": 2}
    return Recipe.model_validate(
        {
            "stages": [small_stage(stage)],
            "policy": policy,
            "model": model,
            "evaluation": {"steps": 3, "samples": 1},
        }
    )


def prepare_folder(folder: Path) -> None:
    """Write what a stage reads beside its base model: prompts, and prompts with images to edit."""
    rows = [vars(prompt) for prompt in make_prompts()]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), folder / "prompts.parquet")
    # 25 tokens of 16 x 16 pixels, which two ranks cannot divide.
    edits = [row | {"image": make_picture(row["prompt_id"])} for row in rows]
    write_prompts(pa.Table.from_pylist(edits, PROMPTS), folder / "edits.parquet")


def make_picture(seed: int) -> bytes:
    """Make a PNG of 80 x 80 pixels in smooth colours."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((80, 80), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def name_folders(base: Path, folder: Path, name: str, recipe: Recipe) -> StageFolders:
    """Where a stage of this name finds and leaves what it works on, below ``folder``."""
    edits_images = FAMILIES[recipe.model.family].edits_images
    prompts = folder / ("edits.parquet" if edits_images else "prompts.parquet")
    return StageFolders(base, folder / f"start-{name}", prompts, folder / f"trained-{name}")


@contextmanager
def watch_samples(
    before_step: Callable[[int], None],
) -> Iterator[tuple[dict[str, str], dict[str, Tensor], list[int]]]:
    """Fill (the digest of each sample by step, prompt and number, its latents, the size of each
    batch of the families of diffusers that this process decodes), with a reward that costs nothing.
    """
    digests: dict[str, str] = {}
    latents: dict[str, Tensor] = {}
    decoded: list[int] = []
    next_batch = RolloutQueue.next_batch
    decode_latents = PipelineModel.decode_latents

    def count_decoded(model: PipelineModel, latents: Tensor) -> np.ndarray:
        decoded.append(len(latents))
        return decode_latents(model, latents)

    async def watch_batch(queue: RolloutQueue, version: int) -> RolloutBatch:
        before_step(version)
        batch = await next_batch(queue, version)
        for part in batch.parts:
            rollouts = await queue.workers.fetch_value(part.rollouts)
            for row, prompt in enumerate(part.request.prompts):
                key = f"{version}/{prompt.prompt_id}/{int(part.request.keys.samples[row])}"
                digests[key] = digest_sample(rollouts, row)
                latents[key] = rollouts.latents[row].clone()
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_folder, "load_scorer", lambda rewards, guardrails: Scorer(((Flat(), 1.0),))
        )
        patch.setattr(RolloutQueue, "next_batch", watch_batch)
        patch.setattr(PipelineModel, "decode_latents", count_decoded)
        yield digests, latents, decoded


def run_stage(
    base: Path,
    folder: Path,
    name: str,
    recipe: Recipe,
    replicas: int = 1,
    before_step: Callable[[int], None] = lambda step: None,
    context_parallel: int = 1,
) -> dict[str, Any]:
    """Run the stage of a recipe, on every rank of the group that this process is in; rank 0 writes
    the latents of all samples to ``latents-{name}.safetensors``.

    Returns:
        The digest of each sample of each step by its key, of rank 0; metrics that no clock changes;
        the digest of the policy; the number of samples that this process decoded, of the families
        of diffusers.
    """
    ctx = StageContext(recipe, 0, 0)
    ranks = Ranks.current()
    folders = name_folders(base, folder, name, recipe)
    if ranks.rank == 0 and not folders.policy.exists():
        write_base_policy(folders.policy, verify_folder(base), recipe.digest, recipe.policy)
    ranks.wait_for_all()
    recorder = MetricsRecorder()
    with watch_samples(before_step) as (digests, latents, decoded):
        train_online_folder(
            ctx,
            folders,
            recorder,
            checkpoints=Checkpoints(ctx, folder / f"checkpoints-{name}"),
            replicas=replicas,
            context_parallel=context_parallel,
        )
    if ranks.rank == 0:
        save_file(latents, folder / f"latents-{name}.safetensors")
    ranks.wait_for_all()
    return {
        "samples": digests,
        "metrics": drop_times(recorder.metrics_rows),
        "policy": verify_folder(folders.output),
        "decoded": sum(decoded),
    }


def drop_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics of steps without those that a clock changes."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def digest_sample(rollouts: Rollouts, row: int) -> str:
    """Compute the digest of the bits of a sample and its trajectory."""
    digest = hashlib.sha256(rollouts.latents[row].numpy().tobytes())
    if rollouts.trajectory is not None:
        for name, values in sorted(vars(rollouts.trajectory).items()):
            if name not in ("sigmas", "steps") and values is not None:
                digest.update(values[row].numpy().tobytes())
    return digest.hexdigest()


def run_as_rank(base: Path, folder: Path, stages: Mapping[str, Recipe], replicated: bool) -> None:
    """Run stages one after another in this process group; every rank writes what it found."""
    with join_process_group() as ranks:
        name = f"{ranks.world}-{'replicas' if replicated else 'shards'}"
        results = {
            case: run_stage(
                base, folder, f"{case}-{name}", recipe, ranks.world if replicated else 1
            )
            for case, recipe in stages.items()
        }
    (folder / f"results-{name}-{ranks.rank}.json").write_text(json.dumps(results))


def run_attempt(
    base: Path,
    folder: Path,
    name: str,
    recipe: Recipe,
    replicated: bool,
    happens: str = "",
    rank: int = 1,
    step: int = 2,
) -> None:
    """Run one attempt at a stage in this process group; when a rank comes to a step, it is killed,
    or is told to leave (``happens``: killed, preempted).
    """
    with join_process_group() as ranks:

        def meet_fate(version: int) -> None:
            if (ranks.rank, version) == (rank, step) and happens:
                os.kill(os.getpid(), signal.SIGKILL if happens == "killed" else signal.SIGTERM)

        try:
            replicas = ranks.world if replicated else 1
            run_stage(base, folder, name, recipe, replicas, meet_fate)
        except Preempted as error:
            (folder / f"preempted-{name}-{ranks.rank}").write_text(str(error))


def check_metrics(rows: Sequence[dict[str, float]], rows_alone: Sequence[dict[str, float]]) -> None:
    """Check that a group says of each step what one process says."""
    for row_alone, row in zip(rows_alone, rows, strict=True):
        # The first part of a batch has other rows in a group, or is all of it. One pixel decides
        # whether a box of pixels looks like text, which is much where there are few pictures.
        names = (row_alone.keys() | row.keys()) - {
            *("grad_variance", "velocity_drift"),
            *("statistic/text_likeness", "statistic_shift/text_likeness"),
        }
        for name in names:
            # Pixels are whole numbers, which the last bits of a latent can move by one; shifts are
            # in units of a spread of some percent.
            of_pixels = name.startswith(("statistic", "score", "reward", "validation", "group"))
            tolerance = 2e-3 if of_pixels else 1e-5
            if name.startswith("statistic_shift"):
                tolerance = 2e-2
            elif name == "loss":
                # At ratios of one the advantages add up to zero: what is left is rounding of the
                # ratios, some 1e-5, by which no two CPUs agree. The weights are compared as well.
                tolerance = 1e-4
            assert row[name] == pytest.approx(row_alone[name], rel=5e-3, abs=tolerance), name


def check_weights(one: Path, other: Path, tolerance: float) -> None:
    """Check that two policy folders have the same numbers."""
    weights, others = load_weights(one), load_weights(other)
    assert weights.keys() == others.keys()
    assert len(weights) > 0
    assert max((weights[key] - others[key]).abs().max().item() for key in weights) < tolerance


def load_weights(folder: Path) -> dict[str, Tensor]:
    return {
        f"{path.relative_to(folder)}/{name}": value
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }
