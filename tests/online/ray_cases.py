"""What the actors of test_ray_workers.py run: a reward that misbehaves, and folders that do
something to who asks for them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.training.distributed import Ranks
from ebbflow.training.update import PolicyUpdater


def first(flag: str | Path | None) -> bool:
    """Whether nobody was here before, in any process."""
    try:
        if flag is not None:
            Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return False
    return flag is not None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Darkness(Reward):
    """The mean darkness of the image. Its process dies or hangs over it once; prompts with the
    target ``HANG`` hang it always.
    """

    name = "darkness"

    def __init__(self, dies: str | None = None, hangs: str | None = None) -> None:
        self.dies = dies
        self.hangs = hangs

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        if first(self.dies):
            die()
        if any(prompt.target == "HANG" for prompt in prompts) or first(self.hangs):
            time.sleep(600)
        images[:] = 255 - images  # some rewards write where they should only read
        return RewardResult(images.mean((1, 2, 3)) / 255, {})


class Level(Reward):
    """The mean of the latents, which it may write into."""

    scores = "latents"

    def __call__(self, latents: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        latents += 1.0
        return RewardResult(latents.mean((1, 2, 3)).astype(float))


def noted(folder: Path, notes: Path) -> Path:
    """``folder``; the process that asks writes down which it is, and on which cores and GPUs it may
    run.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    (notes / str(os.getpid())).write_text(
        json.dumps({"cores": sorted(os.sched_getaffinity(0)), "gpus": gpus})
    )
    return folder


def with_a_dying_generator(folder: Path, flag: Path) -> Path:
    """``folder``; the first rollout worker that has generated a request of the second step dies
    before it can say so, and the first process that asks afterwards dies as well, while it loads.
    """
    if flag.exists() and first(f"{flag}-again"):
        die()
    whole = RolloutWorker.generate

    def generate(self: RolloutWorker, request: Any, weights: Any) -> Any:
        made = whole(self, request, weights)
        if request.step == 1 and first(flag):
            die()
        return made

    RolloutWorker.generate = generate  # type: ignore[method-assign]
    return folder


def with_a_dying_rank(folder: Path, flag: Path, rank: int) -> Path:
    """``folder``; once ``flag`` is there, the rank dies in the middle of an update, and the others
    wait for it.
    """
    whole = PolicyUpdater.update_policy

    def update(self: PolicyUpdater, *arguments: Any) -> Any:
        if Ranks.current().rank == rank and flag.exists():
            die()
        return whole(self, *arguments)

    PolicyUpdater.update_policy = update  # type: ignore[method-assign]
    return folder
