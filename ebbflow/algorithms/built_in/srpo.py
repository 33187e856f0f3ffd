r"""SRPO, semantic relative preference optimisation (2509.06942): the gradient of the difference of
two rewards, by Direct-Align.

    x_hat = x0 + (sigma' - sigma) / (1 - sigma') (v - (eps - x0))
    S = (1 + d) r(x_hat, c+) - r(x_hat, c-)   of the denoising branch, sigma > sigma'
    S = (1 + d) r(x_hat, c-) - r(x_hat, c+)   of the inversion branch, sigma < sigma'
    L = max(0, t - S)

x0, eps: the final latents of the rollout and the noise that it started from; v: the velocity at (1
- sigma) x0 + sigma eps; x_hat: the clean latents that a step to sigma' and the known noise give, so
the gradient reaches early steps; r: the weighted sum of the rewards of the decoded image; c+, c-:
the prompt after a positive and a negative word; d: ``discount`` or ``inversion_discount``, linear
in the lower sigma of the step; t: ``target``.

An inversion step adds noise, so its gradient goes the other way: both branches raise r(c+) and
lower r(c-) of what the policy generates. What the two have in common is raised by d and lowered by
the d of the inversion branch, against reward hacking. Without words c+ = c- = c: the denoising
branch raises d r(c), the inversion branch lowers d r(c).

Deviations: sigma' is drawn for each sample, from a continuous band; the code draws one of 991
points of a list, for each process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, DirectAlignRows, RowMetrics, compute_missing_reward
from ebbflow.recipe.algorithms import GROUP_SIZE, DirectAlignConfig, PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor

CODE = "Tencent-Hunyuan/SRPO fastvideo/SRPO.py"
SCRIPT = "Tencent-Hunyuan/SRPO scripts/finetune/SRPO_training_hpsv2.sh"

Word = Annotated[str, Field(min_length=1)]


class SRPOConfig(DirectAlignConfig):
    """Gradient of the reward after positive words over that after negative words, of images
    recovered from any noise level.
    """

    paper: ClassVar = "2509.06942"
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 25},
        "optimizer": {"lr": 5e-6, "weight_decay": 1e-4, "max_grad_norm": 0.1},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.min_sigma": PublishedSetting(
            0.75, CODE, "train_timestep 25 of 50 with shift 3; 30, .6667, with PickScore"
        ),
        "algorithm.max_sigma": PublishedSetting(
            0.9643, CODE, "train_timestep 5 of 50 with shift 3"
        ),
        "algorithm.jump": PublishedSetting(0.1, SCRIPT, "groundtruth_ratio .9"),
        "algorithm.inversion": PublishedSetting(
            True, SCRIPT, "gradient_accumulation_steps 2, one for each branch"
        ),
        "algorithm.positive_words": PublishedSetting(
            ["Natural-lighting", "Detail", "Detailed", "Real"], CODE
        ),
        "algorithm.negative_words": PublishedSetting(
            ["Concept art", "Painting", "Anime", "Flat", "Oil"], CODE
        ),
        "algorithm.discount": PublishedSetting(
            [0.1, 0.25], SCRIPT, "discount_pos; .1 to .5 with PickScore"
        ),
        "algorithm.inversion_discount": PublishedSetting(
            [0.3, 0.01], SCRIPT, "discount_inv; .6 to .01 with PickScore"
        ),
        "algorithm.target": PublishedSetting(0.7, CODE, "of HPSv2.1, and PickScore / 20"),
        "sampler.name": PublishedSetting("ode", CODE),
        "sampler.steps": PublishedSetting(25, SCRIPT),
        "reference.weight": PublishedSetting(0.0, CODE),
        "optimizer.lr": PublishedSetting(5e-6, SCRIPT, "of all parameters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, SCRIPT),
        "optimizer.max_grad_norm": PublishedSetting(0.1, SCRIPT),
        "updates_per_step": PublishedSetting(1, CODE),
        "group_size": PublishedSetting(1, SCRIPT, deviation=GROUP_SIZE),
    }

    name: Literal["srpo"] = "srpo"
    positive_words: list[Word] = ["Natural-lighting", "Detail", "Detailed", "Real"]
    """Words for what images should show. Each update puts one of them before the prompt that
    rewards see ("Detail. a cat"), in turn.
    """
    negative_words: list[Word] = ["Concept art", "Painting", "Anime", "Flat", "Oil"]
    """Words for what images should not show, used in the same way. An empty list: the prompt
    without a word.
    """
    discount: list[float] = Field([0.1, 0.25], min_length=2, max_length=2)
    """Discount d of the denoising branch at ``min_sigma`` and at ``max_sigma``."""
    inversion_discount: list[float] = Field([0.3, 0.01], min_length=2, max_length=2)
    """Discount d of the inversion branch at ``min_sigma`` and at ``max_sigma``."""
    target: float | None = 0.7
    """Differences of rewards above this value give no gradient. ``null``: all differences do."""

    def choose_words(self, update: int) -> tuple[str, str]:
        # An empty list stands for the prompt without a word. The words take turns, so that all
        # processes agree on them and each is used as often as the others.
        positive = self.positive_words or [""]
        negative = self.negative_words or [""]
        return positive[update % len(positive)], negative[update % len(negative)]


def compute_loss(rows: DirectAlignRows, config: SRPOConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # Not at the top of the file: reading a recipe imports it, and must not load torch.
    import torch

    # r(x_hat, c+) and r(x_hat, c-), [M] each, of the same decoded images.
    positive, negative = rows.rewards(rows.recovered_latents)

    # d, linear in the lower sigma of the step, the end of the denoising branch and the start of the
    # inversion branch: from the first number of a discount at min_sigma to the second at max_sigma.
    inverse = rows.sigma < rows.end_sigma
    place = (torch.minimum(rows.sigma, rows.end_sigma) - config.min_sigma) / (
        config.max_sigma - config.min_sigma
    )
    discount = torch.where(
        inverse,
        _interpolate_ends(config.inversion_discount, place),
        _interpolate_ends(config.discount, place),
    )

    # S = (1 + d) r(c+) - r(c-). The two change places in the inversion branch: its step adds noise,
    # so the gradient that raises S there lowers it for what the policy generates.
    raised = torch.where(inverse, negative, positive)
    lowered = torch.where(inverse, positive, negative)
    relative = (1 + discount) * raised - lowered

    # max(0, t - S): differences above the target have no gradient.
    missing, active = compute_missing_reward(relative, config.target)
    return missing, {
        "srpo/reward": positive,
        "srpo/margin": positive - negative,
        "srpo/active": active,
    }


def _interpolate_ends(ends: list[float], place: Tensor) -> Tensor:
    """Interpolate between two ends; ``place`` is 0 at the first and 1 at the second, [M]."""
    return ends[0] + (ends[1] - ends[0]) * place


ALGORITHM = Algorithm(SRPOConfig, compute_loss)
