"""``model``: a reward model that was trained on labels of people (docs/reward_models.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ebbflow.recipe.paths import StoreText
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt

MODELS = "models:/"
FETCH = "ebbflow.registry.reward_models:fetch_reward_model"
"""Fetches a version; by its name, as the registry is above this room."""


def _check_uri(uri: str) -> str:
    name = uri.removeprefix(MODELS)
    if uri.startswith(MODELS) and not name:
        raise ValueError("it names no model; write models:/NAME/VERSION or models:/NAME@champion")
    return uri


class ModelRewardConfig(RewardConfig):
    """Score of a reward model trained on labels; differences are log-odds that people prefer an
    image.
    """

    name: Literal["model"] = "model"
    uri: Annotated[str, AfterValidator(_check_uri)]
    """``models:/NAME/VERSION`` or ``models:/NAME@champion`` in MLflow's registry, or the folder of
    a reward model. A run replaces an alias by its version as it starts."""
    store: StoreText | None = None
    """MLflow store of ``uri``. Default: the one of the recipe."""
    digest: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Digest of the reward model. A run records that of a registered one as it starts; of a folder,
    write it yourself."""
    batch: int = Field(64, ge=1)
    """Images per forward pass."""

    @property
    def is_registered(self) -> bool:
        """Whether ``uri`` names a registered model."""
        return self.uri.startswith(MODELS)

    @property
    def is_pinned(self) -> bool:
        """Whether every task finds the same registered model. A folder is what is in it: with its
        ``digest``, another content is an error.
        """
        if not self.is_registered:
            return True
        return self.digest is not None and self.store is not None

    def build(self) -> Reward:
        return ModelReward(self)


def list_unpinned_models(recipe: Any) -> list[str]:
    """List the ``uri`` of the reward models of a recipe whose store or digest it does not name."""
    branches = [reward for branch in recipe.branches.values() for reward in branch.rewards]
    return [
        reward.uri
        for reward in (*recipe.rewards, *recipe.guardrails, *branches)
        if isinstance(reward, ModelRewardConfig) and not reward.is_pinned
    ]


class ModelReward(Reward):
    """scale * network(image, prompt) + offset of a reward model's folder."""

    has_gradient = True

    def __init__(self, config: ModelRewardConfig) -> None:
        self.config = config
        self.name = config.name

    def explain_unavailable(self) -> str | None:
        if not self.config.is_registered and not Path(self.config.uri).is_dir():
            return f"uri = {self.config.uri!r} is no folder here; name one, or models:/NAME/VERSION"
        return None

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score images in batches.

        Raises:
            RewardError: the reward model cannot be loaded, or is another one.
        """
        import numpy as np
        import torch

        from ebbflow.models.base import default_device
        from ebbflow.rewards.pixels import scale_to_unit_range

        # Asked before anything is scored: a batch has one size of pictures, and its prompts differ.
        _, network = self._loaded
        height, width = images.shape[1:3]
        failures = {}
        for index, prompt in enumerate(prompts):
            reason = network.explain_unscorable(prompt, height, width)
            if reason:
                failures[index] = reason
        values = np.full(len(images), np.nan)
        scorable = [index for index in range(len(images)) if index not in failures]
        with torch.no_grad():
            for start in range(0, len(scorable), self.config.batch):
                part = scorable[start : start + self.config.batch]
                pixels = scale_to_unit_range(images[part], default_device())
                scores = self.score_with_gradient(pixels, [prompts[index] for index in part])
                values[part] = scores.double().cpu().numpy()
        return RewardResult(values, failures=failures)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """As ``Reward.score_with_gradient``; every image must be one that can be scored."""
        card, network = self._loaded
        scores: Tensor = card.scale * network(images, prompts) + card.offset
        return scores

    @property
    def network(self) -> Any:
        """The network without scale and offset (``ebbflow.rewards.reward_networks``)."""
        return self._loaded[1]

    # The first score loads the network: a process that asks what a reward declares needs none.
    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from ebbflow.rewards.reward_model_folder import load_reward_model

        reason = self.explain_unavailable()
        if reason:
            raise RewardError(reason)
        folder = Path(self.config.uri)
        if self.config.is_registered:
            try:
                folder = import_object(FETCH)(
                    self.config.store, self.config.uri, self.config.digest
                )
            except RuntimeError as error:
                # Of the registry, whose errors this room does not know.
                raise RewardError(str(error)) from error
        return load_reward_model(folder, self.config.digest)
