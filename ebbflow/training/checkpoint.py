"""Where training stands inside a stage: everything that the next optimiser step depends on, in a committed folder.

Noise has no state (``ebbflow.flow.noise``), so what remains is the policy with its copies, the optimiser, the counters and
whatever the stage adds. Training that goes on from a checkpoint ends with the same bytes as training that never stopped.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ebbflow.artifacts import ArtifactError, new_folder, verify
from ebbflow.training.policy import gathered, like
from ebbflow.training.update import Learner

COPIES, OPTIMIZER, STATE = "policy", "optimizer.safetensors", "state.json"
FOLLOWING = ("old", "ema")
"""Copies that move with the training; the others are what they were at the start of the stage."""
COUNTERS = ("updates", "steps", "alarms", "drifted", "loss_scale")


class CheckpointError(Exception):
    """A checkpoint of something else: names the folder, what differs and the way out."""


def write_checkpoint(folder: Path, learner: Learner, about: dict[str, Any], state: dict[str, Any], write: bool = True) -> None:
    """Write where the learner stands. Under FSDP every rank must call it; those with ``write=False`` only take part in gathering.

    Args:
        about: which training this is; only the same one goes on from it.
        state: what the stage wants to find again, as JSON.
    """
    files = {f"{COPIES}/{name}.safetensors": values for name, values in _moving(learner).items()}
    files[OPTIMIZER] = _optimizer_state(learner)
    if not write:
        for values in files.values():
            gathered(values, keep=False)
        return
    counters = {name: getattr(learner, name) for name in COUNTERS}
    with new_folder(folder) as unfinished:
        (unfinished / COPIES).mkdir()
        for name, values in files.items():  # one at a time: together they are several times the policy
            save_file(gathered(values, keep=True), unfinished / name)
        (unfinished / STATE).write_text(json.dumps({"about": about, "learner": counters, "stage": state}))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder of them; those that are not whole are passed over with a warning."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            verify(path)
        except ArtifactError as error:
            warnings.warn(f"checkpoint passed over: {error}", stacklevel=2)
            continue
        return path
    return None


def read_state(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What the stage wanted to find again.

    Raises:
        ArtifactError: the checkpoint is not whole.
        CheckpointError: it is one of another training.
    """
    verify(folder)
    found = json.loads((folder / STATE).read_text())
    if found["about"] != about:
        was = found["about"]
        differ = ", ".join(f"{key} = {was.get(key)!r} (now {value!r})" for key, value in about.items() if was.get(key) != value)
        raise CheckpointError(f"{folder} is the checkpoint of another training: {differ}; remove it, or go on with what made it")
    return found["stage"]


@torch.no_grad()
def restore(folder: Path, learner: Learner) -> None:
    """Put the learner where it stood; on every rank."""
    policy, state = learner.policy, json.loads((folder / STATE).read_text())
    for path in (folder / COPIES).glob("*.safetensors"):
        values = policy.distributed(load_file(path))
        if path.stem == "parameters":
            policy.assign(values)
        else:
            policy.copies[path.stem] = values
    _restore_optimizer(learner, load_file(folder / OPTIMIZER))
    for name, value in state["learner"].items():
        setattr(learner, name, value)


def _moving(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """The parameters, and the copies that follow them."""
    policy = learner.policy
    return {"parameters": policy.parameters, **{name: values for name, values in policy.copies.items() if name in FOLLOWING}}


def _optimizer_state(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of the optimiser, by parameter and by what it is."""
    state = learner.optimizer.state
    return {
        f"{name}/{key}": value
        for name, parameter in learner.policy.parameters.items()
        for key, value in state.get(parameter, {}).items()
    }


def _restore_optimizer(learner: Learner, saved: dict[str, Tensor]) -> None:
    """The inverse; moments lie like their parameters, counters as they are."""
    policy, state = learner.policy, learner.optimizer.state
    for name, parameter in policy.parameters.items():
        own = {path.rpartition("/")[2]: value for path, value in saved.items() if path.rpartition("/")[0] == name}
        if own:
            state[parameter] = {key: _placed(value, parameter) for key, value in own.items()}


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    return like(value.to(parameter.device), parameter) if value.shape == parameter.shape and value.ndim else value
