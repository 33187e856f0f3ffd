"""Trained parameters in files: LoRAs and networks in the layouts that diffusers reads, and
copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from ebbflow.models.base import Model, find_lora_class, trained_networks
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.adapters import ADAPTER, build_lora_config
from ebbflow.training.policy_metadata import AGAIN, FIRST_NETWORK, PolicyError
from ebbflow.training.sharding import gather_tensor


def write_parameters(
    folder: Path, model: Model, config: PolicyConfig, parameters: dict[str, Tensor]
) -> None:
    """Write LoRA in the layout that ``pipeline.load_lora_weights`` reads, alpha included; full
    weights as ``transformer/``.

    What is of a second network is in ``transformer_2/``, a LoRA too.
    """
    for prefix, network in trained_networks(model.transformer).items():
        network_parameters = {
            key.removeprefix(prefix): value
            for key, value in parameters.items()
            if key.startswith(prefix)
        }
        if config.train == "lora":
            _write_lora(
                _lora_folder(folder, prefix),
                build_lora_config(model, prefix, network, config),
                model,
                network,
                network_parameters,
            )
        else:
            _write_network(
                folder / (prefix.rstrip(".") or FIRST_NETWORK), network, network_parameters
            )


def _lora_folder(folder: Path, prefix: str) -> Path:
    """Return where the LoRA of a network is, by what stands before its parameters' names."""
    return folder if prefix.rstrip(".") in ("", FIRST_NETWORK) else folder / prefix.rstrip(".")


def _write_lora(
    folder: Path, config: LoraConfig, model: Model, network: Any, parameters: dict[str, Tensor]
) -> None:
    layers = get_peft_model_state_dict(network, state_dict=parameters, adapter_name=ADAPTER)
    # peft keeps the targets as a set, whose order differs between processes
    metadata = config.to_dict() | {"target_modules": sorted(config.target_modules or ())}
    find_lora_class(model).save_lora_weights(
        folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
    )
    for file in folder.glob("*.safetensors"):
        _sort_header(file)


def _write_network(folder: Path, network: Any, parameters: dict[str, Tensor]) -> None:
    buffers = {
        key: gather_tensor(value)
        for key, value in network.state_dict().items()
        if key not in parameters
    }
    network.save_config(folder)
    _remove_base_path(folder / "config.json")
    save_torch_state_dict(
        parameters | buffers, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors"
    )


def _remove_base_path(config: Path) -> None:
    """Remove the path of the base model, which diffusers writes into the configuration: the same
    policy is the same bytes on every machine.
    """
    values = json.loads(config.read_text())
    values.pop("_name_or_path", None)
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _sort_header(file: Path) -> None:
    """Write the header of a safetensors file in a fixed order: the library writes metadata in a
    random one.
    """
    # The file: 8 bytes with the length of the header, the header as JSON, the tensors. Offsets in
    # the header count from its end, and spaces pad it to a multiple of 8 bytes.
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def read_parameters(
    folder: Path, model: Model, config: PolicyConfig, like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read what ``write_parameters`` wrote, by parameter name."""
    named: dict[str, Tensor] = {}
    with _explain_read_errors(folder):
        for prefix in trained_networks(model.transformer):
            if config.train == "lora":
                source = _lora_folder(folder, prefix)
                layers = find_lora_class(model).lora_state_dict(
                    source, use_safetensors=True, local_files_only=True
                )
                named |= {
                    prefix + key.removeprefix(f"{FIRST_NETWORK}."): value
                    for key, value in layers.items()
                }
            else:
                for shard in sorted(
                    (folder / (prefix.rstrip(".") or FIRST_NETWORK)).glob("*.safetensors")
                ):
                    named |= {prefix + key: value for key, value in load_file(shard).items()}
    stored = {_name_in_lora_file(key): key for key in like}
    # Files of full weights also hold buffers and the parameters that are not trained.
    buffers = model.transformer.state_dict().keys() - like.keys()
    return _require_same_parameters(
        folder,
        {stored.get(name, name): value for name, value in named.items() if name not in buffers},
        like,
    )


def _name_in_lora_file(key: str) -> str:
    """Return what a LoRA file calls a parameter: peft leaves out the name of the adapter."""
    return key.replace(
        f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector"
    ).replace(f".{ADAPTER}.", ".")


def read_copy(folder: Path, name: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read one of the copies that a policy folder brings along, by parameter name."""
    path = folder / name / "parameters.safetensors"
    with _explain_read_errors(path):
        tensors = load_file(path)
    return _require_same_parameters(path, tensors, like)


@contextmanager
def _explain_read_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # diffusers, peft and safetensors each have errors of their own
        reason = sanitize_text(f"{type(error).__name__}: {error}", 300)
        raise PolicyError(
            f"{source} holds no .safetensors weights that can be read ({reason}); {AGAIN}"
        ) from error


def _require_same_parameters(
    source: Path, tensors: dict[str, Tensor], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors, once they are those of the parameters."""
    # ``copy_`` would broadcast a smaller tensor without a word, and leave out what is missing.
    missing = [name for name in like if name not in tensors]
    if missing:
        raise PolicyError(
            f"{source} has no .safetensors weights for {missing[0]}, one of {len(missing)}; {AGAIN}"
        )
    unknown = [name for name in tensors if name not in like]
    if unknown:
        raise PolicyError(
            f"{source} has weights for {sanitize_text(unknown[0], 200)}, which this policy does not"
            f" train; {AGAIN}"
        )
    for name, parameter in like.items():
        value = tensors[name]
        if value.shape != parameter.shape or not value.is_floating_point():
            raise PolicyError(
                f"{source} has {value.dtype} of shape {list(value.shape)} for {name}, and this"
                f" model's have the shape {list(parameter.shape)}; {AGAIN}"
            )
    return tensors
