"""What the workers of an online stage send each other: requests, batches, and reports.

Large values (rollouts, images) stay where a worker left them. The stage's own process holds handles
to them: on Ray references into the object store, in one process the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import Conditioning
from ebbflow.models.base import Size
from ebbflow.online.tracing import TraceSpan
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.rollout_cache import FeatureCacheConfig, Quantization
from ebbflow.rewards.combine import ScoreTable

Handle = Any
"""A value that workers can be given, wherever it lies."""


@dataclass(frozen=True)
class RolloutRequest:
    """Samples that a rollout worker generates in one call: whole groups of one step, about a
    micro-batch.

    Example:
        Two prompts with 4 samples each: ``prompts`` has 8 entries, ``conditioning`` 2 rows,
        ``sample_index`` is [0, 0, 0, 0, 1, 1, 1, 1] and ``keys`` names 8 samples.

    Attributes:
        step: the training step that the samples are for, from zero.
        prompts: [N], the prompt of every sample.
        conditioning: on the CPU, one row per different prompt. Rows are large, so they are repeated
            where they are used.
        sample_index: integer [N], the row of ``conditioning`` of each sample.
        plan: which denoising steps are stochastic and trained.
        size: height and width of the images; None: those of the model.
        cache: of features, for samples to train on; a validation has none.
        quantization: of the network, likewise.
        task: name of the call in the timeline.
        with_sound: whether to decode the sound of the samples: something scores it.
        profiled: whether to profile the call.
    """

    step: int
    prompts: list[Prompt]
    conditioning: Conditioning
    sample_index: np.ndarray
    keys: SampleKeys
    sampler: SamplerConfig
    plan: Plan | None
    task: str = "rollout"
    profiled: bool = False
    size: Size | None = None
    cache: FeatureCacheConfig | None = None
    quantization: Quantization | None = None
    with_sound: bool = False

    @property
    def tree_nodes(self) -> np.ndarray:
        """As of ``RolloutBatch``."""
        # Step s adds the noise with the index s + 1. Samples that share it are one node after the
        # step. One list of [N] for each trained step, transposed to [N, W].
        trained = self.plan.trained if self.plan else ()
        return np.array([self.keys.find_noise_owners(step + 1) for step in trained]).T

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class RolloutReport:
    """A rollout worker's answer to a request, apart from the rollouts and images.

    Attributes:
        version: of the weights that generated: training steps of the stage that they have seen.
        receive_seconds: time to receive and verify those weights; 0 where they were loaded already.
        finite: bool [N], whether all numbers of a sample are finite. Other samples cannot be
            scored.
    """

    version: int
    receive_seconds: float
    finite: np.ndarray
    spans: list[TraceSpan]


@dataclass(frozen=True)
class TrainingReport:
    """A training rank's answer: metrics averaged over the updates of a step, optimiser steps of the
    stage so far, all alarms.
    """

    metrics: dict[str, float]
    updates: int
    alarms: list[str]
    spans: list[TraceSpan]


@dataclass(frozen=True)
class ScoredRollouts:
    """The rollouts of a request, with their scores and the statistics of their images, NaN where a
    sample is not finite.
    """

    request: RolloutRequest
    rollouts: Handle
    # Handle of uint8 RGB [N, height, width, 3], or of videos, [N, frames, height, width, 3].
    images: Handle
    report: RolloutReport
    scores: ScoreTable
    spans: list[TraceSpan]
    statistics: dict[str, np.ndarray]


@dataclass(frozen=True)
class RolloutBatch:
    """All rollouts of a training step, in the order of its requests.

    Example:
        4 prompts with 4 samples each and a ``micro_batch`` of 8: two parts of 8 samples, and
        ``scores``, ``prompt_ids`` and ``statistics`` have 16 rows.

    Attributes:
        num_dropped: samples that were too old for training and were generated again.
    """

    step: int
    parts: Sequence[ScoredRollouts]
    num_dropped: int = 0

    @property
    def requests(self) -> list[RolloutRequest]:
        return [part.request for part in self.parts]

    @property
    def scores(self) -> ScoreTable:
        return ScoreTable.concatenate([part.scores for part in self.parts])

    @property
    def statistics(self) -> dict[str, np.ndarray]:
        """Statistics of the images of all samples, float64 [N] columns."""
        # All parts have the same names: a part that could not be scored has them with NaN.
        names = self.parts[0].statistics
        return {
            name: np.concatenate([part.statistics[name] for part in self.parts]) for name in names
        }

    @property
    def spans(self) -> list[TraceSpan]:
        return [span for part in self.parts for span in part.spans]

    @property
    def distinct_prompts(self) -> list[Prompt]:
        """Every prompt once."""
        # A dictionary keeps the first place of each key, so the order is that of the requests.
        return list(
            {
                prompt.prompt_id: prompt for part in self.parts for prompt in part.request.prompts
            }.values()
        )

    @property
    def size(self) -> Size | None:
        """Height and width of all images; None: those of the model."""
        return self.parts[0].request.size

    @property
    def prompt_ids(self) -> np.ndarray:
        """integer [N]."""
        return np.array(
            [prompt.prompt_id for part in self.parts for prompt in part.request.prompts]
        )

    @property
    def tree_nodes(self) -> np.ndarray:
        """The node of each sample of a tree after each of the W trained steps, by the node's first
        sample, integer [N, W].
        """
        return np.concatenate([part.request.tree_nodes for part in self.parts])

    def compute_staleness(self, version: int) -> list[int]:
        """For every sample, the number of training steps between the policy that generated it and
        ``version``.
        """
        # In mode ``async`` the requests of one step may have been generated by different versions.
        return [version - part.report.version for part in self.parts for _ in part.request.prompts]
