"""What rewards with a network of their own share: their files, weights without pickles, batches without gradients."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError  # what torch raises for weights that are more than weights
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import default_device
from ebbflow.models.hub import HubError, pretrained_folder
from ebbflow.recipe.base import sanitize
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.recipe.rewards import PretrainedRewardConfig
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.combine import RewardError

Score = Callable[[np.ndarray, list[str]], Tensor]
"""From n images, uint8 RGB [n, height, width, 3], and their n prompts to n scores."""
HEAD_LAYERS = (0, 2, 4, 6, 7)
"""The linear layers of a head by their published numbers; the numbers between were dropouts in training."""
LOADING = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
"""With the report, since transformers itself would only warn and draw random weights where some are missing."""


@dataclass(frozen=True)
class Files:
    """What a reward reads from one place: patterns of which each must fit a file of it."""

    source: PretrainedSourceConfig
    patterns: tuple[str, ...]

    def missing(self) -> str | None:
        """What a local folder lacks, or None. Of a pinned repository nothing is known before it is fetched."""
        path = self.source.path
        if self.source.on_hub:
            return None
        if path is None or not Path(path).is_dir():
            return f"path = {path!r} is no folder on this machine; of a Hugging Face repository give the commit as 'revision'"
        return self._missing_in(Path(path))

    def folder(self) -> Path:
        """The folder that holds them all, fetched if it is a repository.

        Raises:
            HubError: it cannot be had.
            RewardError: it lacks a file.
        """
        # The rest of a tokenizer goes by many names, all of them small JSON and text files.
        folder = pretrained_folder(self.source, [*self.patterns, "*.json", "*.txt"])
        if reason := self._missing_in(folder):
            raise RewardError(reason)
        return folder

    def _missing_in(self, folder: Path) -> str | None:
        absent = [pattern for pattern in self.patterns if not any(folder.glob(pattern))]
        return f"{folder} holds no {' and no '.join(absent)}; copy the published files into it" if absent else None


class NetworkReward(ABC):
    """A reward whose network is loaded at the first image, frozen, in float32, and kept."""

    def __init__(self, config: PretrainedRewardConfig) -> None:
        self.config = config
        self.name = config.name

    @abstractmethod
    def files(self) -> list[Files]:
        """What must be there."""

    @abstractmethod
    def load(self) -> Score:
        """Load the network onto this process's device."""

    def unavailable(self) -> str | None:
        return next((reason for files in self.files() if (reason := files.missing())), None)

    @torch.no_grad()
    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score images in batches.

        Raises:
            HubError: the network cannot be fetched.
            RewardError: its files are not the published ones.
        """
        texts = [prompt.prompt for prompt in prompts]
        parts = [slice(start, start + self.config.batch) for start in range(0, len(images), self.config.batch)]
        scores = [self._score(images[part], texts[part]).double().cpu() for part in parts]
        values = torch.cat(scores).numpy() if scores else np.empty(0)
        failures = {int(index): f"the network gave {values[index]}" for index in np.flatnonzero(~np.isfinite(values))}
        values[list(failures)] = np.nan
        return RewardResult(values, failures=failures)

    @cached_property
    def _score(self) -> Score:
        disable_progress_bar()
        try:
            return self.load()
        except (RewardError, HubError):
            raise
        except Exception as error:  # transformers, tokenizers and torch each have errors of their own
            reason = sanitize(f"{type(error).__name__}: {error}")
            raise RewardError(f"the reward {self.name!r} cannot be loaded: {reason}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of one that torch saved, by name; of the latter nothing is unpickled that could run.

    Raises:
        RewardError: there is anything else in it.
    """
    try:
        saved: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, SafetensorError):
        raise RewardError(f"{path} is damaged or holds more than weights, so it is not read; take the published file") from None
    weights = saved.get("state_dict", saved) if isinstance(saved, dict) else {}
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise RewardError(f"{path} is no table of weights by name; take the published file")
    return weights


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights under other names: each pattern is replaced in turn."""
    found = {}
    for name, tensor in weights.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def pick(weights: Mapping[str, Tensor], names: Sequence[str], source: Path) -> list[Tensor]:
    """Some of the weights.

    Raises:
        RewardError: one of them is not there.
    """
    if absent := [name for name in names if name not in weights]:
        raise RewardError(f"{source} holds no weights {absent[0]!r}; take the published file")
    return [weights[name] for name in names]


def load_network(kind: Any, folder: Path) -> Any:
    """A network of transformers from a folder in its layout, frozen, in float32, on the device.

    Raises:
        RewardError: weights are missing, left over, or of another shape.
    """
    return _frozen(kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, **LOADING), kind, folder)


def build_network(kind: Any, config: Any, weights: dict[str, Tensor], source: Path, **keys: Any) -> Any:
    """``load_network`` from weights that were read from ``source`` and renamed; ``keys`` go to the network.

    Raises:
        RewardError: weights are missing, left over, or of another shape.
    """
    return _frozen(kind.from_pretrained(None, config=config, state_dict=weights, **keys, **LOADING), kind, source)


def _frozen(loaded: tuple[Any, dict[str, Any]], kind: Any, source: Path) -> Any:
    network, report = loaded
    misfits = sorted(str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[key])
    if misfits:
        raise RewardError(
            f"{source} does not hold the weights of this {kind.__name__}: {len(misfits)} do not fit, first {misfits[0]}; "
            "take the published files"
        )
    return network.requires_grad_(False).eval().to(default_device())


def load_head(weights: Mapping[str, Tensor], width: int, source: Path) -> nn.Module:
    """The linear layers, one after the other, that make one number of ``width`` features: [n, width] -> [n, 1].

    Raises:
        RewardError: the weights are not theirs, or are made for another width.
    """
    pairs = [pick(weights, (f"layers.{number}.weight", f"layers.{number}.bias"), source) for number in HEAD_LAYERS]
    if (takes := pairs[0][0].shape[1]) != width:
        raise RewardError(
            f"the head in {source} takes {takes} features, and its network gives {width}; take the network it is for"
        )
    head = nn.Sequential(*(_linear(weight, bias) for weight, bias in pairs))
    return head.requires_grad_(False).to(default_device())


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def check_vocabulary(tokenizer: Any, size: int, source: Path) -> None:
    """Check that a tokenizer is made for a text encoder with ``size`` embeddings.

    Raises:
        RewardError: it is not.
    """
    if len(tokenizer) != size:
        raise RewardError(
            f"the tokenizer in {source} has {len(tokenizer)} tokens and the text encoder {size}; take the one it is for"
        )
