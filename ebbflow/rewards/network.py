"""What rewards with a neural network share: their files, lazy loading, batches without gradients.

Recipes import this module, so torch, transformers and the hub's client are imported where they are
used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ebbflow.data.model_sizes import BLOCK_BYTES, BYTES
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.clip import Clip

    Score = Callable[[np.ndarray | Tensor, list[str]], Tensor]
    """From n images, uint8 RGB [n, height, width, 3], and their n prompts to n scores; with
    gradient from RGB in [0, 1], [n, 3, height, width].
    """

Blocks = tuple[tuple[int, int, int], ...]
"""(blocks, width, tokens of an image) of transformers."""

CLIP_FILES = ("config.json", "model*.safetensors", "*processor_config.json", "tokenizer.json")
"""Of a CLIP in the Hugging Face layout (``ebbflow.rewards.load_clip_model``)."""
QWEN_FILES = ("config.json", "tokenizer.json")
"""Of a repository of Qwen2-VL, what rewards need whose checkpoint holds its weights
(``ebbflow.rewards.qwen2_vl``).
"""


class PretrainedRewardConfig(RewardConfig, PretrainedSourceConfig):
    """A reward with a network of its own, loaded once from a folder or from one commit of a Hugging
    Face repository.
    """

    batch: int = Field(16, ge=1)
    """Images per forward pass."""

    # Class variables and no keys: they describe the published network; no recipe sets them.
    num_parameters: ClassVar[int] = 0
    """Of its networks."""
    gradient_blocks: ClassVar[Blocks] = ()
    """The transformers that the gradient of an image goes through."""

    @property
    def network_bytes(self) -> int:
        return self.num_parameters * self._bytes_per_number

    @property
    def gradient_bytes(self) -> int:
        values = sum(blocks * width * tokens for blocks, width, tokens in self.gradient_blocks)
        # BLOCK_BYTES are bytes for each value of a block's input, in a network of 16 bits.
        return BLOCK_BYTES * values * self._bytes_per_number // 2

    @property
    def _bytes_per_number(self) -> int:
        # Only the large networks have the key ``precision``; the others are kept in float32.
        return BYTES[getattr(self, "precision", "float32")]


@dataclass(frozen=True)
class Files:
    """Files that a reward reads from one source; every pattern must match one of them.

    Example::

        Files(config, ("HPS_v2.1_compressed.pt",)).fetch_folder()  # Path(".../snapshots/697403c")
    """

    source: PretrainedSourceConfig
    patterns: tuple[str, ...]

    def explain_missing_files(self) -> str | None:
        """Return what a local folder lacks, or None. A pinned repository is not checked before it
        is fetched.
        """
        path = self.source.path
        if self.source.is_on_hub:
            return None
        if path is None or not Path(path).is_dir():
            return (
                f"path = {path!r} is not a folder here; for a Hugging Face repository give the"
                " commit as 'revision'"
            )
        return self._explain_missing_in(Path(path))

    def fetch_folder(self) -> Path:
        """Return the folder with all of them, fetched if the source is a repository.

        Raises:
            HubError: it cannot be fetched.
            RewardError: it lacks a file.
        """
        from ebbflow.models.hub import locate_pretrained

        # Tokenizers spread over many small JSON and text files.
        folder = locate_pretrained(self.source, [*self.patterns, "*.json", "*.txt"])
        reason = self._explain_missing_in(folder)
        if reason:
            raise RewardError(reason)
        return folder

    def _explain_missing_in(self, folder: Path) -> str | None:
        absent = [pattern for pattern in self.patterns if not any(folder.glob(pattern))]
        if not absent:
            return None
        return f"{folder} holds no {' and no '.join(absent)}; copy the published files into it"


class PretrainedReward(Reward):
    """A reward with a network that is loaded when it is first used: frozen, kept for the life of
    the process.
    """

    def __init__(self, config: PretrainedRewardConfig) -> None:
        self.config = config
        self.name = config.name

    @abstractmethod
    def list_files(self) -> list[Files]:
        """Return the files that must exist."""

    @abstractmethod
    def load_score_function(self) -> Any:
        """Load the network onto this process's device, and return the function that scores with
        it.
        """

    def explain_unavailable(self) -> str | None:
        # Files are looked for and not read: this is asked in processes without a GPU, too.
        for files in self.list_files():
            reason = files.explain_missing_files()
            if reason:
                return reason
        return None

    def _score_in_batches(self, images: Any, prompts: Sequence[Prompt]) -> np.ndarray:
        """Score images or videos with the texts of their prompts, in batches: float64 [N, ...].

        Raises:
            HubError: the network cannot be fetched.
            RewardError: its files are not the published ones.
        """
        import numpy as np
        import torch

        texts = [prompt.prompt for prompt in prompts]
        parts = [
            slice(start, start + self.config.batch)
            for start in range(0, len(images), self.config.batch)
        ]
        # Each batch goes to main memory at once. float64 holds every score of a network exactly.
        with torch.no_grad():
            scores = [
                self._score_function(images[part], texts[part]).double().cpu() for part in parts
            ]
        return torch.cat(scores).numpy() if scores else np.empty(0)

    # The first call loads the network: a process that only asks what a reward declares has no
    # gigabytes to read.
    @cached_property
    def _score_function(self) -> Any:
        from transformers.utils.logging import disable_progress_bar

        from ebbflow.models.hub import HubError

        disable_progress_bar()
        try:
            return self.load_score_function()
        except (RewardError, HubError):
            raise
        except Exception as error:
            # transformers, tokenizers and torch share no base class of errors.
            reason = sanitize_text(f"{type(error).__name__}: {error}")
            raise RewardError(f"the reward {self.name!r} cannot be loaded: {reason}") from error


class NetworkReward(PretrainedReward):
    """A network that scores an image and the text of its prompt, with a gradient."""

    has_gradient = True

    @abstractmethod
    def load_score_function(self) -> Score: ...

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score images in batches.

        Raises:
            HubError: the network cannot be fetched.
            RewardError: its files are not the published ones.
        """
        import numpy as np

        values = self._score_in_batches(images, prompts)
        # Infinity becomes NaN as well: it would stop the run as a bug of the reward, and it is the
        # overflow of a network on one image.
        failures = {
            int(index): f"the network gave {values[index]}"
            for index in np.flatnonzero(~np.isfinite(values))
        }
        values[list(failures)] = np.nan
        return RewardResult(values, failures=failures)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """As ``Reward.score_with_gradient``; all images in one forward pass."""
        scores: Tensor = self._score_function(images, [prompt.prompt for prompt in prompts])
        return scores


class ClipReward(NetworkReward):
    """A reward that reads from a CLIP in the Hugging Face layout, the first of its files; its image
    embeddings are features.
    """

    has_features = True

    def load_clip_model(self) -> Clip:
        """Return the CLIP; it is loaded once, however many rewards read from it."""
        from ebbflow.rewards.clip import load_clip

        return load_clip(self.list_files()[0].fetch_folder())

    def compute_features(self, images: np.ndarray) -> np.ndarray:
        """Return unit image embeddings, float32 [N, D], of images, uint8 RGB [N, height, width,
        3].
        """
        import torch

        parts = [
            images[start : start + self.config.batch]
            for start in range(0, len(images), self.config.batch)
        ]
        with torch.no_grad():
            return torch.cat(
                [self.load_clip_model().embed_images(part).float().cpu() for part in parts]
            ).numpy()
