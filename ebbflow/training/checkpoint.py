"""Checkpoints inside a stage: everything that the next optimiser step depends on, in a committed
folder.

Noise has no state (``ebbflow.flow.noise``), so what remains is the policy with its copies, the
optimiser, the counters and whatever the stage adds. Training that resumes from a checkpoint ends
with the same bytes as training that never stopped; with another number of processes it ends with
the same up to rounding.

Every process writes its own part of each tensor (``parameters-00000-of-00002.safetensors``,
``optimizer-...``, the copies likewise), so no tensor is gathered; of several replicas of the model,
the first writes. Other machines send their files to that of rank 0. Then come ``manifest.json`` and
COMMIT (``ebbflow.storage.artifacts``).

Example: the checkpoint of step 20 by two processes, of an algorithm with the copy ``old``::

    step-00020/
        parameters-00000-of-00002.safetensors  parameters-00001-of-00002.safetensors
        old-00000-of-00002.safetensors         old-00001-of-00002.safetensors
        optimizer-00000-of-00002.safetensors   optimizer-00001-of-00002.safetensors
        counters.json   {"updates": 40, "steps": 20, "alarms": [], "drift": 0.012, ...}
        state.json      {"about": {"recipe": "5f0c...", "stage": "..."}, "score": 0.71, ...}
        manifest.json  COMMIT
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ebbflow.algorithms.base import FOLLOWING
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import (
    COMMIT,
    MANIFEST,
    ArtifactError,
    verify_folder,
    write_new_folder,
)
from ebbflow.storage.formats import CHECKPOINT_FORMAT
from ebbflow.training.distributed import Ranks, receive_file, send_file
from ebbflow.training.optimizer import AnyOptimizer, state_from_tensors, state_to_tensors
from ebbflow.training.policy import Policy
from ebbflow.training.sharding import shard_like
from ebbflow.training.update import PolicyUpdater

logger = logging.getLogger(__name__)

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
COUNTERS = "counters.json"
STATE = "state.json"
MOVING = (*FOLLOWING, "ema")
"""Copies that move with the training; the others are what they were at the start of the stage."""
COUNTED = (
    *("updates", "steps", "alarms", "drift", "drifted", "loss_scale"),
    *("reset_step", "is_reset_due"),
)


class CheckpointError(Exception):
    """A checkpoint of another training: names the folder, what differs, and how to fix it."""


# ----------------------------------------------------------------------------------- what is in one


def write_part(folder: Path, updater: PolicyUpdater) -> None:
    """Write this process's part of where the updater stands into a folder that is not committed
    yet; every rank calls it.
    """
    rank = Ranks.current().rank
    num_parts = _count_parts(updater)
    if rank >= num_parts:
        return  # the parts of another replica are the same
    for kind, values in _collect_state_tensors(updater).items():
        # What is not sharded (the step counts of an optimiser) is the same on all ranks: rank 0
        # writes it.
        local_values = {
            name: _local_shard(value)
            for name, value in values.items()
            if rank == 0 or isinstance(value, DTensor)
        }
        save_file(local_values, folder / _part_name(kind, rank, num_parts))
    if rank == 0:
        counters = {name: getattr(updater, name) for name in COUNTED}
        (folder / COUNTERS).write_text(json.dumps(counters))


def collect_parts(folder: Path, updater: PolicyUpdater) -> None:
    """Bring what ``write_part`` wrote on other machines into the folder of rank 0; all ranks call
    it, each with its own folder.
    """
    ranks = Ranks.current()
    num_parts = _count_parts(updater)
    # One file after another, so that rank 0 has room for what arrives. The ranks of its own machine
    # wrote into its folder.
    for sender in range(ranks.ranks_per_node, num_parts):
        for kind in sorted(_collect_state_tensors(updater)):
            path = folder / _part_name(kind, sender, num_parts)
            if ranks.rank == sender:
                send_file(path, receiver=0)
            elif ranks.rank == 0:
                receive_file(path, sender)


def _count_parts(updater: PolicyUpdater) -> int:
    """Count the ranks over which a replica of the model is sharded."""
    return Ranks.current().world // updater.policy.replicas


def _part_name(kind: str, rank: int, num_parts: int) -> str:
    return f"{kind}-{rank:05d}-of-{num_parts:05d}.safetensors"


def part_files(folder: Path) -> list[Path]:
    """List what ``write_part`` wrote, on all ranks."""
    return [*sorted(folder.glob("*-of-*.safetensors")), folder / COUNTERS]


@torch.no_grad()
def restore_updater(folder: Path, updater: PolicyUpdater) -> None:
    """Put the updater where it stood; every rank calls it, however many wrote the checkpoint."""
    policy = updater.policy
    optimizers = _optimizers_by_name(updater)
    # The kinds of parts that are there: "parameters", "old", "optimizer", ...
    kinds = {path.name.partition("-")[0] for path in part_files(folder)}
    # Sorted, because sharding a tensor communicates: all ranks take the kinds in the same order.
    for kind in sorted(kinds - {*optimizers, COUNTERS}):
        with _open_shards(folder, kind) as values:
            tensors = policy.distribute_tensors(values)
        if kind == PARAMETERS:
            # Into the parameters that are there, because the optimiser and FSDP2 hold on to them.
            policy.assign_parameters(tensors)
        else:
            policy.copies[kind] = tensors
    for kind, optimizer in optimizers.items():
        with _open_shards(folder, kind) as values:
            for name, parameter in policy.parameters.items():
                # Keys are "<parameter>/<what it is>", such as "proj.weight/exp_avg".
                state = {
                    key.rpartition("/")[2]: _place_state_tensor(policy, values[key], parameter)
                    for key in values
                    if key.rpartition("/")[0] == name
                }
                if state:  # nothing before the first step
                    optimizer.state[parameter] = state_from_tensors(state)
    for name, value in json.loads((folder / COUNTERS).read_text()).items():
        setattr(updater, name, value)


def _collect_state_tensors(updater: PolicyUpdater) -> dict[str, dict[str, Tensor]]:
    """Collect the parameters, the copies that follow them, and every tensor of the optimisers by
    parameter and by what it is.
    """
    policy = updater.policy
    shared = updater.stage.optimizer.factory.shared_state
    optimizers: dict[str, dict[str, Tensor]] = {}
    for kind, optimizer in _optimizers_by_name(updater).items():
        optimizers[kind] = {
            f"{name}/{key}": value
            for name, parameter in policy.parameters.items()
            for key, value in state_to_tensors(optimizer.state.get(parameter, {}), shared).items()
        }
    # Copies that stand still are not written: a stage that resumes loads them as it did at first.
    copies = {name: values for name, values in policy.copies.items() if name in MOVING}
    return {PARAMETERS: policy.parameters, **copies, **optimizers}


def _optimizers_by_name(updater: PolicyUpdater) -> dict[str, AnyOptimizer]:
    """Return the optimisers of the policy and of what is trained beside it, by what their parts are
    called.
    """
    copies = {f"{name}_{OPTIMIZER}": copy for name, copy in updater.trained_copies.items()}
    return {OPTIMIZER: updater.optimizer} | {name: copy.optimizer for name, copy in copies.items()}


def _local_shard(value: Tensor) -> Tensor:
    """Return this process's rows of a tensor."""
    if isinstance(value, DTensor):
        assert value.placements[-1] == Shard(0), "FSDP2 deals out rows"
        value = value.to_local()
    return value.detach().contiguous()


class _ShardedTensors(Mapping[str, Tensor]):
    """The whole tensors behind the parts of several processes, read one at a time."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.names = [list(part.keys()) for part in parts]

    def __getitem__(self, name: str) -> Tensor:
        # FSDP2 deals out rows in the order of the ranks, so the shards are put one below another.
        shards = [
            part.get_tensor(name)
            for part, names in zip(self.parts, self.names, strict=True)
            if name in names
        ]
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names[0])  # the first process has a part of everything

    def __len__(self) -> int:
        return len(self.names[0])


@contextmanager
def _open_shards(folder: Path, kind: str) -> Iterator[_ShardedTensors]:
    with ExitStack() as stack:
        yield _ShardedTensors(
            [
                stack.enter_context(safe_open(path, "pt"))
                for path in sorted(folder.glob(f"{kind}-*.safetensors"))
            ]
        )


def _place_state_tensor(policy: Policy, value: Tensor, parameter: Tensor) -> Tensor:
    """Bring a tensor of the optimiser's state to where it lay."""
    placed = policy.place_tensor(value, parameter)
    # Moments lie like their parameters; counters are whole, on the device of their parameter, where
    # fused AdamW wants them. A parameter without dimensions is as small as a counter.
    is_moment = value.ndim > 0 and value.shape == parameter.shape
    return shard_like(placed, parameter) if is_moment else placed


# --------------------------------------------------------------------------------- those of a stage


class BestCheckpoint(NamedTuple):
    """The checkpoint that was validated best.

    Example: BestCheckpoint(folder=Path(".../step-00040"), step=40, score=0.7125)
    """

    folder: Path
    step: int
    score: float


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a stage, ``step-00010`` and so on; the number is that of the steps done.

    Attributes:
        folder: where they lie, on the disk of the process that writes them.
        saved: called with each new checkpoint, to bring it where a later attempt finds it.
    """

    ctx: StageContext
    folder: Path
    saved: Callable[[Path], None] = lambda checkpoint: None

    @property
    def training_identity(self) -> dict[str, str]:
        """Which training they are of; a checkpoint of another one is refused."""
        return {
            "recipe": self.ctx.recipe.digest,
            "stage": self.ctx.stage_label,
            "format": str(CHECKPOINT_FORMAT),
        }

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps."""
        config = self.ctx.config.checkpoints
        return config is not None and step % config.every == 0

    @contextmanager
    def save_step(
        self, step: int, state: dict[str, Any], score: float | None = None
    ) -> Iterator[Path]:
        """Save where the stage stands: the block writes the parts of all processes (``write_part``)
        into the folder it is given.

        The last checkpoints and the best one are kept. Those of later steps go, and a damaged one
        of this step: an attempt passed them over, so they are of a training that did not happen.

        Args:
            step: steps done.
            state: what the stage wants to find again, as JSON.
            score: how good the policy was then, if that is known; more is better.
        """
        new = self._path_of_step(step)
        for path in self._list_checkpoints():
            if step_of(path) > step or (path == new and find_damage(path)):
                shutil.rmtree(path)
        with write_new_folder(new) as unfinished:
            yield unfinished
            (unfinished / STATE).write_text(
                json.dumps({"about": self.training_identity, "score": score, "stage": state})
            )
        self._remove_old()
        self.saved(new)
        logger.info("%s checkpoint of step %d saved at %s", self.ctx.stage_label, step, new)

    def find_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Find the newest whole checkpoint and what the stage wanted to find again; damaged ones
        are passed over.

        Raises:
            CheckpointError: it is one of another training.
        """
        path = next(filter(_is_whole, reversed(self._list_checkpoints())), None)
        return (path, self.read_state(path)) if path else None

    def load_step(self, step: int) -> tuple[Path, dict[str, Any]]:
        """Return what ``find_newest`` does, for the checkpoint of a step that is known to be
        whole.
        """
        path = self._path_of_step(step)
        return path, self.read_state(path)

    def require_step(self, step: int) -> None:
        """Check that this machine has the whole checkpoint of a step that another machine has.

        Raises:
            CheckpointError: it is not there.
            ArtifactError: it is damaged.
        """
        if not self._path_of_step(step).is_dir():
            raise CheckpointError(
                f"{self._path_of_step(step)} is on the machine of rank 0 and not on this one: with"
                " several machines the recipe's output must be a URI, or a folder that all of them"
                " share"
            )
        verify_folder(self._path_of_step(step))

    def find_best(self) -> BestCheckpoint | None:
        """Find the whole one with the highest score, the first of several; None where no score is
        known.
        """
        # Best first, because checking that one is whole reads all of it.
        scored = sorted(self._list_scored(), key=lambda checkpoint: -checkpoint.score)
        for checkpoint in scored:
            if _is_whole(checkpoint.folder):
                return checkpoint
        return None

    def _list_scored(self) -> list[BestCheckpoint]:
        states = ((path, _read_committed_state(path)) for path in self._list_checkpoints())
        return [
            BestCheckpoint(path, step_of(path), state["score"])
            for path, state in states
            if _is_score(state.get("score"))
        ]

    def copy_checkpoints(self, folder: Path, step: int) -> Checkpoints:
        """Copy the checkpoints up to a step into another folder. One that the stage deletes
        meanwhile may be left out.
        """
        for path in self._list_checkpoints():
            if step_of(path) <= step:
                with suppress(OSError):  # a copy that is not whole is passed over
                    shutil.copytree(path, folder / path.name)
        return Checkpoints(self.ctx, folder)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what the stage wanted to find again in a checkpoint.

        Raises:
            CheckpointError: it is damaged, or one of another training.
        """
        content = _read_committed_state(folder)
        if not content.keys() >= {"about", "stage"} or not isinstance(content["about"], dict):
            raise CheckpointError(
                f"{folder / STATE} is damaged, or of another version of Ebbflow; remove {folder}"
            )
        identity = content["about"]
        written = identity.get("format")
        if written != str(CHECKPOINT_FORMAT):
            is_newer = isinstance(written, str) and written.isdecimal()
            raise CheckpointError(
                f"{folder} is of {'another' if is_newer else 'an earlier'} Ebbflow (checkpoint"
                f" format {written or 'none'}, this one resumes from {CHECKPOINT_FORMAT}): remove"
                " it to train the stage from its start, or go on with the Ebbflow that wrote it"
            )
        if identity != self.training_identity:
            differ = ", ".join(
                f"{key} = {identity.get(key)!r} (now {value!r})"
                for key, value in self.training_identity.items()
                if identity.get(key) != value
            )
            raise CheckpointError(
                f"{folder} is the checkpoint of another training: {differ}; remove it, or go on"
                " with what made it"
            )
        state: dict[str, Any] = content["stage"]
        return state

    def _remove_old(self) -> None:
        config = self.ctx.config.checkpoints
        newest = self._list_checkpoints()[-(config.keep if config else 1) :]
        best = max(self._list_scored(), key=lambda checkpoint: checkpoint.score, default=None)
        for path in self._list_checkpoints():
            if path not in newest and not (best and path == best.folder):
                shutil.rmtree(path)

    def _path_of_step(self, step: int) -> Path:
        return self.folder / f"step-{step:05d}"

    def _list_checkpoints(self) -> list[Path]:
        """List the folders that are called like checkpoints, by step; damaged ones too."""
        checkpoints = [
            path
            for path in self.folder.glob("step-*")
            if path.is_dir()
            and path.name.removeprefix("step-").isdecimal()
            # "step-7" is no name that a stage writes: it would be a second checkpoint of step 7.
            and path == self._path_of_step(step_of(path))
        ]
        return sorted(checkpoints, key=step_of)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether the stage can resume from a checkpoint. A damaged one is logged."""
    error = find_damage(checkpoint)
    if error:
        logger.warning("damaged checkpoint passed over: %s", error)
    return error is None


def find_damage(checkpoint: Path) -> ArtifactError | None:
    """Return why a checkpoint is not whole, or None; reads all of it."""
    try:
        verify_folder(checkpoint)
    except ArtifactError as error:
        return error
    return None


def step_of(checkpoint: Path) -> int:
    """Return the steps done, by the name of the checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def _read_committed_state(checkpoint: Path) -> dict[str, Any]:
    """Read the content of ``state.json`` if that is what was committed; else nothing, and a
    warning.
    """
    # Only this file is checked against the manifest: which checkpoint was best is asked after every
    # save, and the others take long to read.
    try:
        content = (checkpoint / STATE).read_bytes()
        manifest = (checkpoint / MANIFEST).read_bytes()
        committed = (checkpoint / COMMIT).read_text() == hashlib.sha256(manifest).hexdigest()
        expected = json.loads(manifest)["files"][STATE]["sha256"] if committed else None
        state = json.loads(content) if expected == hashlib.sha256(content).hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        logger.warning("%s is damaged: what it says is not used", checkpoint / STATE)
        return {}
    return state


def _is_score(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)
