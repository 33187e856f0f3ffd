"""The policy: the trained parameters of a model, and named copies of them.

Full-parameter and LoRA training, one process and FSDP2 differ only in which parameters are trained
and how they are stored. A copy (``reference``, ``old``, ``sampling``, ``rollout``, ``ema``,
``fake``, ``teacher`` or one for each prompt set) is a snapshot of the trained parameters.
``use_copy`` swaps it in for a forward pass without gradient, ``train_copy`` to train it. So the
reference is always the base model: the untouched weights, or adapters whose second factor is zero.

Example::

    with policy.use_copy("reference"):
        base_velocity = predict(policy.model, latents, sigma, conditioning)  # of the base model
    velocity = predict(policy.model, latents, sigma, conditioning)  # of the policy, with gradient
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from ebbflow.models.base import Model, device_of, trained_networks
from ebbflow.models.context_parallel import require_shareable_tokens, share_tokens
from ebbflow.recipe.model import FsdpConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.adapters import (
    ADAPTER,
    add_lora,
    choose_trained_layers,
    no_matching_layers_error,
)
from ebbflow.training.distributed import Ranks, average_over_processes, build_row_mesh
from ebbflow.training.loading import (
    add_placeholders,
    find_pending_weights,
    move_to_meta,
    read_weights,
)
from ebbflow.training.parameter_files import read_copy, read_parameters, write_parameters
from ebbflow.training.policy_metadata import (
    ITERATE,
    METADATA,
    STATISTICS,
    PolicyError,
    PolicyMetadata,
    has_weights,
    read_policy_metadata,
)
from ebbflow.training.sharding import gather_tensors, shard_like, shard_model

FSDP = FsdpConfig()


class Policy:
    """The trained parameters of ``model.transformer`` and their copies; ``reference`` is always
    there.

    Args:
        shard: over the ranks of the process group (FSDP2), on all of them together.
        replicas: of the sharded model, each over as many ranks that follow each other (HSDP). As
            many as there are ranks: every rank holds the whole model, and only gradients travel.
        cpu_offload: keep the copies in main memory; of a sharded model the parameters and gradients
            too.
        fsdp: how a sharded model is gathered.
        context_parallel: ranks that follow each other and share the tokens of each row; they call
            with the same rows.

    Attributes:
        ranks: this process among those that train the policy.
        row_ranks: this process among those with rows of their own: ranks that share tokens are one.
        has_whole_gradients: whether a backward pass leaves the gradient of this process's rows.
        gradient_factor: the factor of a row's loss, beside one over the rows that all processes
            count, with which gradients are those of the mean over all rows.
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
        if config.train == "lora":
            config = config.model_copy(update={"targets": config.targets or model.lora_targets})
        self.config = config
        self.replicas = replicas
        self.context_parallel = context_parallel
        self.ranks = Ranks.current()
        self.row_ranks = self.ranks.row_ranks(context_parallel)
        # A replica on one rank has nothing to share out. Plain parameters are as fast as in one
        # process, and predict the same to the last bit.
        self.replicated = shard and replicas == self.ranks.world > 1
        self.sharded = shard and not self.replicated
        # Shards sum gradients over processes in parts, and a process that shares tokens has that of
        # its own tokens.
        self.has_whole_gradients = not self.sharded and context_parallel == 1
        # FSDP averages gradients over processes, which the world size undoes. Processes that share
        # tokens each have the gradient of their own tokens only, and each of them counts the row.
        self.gradient_factor = self.ranks.world * context_parallel
        self.fsdp = fsdp
        # FSDP2 keeps copies of offloaded parameters in main memory anyway: they are clones of them.
        self.offloaded = cpu_offload and not self.sharded
        self.shards_offloaded = cpu_offload and self.sharded
        # Whether parameters can be made to point at the memory of a copy. FSDP2 keeps its own views
        # of the parameters' memory, and offloaded copies are not on the device.
        self.can_swap = not self.sharded and not self.offloaded

        self.row_group: ProcessGroup | None = None
        self._prepare_network(seed, cpu_offload)

        # Only now: FSDP2 has replaced the parameters by DTensors.
        self.parameters = self._list_trained_parameters()
        self.copies: dict[str, dict[str, Tensor]] = {}
        # Before anything is loaded or trained, so that the reference is the base model: the
        # untouched weights, or adapters whose product is zero.
        self.snapshot_copy("reference")

    def _prepare_network(self, seed: int, cpu_offload: bool) -> None:
        """Choose which parameters are trained, share out the network, and load its weights."""
        model = self.model
        config = self.config
        # Networks without weights read theirs at the end, when it is known which of them this
        # process keeps.
        device = device_of(model)
        pending = find_pending_weights(model) is not None
        if pending:
            add_placeholders(model, in_float32=config.train == "full")
        # Which parameters are trained. This comes before sharding, because adapters and float32
        # weights have to be there when FSDP2 takes over the modules.
        if config.train == "lora":
            add_lora(model, config, seed)
        else:
            choose_trained_layers(model, config)
        if self.context_parallel > 1:
            require_shareable_tokens(model, self.context_parallel)
            self.row_group = share_tokens(model, build_row_mesh(self.context_parallel))
        adapters = move_to_meta(model) if pending and self.sharded else {}
        if self.sharded:
            shard_model(model, config.train == "full", self.replicas, cpu_offload, self.fsdp)
        elif config.train == "full":
            model.transformer.float()
        if pending:
            read_weights(model, torch.device("cpu") if self.shards_offloaded else device, adapters)

    def _list_trained_parameters(self) -> dict[str, Tensor]:
        network = self.model.transformer
        parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not parameters:
            raise no_matching_layers_error(self.model, self.config)
        return parameters

    def ensure_copy(self, name: str, source: str = "current") -> None:
        """Start a copy at the current parameters, or at those of another copy, unless the loaded
        policy brought it along.
        """
        if name not in self.copies:
            with self.use_copy(source):
                self.snapshot_copy(name)

    def snapshot_copy(self, name: str) -> None:
        """Make (or refresh) a copy from the current parameters."""
        self.copies[name] = self._clone_parameters()

    def _clone_parameters(self) -> dict[str, Tensor]:
        """Clone the parameters to where copies are kept."""
        if self.offloaded:
            return {key: copy_to_main_memory(p.detach()) for key, p in self.parameters.items()}
        return {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def blend_copy(self, name: str, decay: float) -> None:
        """Move a copy towards the parameters: copy <- decay * copy + (1 - decay) * current."""
        copy = self.copies[name]
        if self.offloaded:
            # Computed on the device, one parameter after another: a GPU's arithmetic, with room for
            # no more than one of them.
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
        # The reference's adapters add zero: leaving them out gives the same values in fewer
        # products. DoRA's would not, as it divides by a norm that rounds.
        adds_zero = name == "reference" and self.config.train == "lora" and not self.config.dora
        with (
            torch.no_grad(),
            self._put_parameters(self.copies[name]),
            self._skip_adapters() if adds_zero else nullcontext(),
        ):
            yield

    @contextmanager
    def _skip_adapters(self) -> Iterator[None]:
        """Predict without the adapters' products inside the block, unless the network is
        compiled.
        """
        modules = list(self.model.transformer.modules())
        layers = [m for m in modules if isinstance(m, LoraLayer)]
        # Compiled blocks without adapters are another graph: it would be compiled beside the
        # policy's, and may round otherwise than that.
        if any(module._compiled_call_impl is not None for module in modules):
            layers = []
        try:
            for layer in layers:
                # peft's own switch would also turn off the gradients of the parameters.
                layer._disable_adapters = True
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @contextmanager
    def train_copy(self, name: str) -> Iterator[None]:
        """Train a copy inside the block: the parameters are the copy's, with gradient, until they
        are put back, without one.
        """
        copy = self.copies[name]
        self._clear_gradients()  # what is there is the policy's own
        try:
            with self._put_parameters(copy):
                yield
                if not self.can_swap:
                    # The parameters were overwritten with the copy's values, so what was trained
                    # goes back into it. Swapped parameters are the copy's own memory.
                    for key, parameter in self.parameters.items():
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
        """Set whether the next backward pass sums the gradients over all processes, or leaves that
        to a later one.
        """
        # Until then FSDP2 keeps whole gradients on every process. Those of adapters are small.
        # Those of all parameters would need as much memory as the whole model, so they are summed,
        # and sharded again, in every pass.
        if self.config.train != "lora":
            return
        for network in trained_networks(self.model.transformer).values():
            if isinstance(network, FSDPModule):
                network.set_requires_gradient_sync(wanted)

    def average_gradients(self) -> None:
        """Average the gradients over the processes of a replicated model; FSDP2 does that for a
        sharded one in the backward pass.

        Gradients that are equal everywhere already stay as they are, so that a later pass may be
        added to them and averaged again.
        """
        if self.replicated:
            average_over_processes([p.grad for p in self.parameters.values() if p.grad is not None])

    @contextmanager
    def _put_parameters(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the parameters inside the block, and put them back after it."""
        if self.can_swap:
            # Nothing is copied: the parameters are the given tensors meanwhile.
            current = {key: p.data for key, p in self.parameters.items()}
            try:
                for key, parameter in self.parameters.items():
                    parameter.data = values[key]
                yield
            finally:
                for key, parameter in self.parameters.items():
                    parameter.data = current[key]
        else:
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

        Predictions stay the same up to rounding, 1e-5 of the largest, so training must not compare
        its own predictions with them. The block changes nothing without adapters, where the policy
        is sharded, and below float32, whose rounding would lose most of an adapter; nor for DoRA,
        which does not only add.
        """
        exact = self.model.precision == (precision or self.model.precision) == "float32"
        layers = []
        if exact and not self.sharded and not self.config.dora:
            modules = self.model.transformer.modules()
            layers = [m for m in modules if isinstance(m, LoraLayer) and not m.disable_adapters]
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

    @torch.no_grad()
    def assign_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the parameters, by name."""
        self._wait_for_reads()
        for key, parameter in self.parameters.items():
            parameter.copy_(values[key])

    def _wait_for_reads(self) -> None:
        """Wait until the GPU has read the offloaded shards of every forward pass launched so far.

        FSDP2 copies them from pinned memory with ``non_blocking=True``. After a pass without
        gradient these copies may still be in the queue while Python goes on, and would read what is
        written over the shards now. A backward pass needs no such wait: FSDP2 waits for its
        gradients in main memory, which come after all copies.
        """
        if not (self.shards_offloaded and torch.cuda.is_available()):
            return  # a parameter on the device is overwritten in the order of its stream
        # FSDP2 copies in a stream of its own, but each forward pass waits for its copies in the
        # current stream, so an event there comes after all of them. The rest of the device, such as
        # another thread's rollouts, goes on.
        launched = torch.cuda.Event()
        launched.record()
        launched.synchronize()

    @torch.no_grad()
    def load_folder(self, folder: Path, to_train: bool = False) -> PolicyMetadata:
        """Load the parameters of a policy folder.

        Args:
            to_train: load what training goes on from: the copies too, and of a policy with an
                average (``ema``) the parameters behind it instead of the average.

        Raises:
            ArtifactError: the folder is not whole.
            PolicyError: it holds another kind of policy.
        """
        metadata = read_policy_metadata(folder)
        # Where a policy was started does not change what its parameters are, and one without
        # weights of its own is the base model whatever is to be adapted.
        expected: dict[str, Any] = {"start": self.config.start}
        if metadata.config.targets is None:
            expected["targets"] = self.config.targets
        if metadata.config.model_copy(update=expected) != self.config:
            raise PolicyError(
                f"{folder} holds a policy of {metadata.config}, the recipe asks for {self.config};"
                " use its own recipe"
            )
        if has_weights(folder):
            parameters = read_parameters(folder, self.model, self.config, self.parameters)
            self.assign_parameters(self.distribute_tensors(parameters))
        else:
            # A folder of the base model has no weights of its own.
            self.assign_parameters(self.copies["reference"])
        if to_train:
            for name in metadata.copies:
                copy = read_copy(folder, name, self.parameters)
                self.copies[name] = self.distribute_tensors(copy)
            if ITERATE in self.copies:
                # The folder's weights are the average, because that is what is evaluated and
                # served. Training goes on from the parameters that it averages.
                self.snapshot_copy("ema")
                self.assign_parameters(self.copies.pop(ITERATE))
        return metadata

    def load_copy(self, name: str, folder: Path) -> None:
        """Make a copy of what another policy folder of the same kind serves.

        Raises:
            ArtifactError, PolicyError: as for ``load_folder``.
        """
        current = self._clone_parameters()
        self.load_folder(folder)
        self.snapshot_copy(name)
        self.assign_parameters(current)

    def distribute_tensors(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring whole tensors into the layout of the parameters, sharded where they are: on their
        device, or in main memory.

        Copied even where they are there: kernels may add in another order on the unaligned memory
        of a file.
        """
        return {
            key: shard_like(self.place_tensor(full[key], p), p)
            for key, p in self.parameters.items()
        }

    def place_tensor(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Copy a tensor to where copies of a parameter, and the optimiser's state, are between
        steps.
        """
        if self.offloaded:
            return copy_to_main_memory(value)
        return value.to(parameter.device, copy=True)

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
        served = {}
        if self.config.train == "full":
            # Full weights are written whole, with the parameters that are not trained.
            for name, p in self.model.transformer.named_parameters():
                if not p.requires_grad:
                    served[name] = p.detach()
        served |= self.copies["ema"] if self.config.ema else parameters
        # Gathering is collective, so every rank takes part before those that do not write return.
        full = gather_tensors(served, write)
        copies = {
            name: gather_tensors(parameters if name == ITERATE else self.copies[name], write)
            for name in metadata.copies
        }
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
            config = metadata.config.model_copy(update={"targets": self.config.targets})
            trained = metadata.model_copy(update={"config": config})
            (unfinished / METADATA).write_text(trained.model_dump_json(indent=2))


def copy_to_main_memory(value: Tensor) -> Tensor:
    """Copy a tensor to main memory, pinned where there is a GPU: other memory takes many times as
    long to copy.
    """
    return torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available()).copy_(value)
