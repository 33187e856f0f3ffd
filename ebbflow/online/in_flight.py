"""Rollouts in flight at a checkpoint: a stage that resumes from it trains on the very same ones.

They were generated with weights that may be gone by then, so they are stored and not generated
again.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.evaluation.image_statistics import compute_image_statistics
from ebbflow.flow.windows import Trajectory
from ebbflow.online.messages import RolloutBatch, RolloutPart, RolloutReport, RolloutRequest
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.rewards.combine import ScoreTable
from ebbflow.rollouts.generate import Rollouts, find_finite_rows
from ebbflow.training.checkpoint import CheckpointError

FILE = "in_flight.safetensors"
HEADER = "in_flight"


async def save_in_flight(folder: Path, queue: RolloutQueue) -> None:
    """Wait for the rollouts in flight, and write them with their images and scores."""
    # A checkpoint has no half-made samples: one part that is missing would have to be generated
    # with weights that are gone.
    await queue.wait_until_done()
    tensors: dict[str, Tensor] = {}
    steps: list[dict[str, Any]] = []
    for step in queue.in_flight:
        parts = []
        # Part by part: on Ray each is fetched from another machine, or made again if it is gone.
        for index in range(len(step.tasks)):
            part, rollouts, images = await queue.fetch_part(step, index)
            if queue.writes_files:
                tensors |= {
                    f"{step.step}/{index}/{name}": value
                    for name, value in _pack_part(part, rollouts, images).items()
                }
            report = {
                "version": part.report.version,
                "receive_seconds": part.report.receive_seconds,
            }
            parts.append({"report": report, "failures": part.scores.failures})
        prompts = [prompt.prompt_id for prompt in step.distinct_prompts]
        steps.append(
            {"step": step.step, "prompts": prompts, "num_dropped": step.num_dropped, "parts": parts}
        )
    header = {"steps": steps, "next": queue.pending[0] if queue.pending else None}
    # Every process has fetched the parts, because each part comes from the process that has it.
    if not queue.writes_files:
        return
    # One entry of metadata: the library writes several in any order, and bytes must repeat.
    save_file(tensors, folder / FILE, {HEADER: json.dumps(header)})


def list_steps_in_flight(folder: Path) -> list[int]:
    """List the steps of a checkpoint whose rollouts were in flight."""
    # Tensors are not read: only the header says which steps they are of.
    with safe_open(folder / FILE, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
    return [saved["step"] for saved in header["steps"]]


async def load_in_flight(folder: Path, queue: RolloutQueue) -> None:
    """Put the steps of a checkpoint in flight again, done; their windows are encoded.

    Raises:
        CheckpointError: an earlier version of Ebbflow stored them, in another layout.
    """
    with safe_open(folder / FILE, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
        names = list(file.keys())
        # ``states`` have replaced them (``Trajectory``). Not a new ``CHECKPOINT_FORMAT``: every
        # checkpoint without recorded trajectories is still read.
        if any(name.endswith("/trajectory/next_latents") for name in names):
            raise CheckpointError(
                f"{folder} has rollouts in flight as an earlier version of Ebbflow stored them;"
                f" remove {folder.parent} to begin the stage anew, or go on with that version"
            )
        # Names are "step/request/column", such as "12/0/trajectory/log_probs".
        tensors = {name: file.get_tensor(name) for name in names}
    for saved in header["steps"]:
        step = saved["step"]
        tasks = []
        # The prompts are saved: a curriculum that has learnt since would choose others.
        prompts = queue.sampler.find_prompts(saved["prompts"])
        # Requests are not stored: seed, step and prompts determine them, noise keys included.
        requests = await queue.build_requests(step, prompts=prompts)
        for index, request in enumerate(requests):
            columns = _select_prefix(f"{step}/{index}/", tensors)
            part = _unpack_part(queue, request, columns, saved["parts"][index])
            task: asyncio.Future[RolloutPart] = asyncio.get_running_loop().create_future()
            # A future that is done stands for the task, so the queue treats it like one that has
            # just ended.
            task.set_result(part)
            tasks.append(task)
        queue.in_flight.append(
            RolloutBatch(step, requests, tasks, num_dropped=saved["num_dropped"])
        )
    # Steps before "next" are in flight or were trained on.
    while queue.pending and queue.pending[0] != header["next"]:
        queue.pending.popleft()


def _pack_part(part: RolloutPart, rollouts: Rollouts, images: np.ndarray) -> dict[str, Tensor]:
    scores = {f"metrics/{name}": values for name, values in part.scores.metrics.items()} | {
        "reward": part.scores.reward
    }
    arrays = {"images": images} | scores
    # Copies, as what comes out of Ray's store cannot be written.
    tensors = {"latents": rollouts.latents} | {
        name: torch.tensor(values) for name, values in arrays.items()
    }
    if rollouts.trajectory is not None:
        tensors |= {
            f"trajectory/{name}": values
            for name, values in rollouts.trajectory.list_columns().items()
        }
    return {name: values.contiguous() for name, values in tensors.items()}


def _unpack_part(
    queue: RolloutQueue, request: RolloutRequest, tensors: dict[str, Tensor], saved: dict[str, Any]
) -> RolloutPart:
    """The inverse of ``_pack_part``. Spans are left out: they are of another attempt."""
    recorded = _select_prefix("trajectory/", tensors)
    rollouts = Rollouts(tensors["latents"], Trajectory(**recorded) if recorded else None)
    metrics = {name: values.numpy() for name, values in _select_prefix("metrics/", tensors).items()}
    finite = find_finite_rows(rollouts.latents)
    images = tensors["images"].numpy()
    put = queue.workers.put_value
    return RolloutPart(
        request,
        put(rollouts),
        put(images),
        RolloutReport(**saved["report"], finite=finite, spans=[]),
        ScoreTable(tensors["reward"].numpy(), metrics, saved["failures"]),
        spans=[],
        statistics={
            name: np.where(finite, values, np.nan)
            # Computed again rather than stored: they follow from the images.
            for name, values in compute_image_statistics(images).items()
        },
    )


def _select_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): values
        for name, values in tensors.items()
        if name.startswith(prefix)
    }
