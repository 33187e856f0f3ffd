"""The workers that make the samples of a step: a rollout worker generates them with an engine, and
a reward worker scores their images against the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ebbflow.data.prompts import Prompt
from ebbflow.evaluation.image_statistics import compute_image_statistics
from ebbflow.models.base import generate_in_size
from ebbflow.online.messages import RolloutReport, RolloutRequest, TaskTimer, TraceSpan
from ebbflow.rewards.combine import Scorer, ScoreTable
from ebbflow.rollouts.engine import Engine, build_text_arguments
from ebbflow.rollouts.generate import Diffusers, Rollouts, find_finite_rows
from ebbflow.rollouts.weights import Tensors, WeightsVersion


class RolloutWorker:
    """An engine, and the version of the weights in it: generates what it is asked for, with the
    weights that come with the request.

    Args:
        fetch: gets a bucket of weights from where ``WeightsVersion`` says it is.
    """

    def __init__(
        self,
        engine: Engine,
        index: int = 0,
        fetch: Callable[[Any], Tensors] = lambda bucket: bucket,
    ) -> None:
        self.engine = engine
        self.fetch = fetch
        self.loaded: tuple[int, str] | None = None
        self.timer = TaskTimer("rollout", index)

    def generate(
        self, request: RolloutRequest, weights: WeightsVersion
    ) -> tuple[Rollouts, np.ndarray, RolloutReport]:
        """(rollouts on the CPU, images, report). New weights are received and verified first.

        Raises:
            TransferError: the weights that arrived are not those that were sent.
        """
        received: list[TraceSpan] = []
        # A request names its weights, so a worker that was replaced loads them with its first one.
        # Without a digest the engine shares the trainer's. The digest is compared as well: a
        # validation sends another copy of the policy under the same version.
        if weights.digest and (weights.version, weights.digest) != self.loaded:
            with self.timer.time_task("receive", request.step) as received:
                self.engine.load(weights.receive_tensors(self.fetch))
                self.loaded = weights.version, weights.digest
        sized: AbstractContextManager[None] = nullcontext()
        generate: Callable[..., tuple[Rollouts, np.ndarray]] = self.engine.generate
        if isinstance(self.engine, Diffusers):
            sized = generate_in_size(self.engine.policy.model, request.size)
            generate = partial(
                generate,
                cache=request.cache,
                quantization=request.quantization,
                with_sound=request.with_sound,
            )
        else:
            for option in (request.size, request.cache, request.quantization):
                assert option is None, (
                    "the recipe rejects several sizes, caches and 8 bits of other engines"
                )
            generate = partial(generate, **build_text_arguments(self.engine, request.prompts))
        with (
            self.timer.time_task(request.task, request.step, request.profiled) as generated,
            sized,
        ):
            # One row per prompt travels; here it is repeated for every sample.
            conditioning = request.conditioning.select_rows(torch.from_numpy(request.sample_index))
            rollouts, images = generate(conditioning, request.keys, request.sampler, request.plan)
        report = RolloutReport(
            weights.version,
            sum((span.seconds for span in received), 0.0),
            find_finite_rows(rollouts.latents),
            received + generated,
        )
        # Rollouts may wait for training for some steps, and the device needs the room for the next
        # ones.
        return rollouts.move_to(torch.device("cpu")), images, report

    def close(self) -> None:
        self.engine.close()


class RewardWorker:
    """A scorer with a timer."""

    def __init__(self, scorer: Scorer, index: int = 0) -> None:
        # A validation has one image per prompt, so rewards that compare a group have nothing to
        # compare. Training does without guardrails: they cost time and change no update.
        self.validation_scorer = scorer.without_group_rewards()
        self.training_scorer = replace(scorer, guardrails=())
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
        task = "validation" if with_guards else "scoring"
        with self.timer.time_task(task, step, profiled) as spans:
            scorer = self.validation_scorer if with_guards else self.training_scorer
            # Before the rewards: a user's reward may write into its images.
            statistics = compute_image_statistics(images)
            latents = rollouts.latents.numpy() if rollouts else None
            scores = scorer(images, prompts, latents, rollouts.sounds if rollouts else None)
        return scores, statistics, spans
