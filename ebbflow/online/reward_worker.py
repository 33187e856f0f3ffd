"""A reward worker: scores images against their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.evaluation.image_statistics import compute_image_statistics
from ebbflow.online.tracing import TaskTimer, TraceSpan
from ebbflow.rewards.combine import Scorer, ScoreTable
from ebbflow.rollouts.generate import Rollouts


class RewardWorker:
    """A scorer with a timer."""

    def __init__(self, scorer: Scorer, index: int = 0) -> None:
        self.scorer = scorer
        self.timer = TaskTimer("reward", index)

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[Prompt],
        step: int,
        with_guards: bool = False,
        profiled: bool = False,
        rollouts: Rollouts | None = None,
    ) -> tuple[ScoreTable, dict[str, np.ndarray], list[TraceSpan]]:
        """Score images [N, ...], each against its prompt: (scores, statistics of the images
        (``image_statistics``), spans).

        Args:
            with_guards: score as a validation does, which has an image of each prompt: with the
                guardrail metrics, and without rewards that compare.
            rollouts: of the images, for rewards that score latents or sound.
        """
        with self.timer.time_task("validation" if with_guards else "scoring", step, profiled):
            # A validation has one image per prompt, so rewards that compare a group have nothing to
            # compare. Training does without guardrails: they cost time and change no update.
            if with_guards:
                scorer = self.scorer.without_group_rewards()
            else:
                scorer = replace(self.scorer, guardrails=())
            # Before the rewards: a user's reward may write into its images.
            statistics = compute_image_statistics(images)
            latents = rollouts.latents.numpy() if rollouts else None
            scores = scorer(images, prompts, latents, rollouts.sounds if rollouts else None)
        return scores, statistics, self.timer.drain_spans()
