"""Rollouts that are ahead of the training, kept with a checkpoint: whoever goes on from it trains on the very same ones.

They were generated with weights that may be gone by then, so they are stored and not made again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.flow.trajectory import Trajectory
from ebbflow.online.ahead import Ahead, Harvest
from ebbflow.online.work import Generated, Part
from ebbflow.rewards.combine import ScoreTable
from ebbflow.rollouts.generate import Rollouts

FILE, ABOUT = "under_way.safetensors", "about"


def write_under_way(folder: Path, ahead: Ahead) -> None:
    """Wait for the steps under way, and write their rollouts, images and scores."""
    ahead.desk.until(lambda: all(step.whole for step in ahead.open))
    tensors: dict[str, Tensor] = {}
    steps: list[dict[str, Any]] = []
    for step in ahead.open:
        parts = []
        for index, harvest in enumerate(step.rows):
            tensors |= {f"{step.step}/{index}/{name}": value for name, value in _tensors(ahead, harvest).items()}
            generated = {"version": harvest.generated.version, "received": harvest.generated.received}
            parts.append({"generated": generated, "failures": harvest.scores.failures})
        steps.append({"step": step.step, "dropped": step.dropped, "parts": parts})
    about = {"steps": steps, "next": ahead.waiting[0] if ahead.waiting else None}
    save_file(tensors, folder / FILE, {ABOUT: json.dumps(about)})  # one entry, for the library writes several in any order


def read_under_way(folder: Path, ahead: Ahead) -> None:
    """Put the steps of a checkpoint under way again, as if they had just been made."""
    with safe_open(folder / FILE, "pt") as file:
        about = json.loads(file.metadata()[ABOUT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    for said in about["steps"]:
        step = ahead.prepared(said["step"])
        step.dropped = said["dropped"]
        for index, part in enumerate(step.parts):
            step.harvest[index] = _harvest(ahead, part, _below(f"{step.step}/{index}/", tensors), said["parts"][index])
        ahead.open.append(step)
    while ahead.waiting and ahead.waiting[0] != about["next"]:
        ahead.waiting.popleft()


def _tensors(ahead: Ahead, harvest: Harvest) -> dict[str, Tensor]:
    rollouts: Rollouts = ahead.placement.fetch(harvest.rollouts)
    scores = {f"metrics/{name}": values for name, values in harvest.scores.metrics.items()} | {"reward": harvest.scores.reward}
    arrays = {"images": ahead.placement.fetch(harvest.images)} | scores
    # Copies, as what comes out of Ray's store cannot be written.
    tensors = {"latents": rollouts.latents} | {name: torch.tensor(values) for name, values in arrays.items()}
    if rollouts.trajectory is not None:
        tensors |= {f"trajectory/{name}": values for name, values in vars(rollouts.trajectory).items()}
    return {name: values.contiguous() for name, values in tensors.items()}


def _harvest(ahead: Ahead, part: Part, tensors: dict[str, Tensor], said: dict[str, Any]) -> Harvest:
    """The inverse; what workers said of their time is of another attempt."""
    recorded = _below("trajectory/", tensors)
    rollouts = Rollouts(tensors["latents"], Trajectory(**recorded) if recorded else None)
    metrics = {name: values.numpy() for name, values in _below("metrics/", tensors).items()}
    scores, put = ScoreTable(tensors["reward"].numpy(), metrics, said["failures"]), ahead.placement.put
    generated = Generated(**said["generated"], finite=rollouts.finite, busy=[])
    return Harvest(part, put(rollouts), put(tensors["images"].numpy()), generated, scores, [])


def _below(start: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): values for name, values in tensors.items() if name.startswith(start)}
