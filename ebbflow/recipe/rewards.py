"""What the options of every reward derive from. Each reward's own are in its file
(``ebbflow.rewards.built_in``).

The first line of a class says what the reward measures and on which scale (``ebbflow list`` prints
it).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from ebbflow.recipe.base import Strict
from ebbflow.recipe.plugins import import_object, validate_name_or_path

Scored = Literal["images", "pairs", "groups", "videos", "sounds", "latents"]
"""What a reward gets (``ebbflow.rewards.base.Reward.scores``)."""

MAX_SCORE = 1e30
MAX_WEIGHT = 1e6
"""Of a score, in magnitude, and of a reward: float64 then holds the squares of weighted sums."""

ONLY_COMPARISONS = (
    "{}: all of them, or all of a prompt set, compare the images of a prompt with each other, and"
    " an evaluation scores single images; add a reward that does, so that policies can be compared"
)
GUARDRAIL_COMPARES = (
    "guardrails: {} compares the images of a prompt, and an evaluation scores single ones; take"
    " it out"
)


class RewardConfig(Strict):
    """The keys of every reward."""

    known_lowest: ClassVar[float | None] = None
    """The lowest score by the reward's definition; None where it has none."""
    name: str
    weight: float = Field(1.0, ge=0, le=MAX_WEIGHT)
    """Weight of the reward in the weighted sum that is trained on. 0: it scores every sample and
    moves no parameter; algorithms such as ``gardo`` read it, and charts show it."""
    label: str | None = Field(None, pattern=r"^[A-Za-z]\w*$")
    """Name of the reward's scores in tables, charts and reports. Default: the reward's name."""
    prompts: list[str] = []
    """Names of sets of ``prompts.mixture``. The reward scores only their prompts. Default: all
    prompts."""
    latents: list[str] = []
    """Names of the latents of a sample that the reward judges, such as ``[sound]`` of ``ltx2``: it
    moves these alone (docs/algorithms.md). Default: all of them."""
    lowest: float | None = Field(None, ge=-MAX_SCORE, le=MAX_SCORE)
    """Lowest possible score. The gate then knows how far a prompt that it has not seen could fall;
    otherwise it assumes the whole range of the scores that it has seen. Default: known for some
    rewards (``ocr`` cannot score below 0)."""

    @property
    def lowest_score(self) -> float | None:
        """The lowest possible score; None where it is unknown."""
        return self.known_lowest if self.lowest is None else self.lowest

    def judges(self, latent: str) -> bool:
        """Whether it moves a latent of the samples."""
        return not self.latents or latent in self.latents

    def applies_to(self, prompt_set: str) -> bool:
        """Whether it scores the prompts of a set of the mixture."""
        return not self.prompts or prompt_set in self.prompts

    @property
    def column(self) -> str:
        """The column of its scores."""
        # Scores are columns of one table, so that two rewards of one name need a label.
        return self.label or self.name

    @property
    def reads(self) -> bool:
        """Whether it compares an image with the prompt's target text, which every prompt must then
        have.
        """
        return False

    @property
    def ignores_prompt(self) -> bool:
        """Whether it is known to score an image alike whatever the prompt is."""
        return False

    def explain_unscorable(self, prompt: Any) -> str | None:
        """Return why no image of a prompt can get a score, as the prompt alone says; None where
        one can.

        Args:
            prompt: an ``ebbflow.data.prompts.Prompt``.
        """
        if self.reads and prompt.target is None:
            return "it names no text to read: quote the text in the prompt, or give a column target"
        return None

    @property
    def scores(self) -> Scored:
        """What it scores (``ebbflow.rewards.base.Reward.scores``).

        Raises:
            RecipeError: nothing can be imported from the path of a user's own.
        """
        return "images"

    @property
    def compares(self) -> bool:
        """Whether a score depends on the other images of the prompt, so that it cannot score one
        image.

        Raises:
            RecipeError: as ``scores``.
        """
        return self.scores in ("pairs", "groups")

    @property
    def network_bytes(self) -> int:
        """Memory of the weights of its network; 0 without one.

        Raises:
            RecipeError: as ``scores``.
        """
        return 0

    @property
    def gradient_bytes(self) -> int:
        """Memory that its network keeps of one image until the backward pass; 0 without a network.

        Raises:
            RecipeError: as ``scores``.
        """
        return 0

    @property
    def undeclared_memory(self) -> list[str]:
        """Names of the two above that are 0 because a user's own reward declares none.

        Raises:
            RecipeError: as ``scores``.
        """
        return []

    @abstractmethod
    def build(self) -> Any:
        """Build the ``ebbflow.rewards.base.Reward`` with these options."""


class ReadingRewardConfig(RewardConfig):
    """A reward that reads the image."""

    known_lowest: ClassVar[float | None] = 0.0

    @property
    def reads(self) -> bool:
        return True


AnyConfig = TypeVar("AnyConfig", bound=RewardConfig)

Match = Literal["exact", "contained"]
Case = Literal["ignored", "kept"]


class OcrRewardConfig(ReadingRewardConfig):
    """Reads the text of the image and compares it with the target."""

    match: Match = "exact"
    """``exact``: every extra letter lowers the score. ``contained``: a reading that contains the
    target scores 1, as in published code, so a policy may write more than the prompt asks for."""
    case: Case = "ignored"
    """``ignored``: "open" scores as high as "OPEN", as in published code. ``kept``: letter case
    counts."""


class CustomRewardConfig(RewardConfig):
    """A reward of your own: the object at ``package.module:Name``, called with the options."""

    name: Literal["custom"] = "custom"
    path: Annotated[str, validate_name_or_path()]
    options: dict[str, Any] = {}

    @property
    def column(self) -> str:
        return self.label or self.path.rpartition(":")[2]

    # What a function makes is not known before it is called: these are the defaults of a reward.

    @property
    def scores(self) -> Scored:
        scored: Scored = getattr(import_object(self.path), "scores", "images")
        return scored

    @property
    def network_bytes(self) -> int:
        # Read from the class: building the reward would load its network.
        return int(getattr(import_object(self.path), "network_bytes", None) or 0)

    @property
    def gradient_bytes(self) -> int:
        return int(getattr(import_object(self.path), "gradient_bytes", None) or 0)

    @property
    def undeclared_memory(self) -> list[str]:
        reward = import_object(self.path)
        names = ["network_bytes"]
        # Without a gradient nothing of an image is kept.
        if getattr(reward, "has_gradient", False):
            names.append("gradient_bytes")
        return [name for name in names if getattr(reward, name, None) is None]

    def build(self) -> Any:
        """As of every reward.

        Raises:
            RecipeError: nothing can be imported from the path.
            TypeError: what it leads to does not take the options.
        """
        # A class, or a function that returns the reward.
        return import_object(self.path)(**self.options)


def rewards_for_prompt_sets(
    rewards: Iterable[AnyConfig], prompt_sets: Sequence[str]
) -> list[AnyConfig]:
    """The rewards that score prompts of one of the sets; all where prompts come in no sets."""
    return [
        reward for reward in rewards if not prompt_sets or any(map(reward.applies_to, prompt_sets))
    ]


def prompt_sets_without_reward(
    rewards: Sequence[RewardConfig], prompt_sets: Iterable[str]
) -> list[str]:
    """The sets whose prompts none of the trained rewards scores."""
    trained = select_trained(rewards)
    return [name for name in prompt_sets if not any(reward.applies_to(name) for reward in trained)]


def select_trained(rewards: Iterable[AnyConfig]) -> list[AnyConfig]:
    """The rewards with a part in the sum: those of weight 0 are scores alone."""
    return [reward for reward in rewards if reward.weight]
