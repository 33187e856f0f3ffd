r"""GARDO (2512.24138): Flow-GRPO with a reference penalty for doubtful samples alone, to a
reference that becomes the policy from time to time, and more of an advantage for good samples that
are unlike the others of their group.

    w(y)_i = 1/B sum_j 1[y_i > y_j]                        over the B scored samples of a step
    U_i    = w(R)_i - mean_k w(Q_k)_i                      R trained, Q_k ``auxiliary``
    g_i    = 1[U_i > quantile of the U >= 0 at 1 - k]
    A_i    = (R_i - mean R) d_i / mean d  where that is above 0,  else R_i - mean R
    L      = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta mean_{g = 1} KL

d: ``diversity``, the distance to the nearest other picture of the group (the reward ``novelty``),
whose mean is over the group. k begins at ``share``; a step whose mean of the U >= 0 is above those
of the last 20 steps makes it 1.1 times as large, one below them .9 times, within ``min_share`` and
``max_share``. The reference is a copy of the policy, renewed by ``reference.reset_every`` and
``reference.reset_above`` of the stage.

Where paper and code (tinnerhrhe/GARDO at 1cc77fb) disagree:

- The code ranks from 1 for the best and subtracts the other way round, so it gates samples that R
  thinks *worse* of than the Q_k do. Here as eq. 7 and figure 7 of the paper have it: samples that R
  overrates.
- The paper's quantile and window are over all U, whose mean is 0 where no scores are equal. Here as
  in the code, over the U >= 0, with its bounds of k; and d is divided by its mean as there.
- The code takes the mean of the KL over the gated samples of each micro-batch, and nothing where it
  has none. Here it is over those of the step, so that ``micro_batch`` changes nothing.
- Its weight std_dev_t / mean(std_dev_t) is 1, as all rows of a micro-batch are of one step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ebbflow.algorithms.base import Algorithm, StepScores
from ebbflow.algorithms.built_in import flow_grpo
from ebbflow.algorithms.built_in.flow_grpo import ClippedConfig
from ebbflow.recipe.algorithms import GROUP_SIZE, PublishedSetting

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.algorithms.advantages import AdvantageResult

SETTINGS = "tinnerhrhe/GARDO config/gardo.py general_ocr_sd3"
SHARED_SETTINGS = "tinnerhrhe/GARDO config/gardo.py compressibility"
BASE = "tinnerhrhe/GARDO config/base.py"
SCRIPT = "tinnerhrhe/GARDO scripts/train_sd3_grpo_gardo.py"
STATISTICS = "tinnerhrhe/GARDO flow_grpo/stat_tracking.py"
WINDOW = 20
"""Steps whose mean uncertainties the next one is compared with."""
RATE = 0.1
"""Change of the share after a step outside of that window."""


class GARDOConfig(ClippedConfig):
    """Flow-GRPO that holds back what the reward overrates, renews its reference, and favours good
    samples unlike the others.
    """

    paper: ClassVar = "2512.24138"
    reshapes_advantages: ClassVar = True
    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde", "steps": 10},
        "window": {"kind": "all"},
        "advantages": {"std": "none"},
        "reference": {
            "weight": 0.04,
            "penalty": "kl_without_dt",
            "reset_every": 16,
            "reset_above": 3e-4,
        },
        "updates_per_step": 2,
    }
    published: ClassVar = {
        "algorithm.clip_range": PublishedSetting(1e-4, BASE),
        "algorithm.auxiliary": PublishedSetting(["aesthetic", "imagereward"], SCRIPT),
        "algorithm.diversity": PublishedSetting("novelty", SCRIPT, "in features of DINOv3"),
        "algorithm.share": PublishedSetting(0.1, SCRIPT),
        "algorithm.min_share": PublishedSetting(0.02, SCRIPT),
        "algorithm.max_share": PublishedSetting(0.2, SCRIPT),
        "which samples are gated": PublishedSetting(
            "those that the trained reward underrates",
            SCRIPT,
            deviation="the paper (eq. 7, figure 7) gates those that it overrates",
            ours="those that it overrates",
        ),
        "sampler.name": PublishedSetting("flow_sde", BASE, "eta .7; .9 for FLUX"),
        "sampler.steps": PublishedSetting(10, SETTINGS, "6 for FLUX"),
        "window.kind": PublishedSetting(
            "all", SETTINGS, "timestep_fraction .89: of 10 steps the first 8 are trained"
        ),
        "advantages.std": PublishedSetting("none", STATISTICS),
        "advantages.clip": PublishedSetting(5.0, BASE),
        "reference.weight": PublishedSetting(0.04, SETTINGS, ".07 for GenEval, .01 for FLUX"),
        "reference.penalty": PublishedSetting("kl_without_dt", SCRIPT, "over 2 std_dev_t^2"),
        "reference.reset_every": PublishedSetting(
            16, SHARED_SETTINGS, "reset_freq 15: reset once more steps than that have passed"
        ),
        "reference.reset_above": PublishedSetting(
            3e-4, SHARED_SETTINGS, "1e-4 in the paper; to be set for each task"
        ),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(2, SETTINGS),
        "group_size": PublishedSetting(24, SETTINGS, deviation=GROUP_SIZE),
    }

    name: Literal["gardo"] = "gardo"
    auxiliary: list[str] = Field(["aesthetic", "imagereward"], min_length=1)
    """Columns of scores that the trained reward is compared with: rewards with ``weight: 0``, or
    metrics of a reward."""
    diversity: str | None = "novelty"
    """Column of the distance of a picture to the others of its prompt, a reward with ``weight: 0``.
    ``null``: advantages stay as they are."""
    share: float = Field(0.1, gt=0, lt=1)
    """Share of the overrated samples that the reference penalty is for, at the start."""
    min_share: float = Field(0.02, gt=0, lt=1)
    """Smallest share."""
    max_share: float = Field(0.2, gt=0, lt=1)
    """Largest share."""

    @model_validator(mode="after")
    def _check_share_is_within_bounds(self) -> GARDOConfig:
        if not self.min_share <= self.share <= self.max_share:
            raise ValueError(
                f"share = {self.share:g} is not between min_share = {self.min_share:g} and"
                f" max_share = {self.max_share:g}; change one of them"
            )
        return self

    @property
    def read_columns(self) -> list[str]:
        if self.diversity is None:
            return self.auxiliary
        return [*self.auxiliary, self.diversity]


def reshape_advantages(
    advantages: AdvantageResult, scores: StepScores, config: GARDOConfig, memory: dict[str, Any]
) -> AdvantageResult:
    """Multiply the advantages of good samples with their diversity, and gate the penalty.

    Args:
        memory: ``share``, and ``uncertainties``, the means of the last steps.
    """
    import numpy as np

    keep = advantages.keep
    # A sample without one of the scores is not gated, and its advantage stays.
    # [C, N]: the auxiliary rewards, and the diversity where there is one.
    columns = np.stack([scores.columns[name] for name in config.read_columns])
    is_known = np.isfinite(scores.reward) & np.isfinite(columns).all(0)
    is_gated = np.zeros(len(keep), np.bool_)
    metrics = dict(advantages.metrics)
    if is_known.any():
        auxiliary = [scores.columns[name][is_known] for name in config.auxiliary]
        # (B,): B of the N samples have all scores.
        uncertainty = compute_uncertainty(scores.reward[is_known], auxiliary)
        limit = choose_gate(uncertainty, config, memory)
        is_gated[is_known] = uncertainty > limit
        overrated = uncertainty[uncertainty >= 0]
        metrics["gardo/uncertainty"] = float(overrated.mean()) if len(overrated) else 0.0
    # Ranks are over all scored samples, as published; what is not trained has no penalty.
    is_gated &= keep
    # The mean over all trained samples is then that over the gated ones.
    factor = is_gated * (keep.sum() / max(is_gated.sum(), 1))

    values = advantages.values
    if config.diversity:
        # Bad samples stay: to be unusual is no merit of a picture that scores low.
        novelty = np.where(is_known, scores.columns[config.diversity], np.nan)
        scale = compute_diversity_scale(novelty, scores.prompt_ids)
        values = np.where(values > 0, values * scale, values).astype(np.float32)
        metrics["gardo/diversity"] = float(novelty[is_known].mean()) if is_known.any() else 0.0
    metrics["gardo/share"] = memory.get("share", config.share)
    metrics["gardo/gated_share"] = float(is_gated.sum() / max(keep.sum(), 1))
    return replace(
        advantages, values=values, penalty_factor=factor.astype(np.float32), metrics=metrics
    )


def compute_uncertainty(reward: np.ndarray, auxiliary: list[np.ndarray]) -> np.ndarray:
    """Compute U of B samples, float64 [B]: how much higher the reward ranks a sample than the
    auxiliary ones do.

    Example:
        The reward [.9, .5, .1] and one auxiliary reward [1., 3., 2.] give [2/3, -1/3, -1/3].
    """
    import numpy as np

    # Ranks and not scores: rewards have scales of their own.
    # Whole numbers until the end: a rounded 0 could fall on either side of the gate's U >= 0.
    others = np.mean([_count_wins(values) for values in auxiliary], axis=0)
    difference: np.ndarray = _count_wins(reward) - others
    return difference / len(reward)


def _count_wins(values: np.ndarray) -> np.ndarray:
    """Count the values of the batch that each one is above, integer [B]; equal ones win nothing."""
    import numpy as np

    # The place of the first equal value is the number of values below it: no [B, B] comparison.
    return np.searchsorted(np.sort(values), values, side="left")


def choose_gate(uncertainty: np.ndarray, config: GARDOConfig, memory: dict[str, Any]) -> float:
    """Return the uncertainty above which the penalty applies, and remember the share that it is
    for.
    """
    import numpy as np

    # Over all of them the mean would be 0 wherever no scores are equal, and say nothing.
    overrated = uncertainty[uncertainty >= 0]
    if not len(overrated):
        return float("inf")
    mean = float(overrated.mean())
    share = memory.get("share", config.share)
    earlier: list[float] = memory.get("uncertainties", [])
    # More doubt than in all of the last steps asks for more of the penalty, less for less.
    if earlier and mean > max(earlier):
        share *= 1 + RATE
    elif earlier and mean < min(earlier):
        share *= 1 - RATE
    # Bounded: without an end, a long run would penalise all samples or none.
    share = min(max(share, config.min_share), config.max_share)
    # Kept by checkpoints, so that a stage that resumes has the share of one that never stopped.
    memory["share"] = share
    memory["uncertainties"] = [*earlier, mean][-WINDOW:]
    return float(np.quantile(overrated, 1 - share))


def compute_diversity_scale(novelty: np.ndarray, prompt_ids: np.ndarray) -> np.ndarray:
    """Compute d_i over its mean in the group of the prompt, float64 [N]; 1 where d is NaN, and in a
    group without any distance.
    """
    import numpy as np

    scale = np.ones(len(novelty))
    for prompt_id in np.unique(prompt_ids):
        rows = np.flatnonzero((prompt_ids == prompt_id) & np.isfinite(novelty))
        # The mean keeps the scale of the advantages, whatever distances the features have. Without
        # any distance all pictures are the same, and none of them is the more diverse one.
        mean = novelty[rows].mean() if len(rows) else 0.0
        if mean > 0:
            scale[rows] = novelty[rows] / mean
    return scale


ALGORITHM = Algorithm(GARDOConfig, flow_grpo.compute_loss, reshape=reshape_advantages)
