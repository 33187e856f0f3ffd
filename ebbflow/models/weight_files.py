"""The weights of a network in the safetensors files of its folder, read tensor by tensor: a process
reads what it keeps, and casts it before it goes to a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ebbflow.recipe.base_folder import read_json_object

WEIGHTS = "diffusion_pytorch_model.safetensors"
"""The name that diffusers gives to a network's weights; with ``.index.json`` after it, that of the
list of their shards.
"""


class WeightFiles:
    """The weights of one network.

    Attributes:
        dtype: the precision that the network was published in, that of its first tensor.
    """

    def __init__(self, files: list[Path]) -> None:
        """Open the files.

        Raises:
            SafetensorError: one is none.
        """
        # Memory-mapped: nothing is read before ``read_tensor``.
        self._file_of_name: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, "pt")
            self._file_of_name |= dict.fromkeys(opened.keys(), opened)
        self.dtype = self.read_tensor(next(iter(self._file_of_name))).dtype

    def read_tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read some rows of a tensor, by its name in the network, on the CPU."""
        file = self._file_of_name[name]
        # A tensor without dimensions has no rows.
        if rows == slice(None):
            tensor: Tensor = file.get_tensor(name)
        else:
            tensor = file.get_slice(name)[rows]
        return tensor

    def check_network(self, network: nn.Module) -> None:
        """Check that the files have every tensor of a network.

        Raises:
            ValueError: one is missing, has another shape or is quantised.
        """
        for name, value in network.state_dict().items():
            if name not in self._file_of_name:
                raise ValueError(f"the weight {name} is missing")
            stored = self._file_of_name[name].get_slice(name)
            shape = stored.get_shape()
            if list(value.shape) != shape:
                raise ValueError(f"the weight {name} has shape {shape}, not {list(value.shape)}")
            dtype = stored.get_dtype()
            if value.is_floating_point() and not dtype.startswith(("F", "BF")):
                # Without the scales of a quantised network these numbers mean nothing.
                raise ValueError(
                    f"the weight {name} is quantised ({dtype}); take the network in 16 or 32 bits"
                )


def list_weight_files(folder: Path) -> list[Path]:
    """List the files of a network's weights in its folder, without variants in other precisions;
    none where it has variants alone.

    Raises:
        ModelError: the list of the shards cannot be read.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        # {"weight_map": {"proj_out.weight": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
        shards = read_json_object(index).get("weight_map", {})
        return [folder / name for name in sorted(set(shards.values()))]
    return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []


class PendingWeights:
    """The weights of the trained networks of a model that has none in memory yet.

    Until ``training.loading`` reads them, the parameters are on the meta device.

    Attributes:
        files: of each network, by what stands before the names of its parameters in
            ``Model.transformer``.
    """

    def __init__(self, files: dict[str, WeightFiles]) -> None:
        self.files = files

    def read_tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read some rows of a parameter, by its name in ``Model.transformer``."""
        for prefix, files in self.files.items():
            if name.startswith(prefix):
                return files.read_tensor(name.removeprefix(prefix), rows)
        raise KeyError(name)


def iterate_buffers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a network that its files have, with their names."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for name, value in network.state_dict().items():
        if name not in parameters:
            yield name, value


def read_buffers(network: nn.Module, files: WeightFiles) -> None:
    """Read the buffers of a network, in the precision that they were published in."""
    for name, _ in iterate_buffers(network):
        module_name, _, buffer_name = name.rpartition(".")
        value = files.read_tensor(name)
        if value.is_floating_point():
            value = value.to(files.dtype)
        network.get_submodule(module_name)._buffers[buffer_name] = torch.clone(value)
