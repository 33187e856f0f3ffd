"""The policy: the trained parameters of a model, and named copies of them.

Full-parameter and LoRA training, one process and FSDP2 differ only in which parameters are trained and how they are stored.
A copy (``reference``, ``old``, ``sampling``, ``rollout``, ``ema``, ``fake``, ``teacher`` or one for each prompt set) is a
snapshot of the trained parameters; ``using`` swaps it in for a forward pass without gradient, ``training`` to train it. So the
reference is always the base model: the untouched weights, or adapters whose second factor is zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ebbflow.models.base import DTYPES, Model, is_trainable, trained_networks
from ebbflow.models.context_parallel import require_shareable, share_tokens
from ebbflow.recipe.base import sanitize
from ebbflow.recipe.model import FsdpConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import new_folder
from ebbflow.training.distributed import replica_mesh, row_mesh
from ebbflow.training.policy_metadata import (
    AGAIN,
    ITERATE,
    METADATA,
    STATISTICS,
    PolicyError,
    PolicyMetadata,
    read_policy_metadata,
)

ADAPTER = "default"
FIRST = "transformer"
"""What diffusers calls the first network of every pipeline, whose LoRA is at the top of a policy folder."""
FSDP = FsdpConfig()


class Policy:
    """The trained parameters of ``model.transformer`` and their copies; ``reference`` is always there.

    Args:
        shard: over the ranks of the process group (FSDP2), on all of them together.
        replicas: of the sharded model, each over as many ranks that follow each other (HSDP).
        cpu_offload: keep the copies in main memory; of a sharded model the parameters and gradients too.
        fsdp: how a sharded model is gathered.
        context_parallel: ranks that follow each other and share the tokens of each row; they call with the same rows.
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
        self.replicas, self.context_parallel = replicas, context_parallel
        self.sharded, self.fsdp = shard, fsdp
        self.offloaded = cpu_offload and not shard  # FSDP2 keeps the copies of parameters in main memory where those are
        if config.train == "lora":
            _add_lora(model, config, seed)
        else:
            for prefix, network in trained_networks(model.transformer).items():
                for name, parameter in network.named_parameters():
                    parameter.requires_grad_(_chosen(prefix + name.rpartition(".")[0], config) and is_trainable(model, name))
        if context_parallel > 1:
            require_shareable(model, context_parallel)
            share_tokens(model, row_mesh(context_parallel))
        sharding = _sharding(replicas, cpu_offload, fsdp) if shard else {}
        for block in model.blocks() if shard else ():
            # Cast block by block: all of a large model in float32 would not fit beside what it was loaded as.
            fully_shard(block.float() if config.train == "full" else block, **sharding)
        if config.train == "full":
            model.transformer.float()
        if shard:
            for network in trained_networks(model.transformer).values():
                # Without this the root keeps its gathered weights after a forward pass and would not see a copy swapped in.
                fully_shard(network, **sharding)
        for network in trained_networks(model.transformer).values() if shard and fsdp.prefetch else ():
            inside = set(network.modules())  # a block cannot prefetch one of another network: each is a root of its own
            for sharded, following in pairwise(cast("list[FSDPModule]", [block for block in model.blocks() if block in inside])):
                sharded.set_modules_to_forward_prefetch([following])
        self.parameters: dict[str, Tensor] = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise _no_such_layers(model, config)
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.snapshot("reference")

    def ensure(self, name: str) -> None:
        """Start a copy at the current parameters unless the loaded policy brought it along."""
        if name not in self.copies:
            self.snapshot(name)

    def snapshot(self, name: str) -> None:
        """Make (or refresh) a copy from the current parameters."""
        self.copies[name] = self._current()

    def _current(self) -> dict[str, Tensor]:
        """The parameters as they are, where copies are kept."""
        if self.offloaded:
            return {key: to_main_memory(p.detach()) for key, p in self.parameters.items()}
        return {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        copy = self.copies[name]
        if self.offloaded:  # computed where the parameters are, one after another
            for key, p in self.parameters.items():
                copy[key].copy_(torch.lerp(copy[key].to(p.device), p.detach(), 1 - decay))
            return
        torch._foreach_lerp_(list(copy.values()), [p.detach() for p in self.parameters.values()], 1 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Predict with a copy inside the block; ``current`` changes nothing.

        Only without gradient: the parameters are the copy's until they are put back.
        """
        if name == "current":
            yield
            return
        swap = self._overwritten if self.sharded or self.offloaded else self._replaced
        with torch.no_grad(), swap(self.copies[name]):
            yield

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Train a copy inside the block: the parameters are the copy's, with gradient, until they are put back, without one."""
        apart, copy = self.sharded or self.offloaded, self.copies[name]
        self._forget_gradients()  # the policy's own
        try:
            with self._overwritten(copy) if apart else self._replaced(copy):
                yield
                for key, parameter in self.parameters.items() if apart else ():  # else they are the same memory
                    copy[key].copy_(parameter.detach())
        finally:
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Inside the block, without gradient, weights stay gathered after a forward pass where ``fsdp.keep_gathered`` says so."""
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

    def reduce_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass adds up the gradients of all processes, or leaves that to a later one.

        Only under FSDP2 and for adapters: until then every process keeps whole gradients, of all parameters too much memory.
        """
        for network in trained_networks(self.model.transformer).values() if self.config.train == "lora" else ():
            if isinstance(network, FSDPModule):
                network.set_requires_gradient_sync(wanted)

    @contextmanager
    def _replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
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
    def _overwritten(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """As FSDP2 needs it, which keeps its own views of the parameters' memory, and where copies are not on the device."""
        current = self._current()
        self.assign(values)
        try:
            yield
        finally:
            self.assign(current)

    @contextmanager
    @torch.no_grad()
    def merged(self, precision: Precision | None = None) -> Iterator[None]:
        """Generate with the adapters added to the weights that they adapt, which saves their products in every pass.

        Predictions stay the same up to rounding, 1e-5 of the largest: not where training compares its own with them. It changes
        nothing without adapters, where the policy is sharded, and below float32, whose rounding would lose most of an adapter;
        nor for DoRA, which does not only add.
        """
        exact = self.model.precision == (precision or self.model.precision) == "float32"
        layers = [layer for layer in self.model.transformer.modules() if isinstance(layer, LoraLayer)]
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

    def _frozen(self) -> dict[str, Tensor]:
        """The parameters that stay as they are, where some are not trained: full weights are written whole."""
        if self.config.train == "lora":
            return {}
        return {name: p.detach() for name, p in self.model.transformer.named_parameters() if not p.requires_grad}

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the parameters, by name."""
        for key, parameter in self.parameters.items():
            parameter.copy_(values[key])

    @torch.no_grad()
    def load(self, folder: Path, to_train: bool = False) -> PolicyMetadata:
        """Take over the parameters of a policy folder; to go on training, those behind the average, and the copies too.

        Raises:
            ArtifactError: the folder is not whole.
            PolicyError: it holds another kind of policy.
        """
        metadata = read_policy_metadata(folder)
        if metadata.config.model_copy(update={"start": self.config.start}) != self.config:
            raise PolicyError(
                f"{folder} holds a policy of {metadata.config}, the recipe asks for {self.config}; use its own recipe"
            )
        if _has_weights(folder):
            self.assign(self.distributed(_read_parameters(folder, self.model, self.config, self.parameters)))
        else:
            self.assign(self.copies["reference"])  # a folder of the base model has no weights of its own
        if to_train:
            for name in metadata.copies:
                self.copies[name] = self.distributed(_read_copy(folder, name, self.parameters))
            if ITERATE in self.copies:
                self.snapshot("ema")
                self.assign(self.copies.pop(ITERATE))
        return metadata

    def load_copy(self, name: str, folder: Path) -> None:
        """Make a copy of what another policy folder of the same kind serves.

        Raises:
            ArtifactError, PolicyError: as for ``load``.
        """
        current = self._current()
        self.load(folder)
        self.snapshot(name)
        self.assign(current)

    def distributed(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors in the layout of the parameters, sharded where they are: on their device, or in main memory.

        Copied even where they are there: kernels may add in another order on the unaligned memory of a file.
        """
        return {key: like(self.placed(full[key], p), p) for key, p in self.parameters.items()}

    def placed(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A copy of a tensor where copies of a parameter, and the optimiser's state, are between steps."""
        return to_main_memory(value) if self.offloaded else value.to(parameter.device, copy=True)

    def save(self, folder: Path, metadata: PolicyMetadata, write: bool = True, statistics: dict[str, Any] | None = None) -> None:
        """Write a policy folder. Under FSDP every rank must call it; those with ``write=False`` only take part in gathering.

        Its weights are those to evaluate and serve: the average where there is one, and then the parameters that training goes on
        from lie beside them. ``statistics`` are the rewards of each prompt so far, where the stage keeps them.
        """
        parameters = {key: p.detach() for key, p in self.parameters.items()}
        served = self._frozen() | (self.copies["ema"] if self.config.ema else parameters)
        kept = {name: parameters if name == ITERATE else self.copies[name] for name in metadata.copies}
        full = gathered(served, write)
        copies = {name: gathered(values, write) for name, values in kept.items()}
        if not write:
            return
        with new_folder(folder) as unfinished:
            if metadata.version > 0 or metadata.start:
                _write_parameters(unfinished, self.model, self.config, full)
            for name, values in copies.items():
                (unfinished / name).mkdir()
                save_file(values, unfinished / name / "parameters.safetensors")
            if statistics is not None:
                (unfinished / STATISTICS).write_text(json.dumps(statistics))
            (unfinished / METADATA).write_text(metadata.model_dump_json(indent=2))


def _chosen(layer: str, config: PolicyConfig) -> bool:
    """Whether a layer, by its name, is among those to train."""
    return config.layers is None or any(fnmatchcase(layer, pattern) for pattern in config.layers)


def _no_such_layers(model: Model, config: PolicyConfig) -> PolicyError:
    linears = [name for name, layer in model.transformer.named_modules() if isinstance(layer, torch.nn.Linear)]
    layers = [name for name in linears if is_trainable(model, name)]
    of = (
        f" among the targets {', '.join(config.targets or model.lora_targets)}"
        if config.train == "lora" and config.layers
        else ""
    )
    key = f"policy.layers = {config.layers}" if config.layers else f"policy.targets = {config.targets}"
    return PolicyError(
        f"{key}: no layer{of} that is trained has such a name. Layers are called {layers[0]} or {layers[-1]}; write "
        "patterns such as 'transformer_blocks.1?.*' or '*.attn.*'"
    )


def _has_weights(folder: Path) -> bool:
    """Whether a whole policy folder has weights of its own; one of the untouched base model has none."""
    return (folder / FIRST).is_dir() or any(folder.glob("*.safetensors"))


def _add_lora(model: Model, config: PolicyConfig, seed: int) -> None:
    _round_weights(model)
    model.transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prefix, network in trained_networks(model.transformer).items():
            network.add_adapter(_lora_config(model, prefix, network, config), adapter_name=ADAPTER)
    for parameter in model.transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for layer in model.transformer.modules() if config.dora else ():
        if isinstance(layer, LoraLayer):  # in the precision in which peft divides by it: their ratio is 1 at the base model
            layer.lora_magnitude_vector[ADAPTER].weight.data = layer.get_base_layer().weight.detach().float().norm(dim=1)


def _round_weights(model: Model) -> None:
    """Keep the weights in the model's precision, but for the layers that diffusers names as too delicate for it."""
    for network in trained_networks(model.transformer).values():
        delicate = set(network._keep_in_fp32_modules or ())
        for name, parameter in network.named_parameters():
            if not delicate.intersection(name.split(".")):
                parameter.data = parameter.data.to(DTYPES[model.precision])


def _lora_config(model: Model, prefix: str, network: Any, config: PolicyConfig) -> LoraConfig:
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(model, prefix, network, config),
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
        use_rslora=config.rslora,
        use_dora=config.dora,
    )


def _targets(model: Model, prefix: str, network: Any, config: PolicyConfig) -> list[str]:
    """The layers of a network that LoRA adapts: ends of their names, or where only some of them are trained, whole names.

    ``prefix`` is what stands before them in the names of the transformer, which ``policy.layers`` means.
    """
    ends = config.targets or model.lora_targets
    names = {name.replace(".base_layer", "") for name, layer in network.named_modules() if isinstance(layer, torch.nn.Linear)}
    fitting = {name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)}
    trainable = {name for name in fitting if is_trainable(model, name)}
    if config.layers is None and trainable == fitting:
        return ends
    chosen = sorted(name for name in trainable if _chosen(prefix + name, config))
    if not chosen:
        raise _no_such_layers(model, config)
    return chosen


def _sharding(replicas: int, cpu_offload: bool, fsdp: FsdpConfig) -> dict[str, Any]:
    """The arguments of ``fully_shard``."""
    rounded = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return {
        "mp_policy": rounded if fsdp.gather == "bfloat16" else MixedPrecisionPolicy(),
        "mesh": replica_mesh(replicas),
        "reshard_after_forward": True,
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy(),
    }


def to_main_memory(value: Tensor) -> Tensor:
    """A copy of a tensor in main memory, pinned where there is a GPU: other memory takes many times as long to copy."""
    return torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available()).copy_(value)


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as a parameter is; on its device, where it is sharded."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements).to(parameter.device)


def gathered(values: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, for the process that keeps them; the others only take part."""
    return {key: full for key, value in values.items() if (full := _full(value)) is not None and keep}


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def _write_parameters(folder: Path, model: Model, config: PolicyConfig, parameters: dict[str, Tensor]) -> None:
    """LoRA in the layout that ``pipeline.load_lora_weights`` reads, alpha included; full weights as ``transformer/``.

    What is of a second network is in ``transformer_2/``, a LoRA too.
    """
    for prefix, network in trained_networks(model.transformer).items():
        own = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
        if config.train == "lora":
            _write_lora(_lora_folder(folder, prefix), _lora_config(model, prefix, network, config), model, network, own)
        else:
            _write_network(folder / (prefix.rstrip(".") or FIRST), network, own)


def _lora_folder(folder: Path, prefix: str) -> Path:
    """Where the LoRA of a network is, by what stands before the names of its parameters."""
    return folder if prefix.rstrip(".") in ("", FIRST) else folder / prefix.rstrip(".")


def _write_lora(folder: Path, config: LoraConfig, model: Model, network: Any, parameters: dict[str, Tensor]) -> None:
    layers = get_peft_model_state_dict(network, state_dict=parameters, adapter_name=ADAPTER)
    # peft keeps the targets as a set, whose order differs between processes
    metadata = config.to_dict() | {"target_modules": sorted(config.target_modules or ())}
    model.pipeline_class.save_lora_weights(folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata)
    for file in folder.glob("*.safetensors"):
        _sort_header(file)


def _write_network(folder: Path, network: Any, parameters: dict[str, Tensor]) -> None:
    buffers = {key: _full(value) for key, value in network.state_dict().items() if key not in parameters}
    network.save_config(folder)
    _forget_origin(folder / "config.json")
    save_torch_state_dict(parameters | buffers, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors")


def _forget_origin(config: Path) -> None:
    """Take out where the base model lay in this process, which diffusers writes down: the same policy is the same bytes."""
    values = json.loads(config.read_text())
    values.pop("_name_or_path", None)
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _sort_header(file: Path) -> None:
    """Write the header of a safetensors file in a fixed order: the library writes metadata in a random one."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def _read_parameters(folder: Path, model: Model, config: PolicyConfig, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``_write_parameters``, by parameter name."""
    named: dict[str, Tensor] = {}
    with _readable(folder):
        for prefix in trained_networks(model.transformer):
            if config.train == "lora":
                source = _lora_folder(folder, prefix)
                layers = model.pipeline_class.lora_state_dict(source, use_safetensors=True, local_files_only=True)
                named |= {prefix + key.removeprefix(f"{FIRST}."): value for key, value in layers.items()}
            else:
                for shard in sorted((folder / (prefix.rstrip(".") or FIRST)).glob("*.safetensors")):
                    named |= {prefix + key: value for key, value in load_file(shard).items()}
    stored = {_stored_name(key): key for key in like}
    buffers = model.transformer.state_dict().keys() - like.keys()  # which full weights lie beside
    return _fitting(folder, {stored.get(name, name): value for name, value in named.items() if name not in buffers}, like)


def _stored_name(key: str) -> str:
    """How a LoRA file calls a parameter."""
    return key.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector").replace(f".{ADAPTER}.", ".")


def _read_copy(folder: Path, name: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """One of the copies that a policy folder brings along, by parameter name."""
    path = folder / name / "parameters.safetensors"
    with _readable(path):
        found = load_file(path)
    return _fitting(path, found, like)


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # diffusers, peft and safetensors each have errors of their own
        reason = sanitize(f"{type(error).__name__}: {error}", 300)
        raise PolicyError(f"{source} holds no .safetensors weights that can be read ({reason}); {AGAIN}") from error


def _fitting(source: Path, found: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, once they are those of the parameters: copying alone would repeat a smaller one and leave others out."""
    if missing := [name for name in like if name not in found]:
        raise PolicyError(f"{source} has no .safetensors weights for {missing[0]}, one of {len(missing)}; {AGAIN}")
    if unknown := [name for name in found if name not in like]:
        raise PolicyError(f"{source} has weights for {sanitize(unknown[0], 200)}, which this policy does not train; {AGAIN}")
    for name, parameter in like.items():
        value = found[name]
        if value.shape != parameter.shape or not value.is_floating_point():
            raise PolicyError(
                f"{source} has {value.dtype} of shape {list(value.shape)} for {name}, and this model's have the shape "
                f"{list(parameter.shape)}; {AGAIN}"
            )
    return found
