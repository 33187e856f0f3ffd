"""The networks of reward models: trained on labels (``ebbflow.reward_training``), then frozen
(``ebbflow.rewards.built_in.model``).

A network takes images in [0, 1], float32 [n, 3, height, width], and their prompts, and gives a
score each, with gradient. It scores bytes in the same way, so training and use cannot differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ebbflow.data.prompts import Prompt
from ebbflow.models.families.glyph import ALPHABET
from ebbflow.models.glyph_training.recognizer import letter_indices, open_recognizer
from ebbflow.models.hub import locate_pretrained
from ebbflow.recipe.reward_model import ClipNetworkConfig, GlyphReaderConfig, RewardNetworkConfig
from ebbflow.rewards.base import NO_TARGET
from ebbflow.rewards.built_in.recognizer import fold_target
from ebbflow.rewards.clip import read_clip
from ebbflow.rewards.network import CLIP_FILES
from ebbflow.storage.artifacts import digest_of_folder

ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""The linear layers of CLIP's transformers that get adapters."""


class RewardNetwork(nn.Module):
    """What every network of a reward model has."""

    source_digest: str | None = None
    """Digest of the weights that it starts from; None where it starts from random ones."""
    trained_names: frozenset[str] = frozenset()
    """The parameters that training changes."""

    @abstractmethod
    def forward(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score RGB in [0, 1], [n, 3, height, width]: float32 [n]."""

    def explain_unscorable(self, prompt: Prompt, height: int, width: int) -> str | None:
        """Return why a picture of a prompt cannot be scored; None if it can."""
        return None

    def trained_weights(self) -> dict[str, Tensor]:
        """Return what training changes, by name, also of a network that is frozen by now."""
        return {
            name: weight.detach()
            for name, weight in self.named_parameters()
            if name in self.trained_names
        }

    def load_trained_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load what ``trained_weights`` returned.

        Raises:
            ValueError: they are of another network.
        """
        parameters = self.trained_weights()
        # All of them, by name and shape: a part would leave random weights in the rest.
        shapes = {name: weight.shape for name, weight in parameters.items()}
        if shapes != {name: weight.shape for name, weight in weights.items()}:
            raise ValueError("the weights are of another network; train the reward model again")
        for name, weight in weights.items():
            parameters[name].copy_(weight)


class GlyphReader(RewardNetwork):
    """exp(scale) * mean log-probability of the target's letters under a reader of pictures.

    It begins as the network of the reward ``recognizer``, which was trained on rendered letters, as
    a CLIP was on the web.
    """

    def __init__(self, config: GlyphReaderConfig) -> None:
        super().__init__()
        self.config = config
        pretrained = open_recognizer(config.height, config.width, config.letters)
        # A copy: the pretrained network is shared by all rewards of this process.
        self.reader = deepcopy(pretrained).requires_grad_(True)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        texts = [fold_target(prompt.target or "") for prompt in prompts]
        letters = letter_indices(texts).to(images.device)  # [n, letters]
        log_probs = self.reader(images.mean(1, keepdim=True))  # [n, letters, alphabet]
        # No gather: its gradient is not deterministic.
        chosen: Tensor = log_probs * one_hot(letters, log_probs.shape[2])
        return self.scale.exp() * chosen.sum(2).mean(1)

    def explain_unscorable(self, prompt: Prompt, height: int, width: int) -> str | None:
        if prompt.target is None:
            return NO_TARGET
        text = fold_target(prompt.target)
        config = self.config
        if len(text) != config.letters or set(text) - set(ALPHABET):
            return (
                f"the target {prompt.target!r} is not {config.letters} letters A-Z, which this"
                " reward model reads"
            )
        if (height, width) != (config.height, config.width):
            return (
                f"the picture has {height}x{width} pixels, and this reward model reads"
                f" {config.height}x{config.width}"
            )
        return None


class ClipScorer(RewardNetwork):
    """scale * (sum_i w_i image_i text_i + sum_i u_i image_i) of unit embeddings: with w = 1 and u =
    0, where it starts, CLIP's own score (2103.00020); u is a head on the image alone.
    """

    def __init__(self, config: ClipNetworkConfig) -> None:
        super().__init__()
        folder = locate_pretrained(config, [*CLIP_FILES, "*.json", "*.txt"])
        self.source_digest = digest_of_folder(folder)
        # A copy of its own: adapters must not change the CLIP of other rewards.
        self.clip = read_clip(folder)
        self.model = self.clip.model
        width = self.model.config.projection_dim
        self.text_weights = nn.Parameter(torch.ones(width))
        self.image_weights = nn.Parameter(torch.zeros(width))
        if config.train == "lora":
            # peft makes the adapters alone trainable; their products are zero at the start.
            adapters = LoraConfig(
                r=config.rank, lora_alpha=config.alpha, target_modules=list(ADAPTED)
            )
            inject_adapter_in_model(adapters, self.model)

    def forward(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        image = self.clip.embed_images(images)
        text = self.clip.embed_texts([prompt.prompt for prompt in prompts])
        weights = self.text_weights * text + self.image_weights
        scores: Tensor = self.model.logit_scale.exp() * (image * weights).sum(-1)
        return scores


def build_reward_network(config: RewardNetworkConfig, seed: int) -> RewardNetwork:
    """Build a network whose new weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: RewardNetwork
        if isinstance(config, ClipNetworkConfig):
            network = ClipScorer(config)
        else:
            network = GlyphReader(config)
    network.trained_names = frozenset(
        name for name, weight in network.named_parameters() if weight.requires_grad
    )
    return network
