"""The policy: the trained parameters of a model, and named copies of them.

Full-parameter and LoRA training, one process and FSDP2 differ only in which parameters are trained
and how they are stored. A copy (``reference``, ``old``, ``sampling``, ``rollout``, ``ema``,
``fake``, ``teacher`` or one for each prompt set) is a snapshot of the trained parameters; ``using``
swaps it in for a forward pass without gradient, ``training`` to train it. So the reference is
always the base model: the untouched weights, or adapters whose second factor is zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ebbflow.models.base import Model, is_trainable, trained_networks
from ebbflow.models.context_parallel import require_shareable_tokens, share_tokens
from ebbflow.recipe.model import FsdpConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.adapters import ADAPTER, add_lora, is_layer_chosen, no_matching_layers_error
from ebbflow.training.distributed import build_replica_mesh, build_row_mesh, gather_tensor
from ebbflow.training.parameter_files import (
    has_weights,
    read_copy,
    read_parameters,
    write_parameters,
)
from ebbflow.training.policy_metadata import (
    ITERATE,
    METADATA,
    STATISTICS,
    PolicyError,
    PolicyMetadata,
    read_policy_metadata,
)

FSDP = FsdpConfig()


class Policy:
    """The trained parameters of ``model.transformer`` and their copies; ``reference`` is always
    there.

    Args:
        shard: over the ranks of the process group (FSDP2), on all of them together.
        replicas: of the sharded model, each over as many ranks that follow each other (HSDP).
        cpu_offload: keep the copies in main memory; of a sharded model the parameters and gradients
            too.
        fsdp: how a sharded model is gathered.
        context_parallel: ranks that follow each other and share the tokens of each row; they call
            with the same rows.
    """

    def __init__(
        self,
        model: Model,
        config: PolicyConfig,
        seed: int,
        shard: bool = False,
        replicas: int = 1,
        cpu_offload: bool = False,
        fsdp: FsdpConfig = FSDP,
        context_parallel: int = 1,
    ) -> None:
        self.model = model
        self.config = config
        self.replicas = replicas
        self.context_parallel = context_parallel
        self.sharded = shard
        self.fsdp = fsdp
        self.offloaded = (
            cpu_offload and not shard
        )  # FSDP2 keeps the copies of parameters in main memory where those are
        if config.train == "lora":
            add_lora(model, config, seed)
        else:
            for prefix, network in trained_networks(model.transformer).items():
                for name, parameter in network.named_parameters():
                    parameter.requires_grad_(
                        is_layer_chosen(prefix + name.rpartition(".")[0], config)
                        and is_trainable(model, name)
                    )
        if context_parallel > 1:
            require_shareable_tokens(model, context_parallel)
            share_tokens(model, build_row_mesh(context_parallel))
        sharding = _build_fsdp_arguments(replicas, cpu_offload, fsdp) if shard else {}
        for block in model.list_blocks() if shard else ():
            # Cast block by block: all of a large model in float32 would not fit beside what it was
            # loaded as.
            fully_shard(block.float() if config.train == "full" else block, **sharding)
        if config.train == "full":
            model.transformer.float()
        if shard:
            for network in trained_networks(model.transformer).values():
                # Without this the root keeps its gathered weights after a forward pass and would
                # not see a copy swapped in.
                fully_shard(network, **sharding)
        for network in (
            trained_networks(model.transformer).values() if shard and fsdp.prefetch else ()
        ):
            inside = set(
                network.modules()
            )  # a block cannot prefetch one of another network: each is a root of its own
            for sharded, following in pairwise(
                cast(
                    "list[FSDPModule]", [block for block in model.list_blocks() if block in inside]
                )
            ):
                sharded.set_modules_to_forward_prefetch([following])
        self.parameters: dict[str, Tensor] = {
            name: p for name, p in model.transformer.named_parameters() if p.requires_grad
        }
        if not self.parameters:
            raise no_matching_layers_error(model, config)
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.snapshot_copy("reference")

    def ensure_copy(self, name: str) -> None:
        """Start a copy at the current parameters unless the loaded policy brought it along."""
        if name not in self.copies:
            self.snapshot_copy(name)

    def snapshot_copy(self, name: str) -> None:
        """Make (or refresh) a copy from the current parameters."""
        self.copies[name] = self._clone_parameters()

    def _clone_parameters(self) -> dict[str, Tensor]:
        """The parameters as they are, where copies are kept."""
        if self.offloaded:
            return {key: copy_to_main_memory(p.detach()) for key, p in self.parameters.items()}
        return {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def blend_copy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        copy = self.copies[name]
        if self.offloaded:  # computed where the parameters are, one after another
            for key, p in self.parameters.items():
                copy[key].copy_(torch.lerp(copy[key].to(p.device), p.detach(), 1 - decay))
            return
        torch._foreach_lerp_(
            list(copy.values()), [p.detach() for p in self.parameters.values()], 1 - decay
        )

    @contextmanager
    def use_copy(self, name: str) -> Iterator[None]:
        """Predict with a copy inside the block; ``current`` changes nothing.

        Only without gradient: the parameters are the copy's until they are put back.
        """
        if name == "current":
            yield
            return
        swap = (
            self._overwrite_parameters if self.sharded or self.offloaded else self._swap_parameters
        )
        with torch.no_grad(), swap(self.copies[name]):
            yield

    @contextmanager
    def train_copy(self, name: str) -> Iterator[None]:
        """Train a copy inside the block: the parameters are the copy's, with gradient, until they
        are put back, without one.
        """
        apart = self.sharded or self.offloaded
        copy = self.copies[name]
        self._clear_gradients()  # the policy's own
        try:
            with self._overwrite_parameters(copy) if apart else self._swap_parameters(copy):
                yield
                for key, parameter in (
                    self.parameters.items() if apart else ()
                ):  # else they are the same memory
                    copy[key].copy_(parameter.detach())
        finally:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        """Inside the block, without gradient, weights stay gathered after a forward pass where
        ``fsdp.keep_gathered`` says so.
        """
        if not (self.sharded and self.fsdp.keep_gathered):
            yield
            return
        networks = trained_networks(self.model.transformer).values()
        for network in networks:
            network.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for network in networks:
                network.set_reshard_after_forward(True)
            for module in self.model.transformer.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def set_gradient_reduction(self, wanted: bool) -> None:
        """Whether the next backward pass adds up the gradients of all processes, or leaves that to
        a later one.

        Only under FSDP2 and for adapters: until then every process keeps whole gradients, of all
        parameters too much memory.
        """
        for network in (
            trained_networks(self.model.transformer).values() if self.config.train == "lora" else ()
        ):
            if isinstance(network, FSDPModule):
                network.set_requires_gradient_sync(wanted)

    @contextmanager
    def _swap_parameters(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Nothing is copied: the parameters are the given tensors meanwhile."""
        current = {key: p.data for key, p in self.parameters.items()}
        try:
            for key, parameter in self.parameters.items():
                parameter.data = values[key]
            yield
        finally:
            for key, parameter in self.parameters.items():
                parameter.data = current[key]

    @contextmanager
    def _overwrite_parameters(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """As FSDP2 needs it, which keeps its own views of the parameters' memory, and where copies
        are not on the device.
        """
        current = self._clone_parameters()
        self.assign_parameters(values)
        try:
            yield
        finally:
            self.assign_parameters(current)

    @contextmanager
    @torch.no_grad()
    def merge_adapters(self, precision: Precision | None = None) -> Iterator[None]:
        """Generate with the adapters added to the weights that they adapt, which saves their
        products in every pass.

        Predictions stay the same up to rounding, 1e-5 of the largest: not where training compares
        its own with them. It changes nothing without adapters, where the policy is sharded, and
        below float32, whose rounding would lose most of an adapter; nor for DoRA, which does not
        only add.
        """
        exact = self.model.precision == (precision or self.model.precision) == "float32"
        layers = [
            layer for layer in self.model.transformer.modules() if isinstance(layer, LoraLayer)
        ]
        layers = layers if exact and not self.sharded and not self.config.dora else []
        weights = [layer.get_base_layer().weight for layer in layers]
        separate = [weight.data for weight in weights]
        try:
            for layer, weight in zip(layers, weights, strict=True):
                weight.data = weight.data + layer.get_delta_weight(ADAPTER)
                layer.merged_adapters.append(ADAPTER)  # so that peft leaves their products out
            yield
        finally:
            for layer, weight, data in zip(layers, weights, separate, strict=True):
                weight.data = data  # the same bytes as before, unlike a subtraction
                layer.merged_adapters.clear()

    def _untrained_parameters(self) -> dict[str, Tensor]:
        """The parameters that stay as they are, where some are not trained: full weights are
        written whole.
        """
        if self.config.train == "lora":
            return {}
        return {
            name: p.detach()
            for name, p in self.model.transformer.named_parameters()
            if not p.requires_grad
        }

    @torch.no_grad()
    def assign_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the parameters, by name."""
        for key, parameter in self.parameters.items():
            parameter.copy_(values[key])

    @torch.no_grad()
    def load_folder(self, folder: Path, to_train: bool = False) -> PolicyMetadata:
        """Take over the parameters of a policy folder; to go on training, those behind the average,
        and the copies too.

        Raises:
            ArtifactError: the folder is not whole.
            PolicyError: it holds another kind of policy.
        """
        metadata = read_policy_metadata(folder)
        if metadata.config.model_copy(update={"start": self.config.start}) != self.config:
            raise PolicyError(
                f"{folder} holds a policy of {metadata.config}, the recipe asks for {self.config};"
                " use its own recipe"
            )
        if has_weights(folder):
            self.assign_parameters(
                self.distribute_tensors(
                    read_parameters(folder, self.model, self.config, self.parameters)
                )
            )
        else:
            self.assign_parameters(
                self.copies["reference"]
            )  # a folder of the base model has no weights of its own
        if to_train:
            for name in metadata.copies:
                self.copies[name] = self.distribute_tensors(
                    read_copy(folder, name, self.parameters)
                )
            if ITERATE in self.copies:
                self.snapshot_copy("ema")
                self.assign_parameters(self.copies.pop(ITERATE))
        return metadata

    def load_copy(self, name: str, folder: Path) -> None:
        """Make a copy of what another policy folder of the same kind serves.

        Raises:
            ArtifactError, PolicyError: as for ``load``.
        """
        current = self._clone_parameters()
        self.load_folder(folder)
        self.snapshot_copy(name)
        self.assign_parameters(current)

    def distribute_tensors(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors in the layout of the parameters, sharded where they are: on their device, or
        in main memory.

        Copied even where they are there: kernels may add in another order on the unaligned memory
        of a file.
        """
        return {
            key: shard_like(self.place_tensor(full[key], p), p)
            for key, p in self.parameters.items()
        }

    def place_tensor(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a tensor where copies of a parameter, and the optimiser's state, are between
        steps.
        """
        return (
            copy_to_main_memory(value) if self.offloaded else value.to(parameter.device, copy=True)
        )

    def save_folder(
        self,
        folder: Path,
        metadata: PolicyMetadata,
        write: bool = True,
        statistics: dict[str, Any] | None = None,
    ) -> None:
        """Write a policy folder. Under FSDP every rank must call it; those with ``write=False``
        only take part in gathering.

        Its weights are those to evaluate and serve: the average where there is one, and then the
        parameters that training goes on from lie beside them. ``statistics`` are the rewards of
        each prompt so far, where the stage keeps them.
        """
        parameters = {key: p.detach() for key, p in self.parameters.items()}
        served = self._untrained_parameters() | (
            self.copies["ema"] if self.config.ema else parameters
        )
        kept = {
            name: parameters if name == ITERATE else self.copies[name] for name in metadata.copies
        }
        full = gather_tensors(served, write)
        copies = {name: gather_tensors(values, write) for name, values in kept.items()}
        if not write:
            return
        with write_new_folder(folder) as unfinished:
            if metadata.version > 0 or metadata.start:
                write_parameters(unfinished, self.model, self.config, full)
            for name, values in copies.items():
                (unfinished / name).mkdir()
                save_file(values, unfinished / name / "parameters.safetensors")
            if statistics is not None:
                (unfinished / STATISTICS).write_text(json.dumps(statistics))
            (unfinished / METADATA).write_text(metadata.model_dump_json(indent=2))


def _build_fsdp_arguments(replicas: int, cpu_offload: bool, fsdp: FsdpConfig) -> dict[str, Any]:
    """The arguments of ``fully_shard``."""
    rounded = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    return {
        "mp_policy": rounded if fsdp.gather == "bfloat16" else MixedPrecisionPolicy(),
        "mesh": build_replica_mesh(replicas),
        "reshard_after_forward": True,
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if cpu_offload
            else OffloadPolicy()
        ),
    }


def copy_to_main_memory(value: Tensor) -> Tensor:
    """A copy of a tensor in main memory, pinned where there is a GPU: other memory takes many times
    as long to copy.
    """
    return torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available()).copy_(value)


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as a parameter is; on its device, where it is sharded."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements).to(parameter.device)


def gather_tensors(values: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, for the process that keeps them; the others only take part."""
    return {
        key: full
        for key, value in values.items()
        if (full := gather_tensor(value)) is not None and keep
    }
