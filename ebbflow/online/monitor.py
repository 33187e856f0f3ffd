"""What a stage shows of itself without changing its training: validation, dumps, profiles, the
timeline.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompt_windows import build_prompt_windows
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import SamplingError
from ebbflow.evaluation.evaluate import average_metrics, build_evaluation_keys
from ebbflow.models.encoding import Encode, PromptWindows
from ebbflow.online.messages import RolloutBatch, RolloutPart, RolloutRequest
from ebbflow.online.rollout_queue import RolloutQueue, count_steps_ahead
from ebbflow.online.timeline import Timeline
from ebbflow.plots.images import PICTURED, build_image_grid, format_caption
from ebbflow.rewards.combine import ScoreTable
from ebbflow.rewards.samples import reads_any
from ebbflow.stage import MetricsRecorder, StageContext


class StageMonitor:
    """Shows a stage to its metrics logger.

    Args:
        prompts: the validation prompts.

    Attributes:
        embeddings: the validation prompts in windows of micro-batches.
        timeline: what the workers did so far.
        score: mean reward of the policy as it is, where it was just validated.
    """

    def __init__(
        self,
        ctx: StageContext,
        queue: RolloutQueue,
        metrics_logger: MetricsRecorder,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        self.ctx = ctx
        self.queue = queue
        self.workers = queue.workers
        self.metrics_logger = metrics_logger
        self.prompts = prompts
        # Encoded apart from those of training: prompts are padded to the longest of their window,
        # and validation must not change training.
        batches = split_validation(prompts, ctx.config.micro_batch)
        self.embeddings = PromptWindows(build_prompt_windows(batches))
        self.timeline = Timeline(ctx.online_config.resources, queue.num_processes)
        self.score: float | None = None

    async def record_step(
        self, batch: RolloutBatch, advantages: np.ndarray, version: int, start: float, end: float
    ) -> dict[str, float]:
        """Record the training step ``version`` (seconds since 1970); gives the utilisation of the
        workers.

        Workers say what they did when it is done. So this is the utilisation of the last step in
        whose time nothing was done that is still under way.

        Args:
            batch: what was trained on.
            advantages: of its samples.
        """
        config = self.ctx.online_config
        # Rollouts of later steps overlap this one, and their spans come when they are done. So the
        # step that is reported is as many steps back as the queue runs ahead.
        ahead = count_steps_ahead(self.ctx.online_config)
        self.timeline.steps[version] = (start, end)
        self.add_spans()
        if config.dumps and version % config.dumps.every == 0:
            # JSON has no NaN: a sample without an advantage has null.
            rows = [
                row | {"advantage": _number_or_none(value)}
                for row, value in zip(build_sample_rows(batch.parts), advantages, strict=True)
            ]
            await self._log_dump(version, "rollouts", rows, self._iterate_pngs(batch.parts))
        return self.timeline.compute_utilisation(version - ahead, ahead)

    def is_validation_due(self, version: int, last: bool = False) -> bool:
        """Whether there is a validation after so many training steps; ``last``: when the stage is
        over.
        """
        config = self.ctx.online_config.validation
        return (
            config is not None and (version % config.every == 0 or last) and len(self.prompts) > 0
        )

    async def validate_policy(self, version: int, last: bool = False) -> float:
        """Where it is due: sample and score the validation prompts, with the weights that would be
        served now.

        The rollouts of later steps keep the weights that they were started with.

        Returns:
            seconds that it took.
        """
        # The score is of the policy as it is: after the next training step it is no longer known.
        self.score = None
        if not self.is_validation_due(version, last):
            return 0.0
        start = time.time()
        parts = await self._sample_validation(version)
        rows = build_sample_rows(parts)
        scores = _join_scores(parts)
        pngs = [png async for png in self._iterate_pngs(parts)]
        metrics = average_metrics(scores)
        self.score = metrics.get("reward")
        metrics |= {"scored_share": 1 - scores.failed_share}
        self.metrics_logger.log_metrics(
            {f"validation/{name}": value for name, value in metrics.items()}, version
        )
        self.metrics_logger.log_table(f"validation/{_format_step(version)}", _build_table(rows))
        grid = build_image_grid(
            pngs[:PICTURED], [format_caption(row) for row in rows[:PICTURED]], columns=4
        )
        self.metrics_logger.log_image("validation", grid, version)
        if self.ctx.online_config.dumps:
            await self._log_dump(version, "validation", rows, self._iterate_pngs(parts))
        return time.time() - start

    async def _sample_validation(self, version: int) -> list[RolloutPart]:
        """The validation prompts, sampled and scored by the stage's own workers, guardrails
        included.
        """
        # With an average of the policy, that is what the stage leaves behind and what is served.
        served = "ema" if self.ctx.recipe.policy.ema else "current"
        rolled_out = self.ctx.algorithm.generates
        weights = (
            self.queue.weights
            if served == rolled_out
            else await self.workers.publish_weights(version, served)
        )
        parts: list[RolloutPart] = []
        for window in self.embeddings.windows:
            # One window is encoded once for all validations; several are encoded in each of them.
            for missing in self.embeddings.list_missing(window.steps):
                self.embeddings.add(missing, await self.queue.encode(missing.list_prompts()))
            encode = partial(self.embeddings, window.steps.start)
            requests = build_validation_requests(self.ctx, window.list_prompts(), encode, version)
            parts += await self.queue.generate_and_score_all(requests, weights, with_guards=True)
        if served != rolled_out:
            # Back to the copy that rolls out: the engine of this process switches copies when it is
            # told.
            self.queue.weights = await self.workers.publish_weights(version)
        return parts

    def close(self) -> None:
        """Log the timeline, also of a stage that failed: it may show why."""
        self.add_spans()
        # Of a group, one rank alone keeps files; to draw takes a second.
        if self.timeline.spans and self.metrics_logger.keeps_files:
            self.metrics_logger.log_file("timeline.json", self.timeline.encode_json())
            self.metrics_logger.log_file("timeline.png", self.timeline.render_png())

    def add_spans(self) -> None:
        """Add what the workers did to the timeline. Profiles are large and go to the metrics
        logger.
        """
        spans = self.queue.spans
        self.queue.spans = []
        for span in spans:
            # Emptied below: a profile is megabytes, and the timeline keeps all spans of the stage.
            for suffix, content in span.files.items():
                self.metrics_logger.log_file(
                    f"profile/{_format_step(span.step)}/{span.role}-{span.worker}.{suffix}", content
                )
            span.files.clear()
        self.timeline.add_spans(spans)

    async def _log_dump(
        self, version: int, kind: str, rows: Sequence[dict[str, Any]], pngs: AsyncIterator[bytes]
    ) -> None:
        """Log the first samples: images, and a JSON line for each."""
        assert self.ctx.online_config.dumps is not None
        folder = f"dumps/{_format_step(version)}/{kind}"
        lines = ""
        first = iter(rows[: self.ctx.online_config.dumps.samples])
        async for png in pngs:
            row = next(first, None)
            if row is None:
                break
            name = f"{row['prompt_id']}-{row['sample']}.png"
            self.metrics_logger.log_file(f"{folder}/{name}", png)
            lines += json.dumps({"image": name, **row}, ensure_ascii=False, allow_nan=False) + "\n"
        self.metrics_logger.log_file(f"{folder}/samples.jsonl", lines.encode())

    async def _iterate_pngs(self, parts: Sequence[RolloutPart]) -> AsyncIterator[bytes]:
        """The PNG of each sample; the images of a part are fetched when it is their turn."""
        for part in parts:
            # One part at a time, as all images of a step may not fit into the memory of this
            # process.
            for image in await self.workers.fetch_value(part.images):
                for png in encode_pngs(image[None]):
                    yield png


def read_validation_prompts(ctx: StageContext, path: Path) -> list[Prompt]:
    """What the stage validates on: the first prompts of the table's validation split, as many as
    the recipe wants.

    Raises:
        SamplingError: the split is empty.
    """
    config = ctx.online_config.validation
    if config is None:
        return []
    prompts = read_prompts(path, "validation")[: config.prompts]
    if not prompts:
        raise SamplingError(
            "validation needs prompts of the split 'validation' and there are none; set"
            " prompts.validation"
        )
    if len(prompts) < config.prompts:
        warnings.warn(
            f"validation.prompts = {config.prompts} and the split 'validation' has {len(prompts)}:"
            " all are taken",
            stacklevel=2,
        )
    return prompts


def split_validation(prompts: Sequence[Prompt], micro_batch: int) -> list[list[Prompt]]:
    """Split validation prompts into those of each request."""
    return [
        list(prompts[start : start + micro_batch]) for start in range(0, len(prompts), micro_batch)
    ]


def build_validation_requests(
    ctx: StageContext, prompts: Sequence[Prompt], encode: Encode, version: int
) -> list[RolloutRequest]:
    """One sample per prompt with the noise, the sampler and the steps of an evaluation, in requests
    of a micro-batch.

    Their size is that of the stage's rollouts: a validation may be as frequent as it is cheap.
    """
    sampler = ctx.recipe.evaluation.sampler_with_steps
    scored = [*ctx.branch_recipe.rewards, *ctx.branch_recipe.guardrails]
    return [
        RolloutRequest(
            version,
            batch,
            encode(batch),
            np.arange(len(batch)),
            build_evaluation_keys(batch),
            sampler,
            None,
            task="validation",
            with_sound=reads_any(scored, "sounds"),
        )
        for batch in split_validation(prompts, ctx.config.micro_batch)
    ]


def build_sample_rows(parts: Sequence[RolloutPart]) -> list[dict[str, Any]]:
    """Every sample as a JSON object: its keys, what it should show, and its scores; null where
    there is none.
    """
    scores = _join_scores(parts)
    samples = [(part, index) for part in parts for index in range(len(part.request))]
    return [
        _build_sample_row(part, index, scores, row) for row, (part, index) in enumerate(samples)
    ]


def _build_sample_row(
    part: RolloutPart, index: int, scores: ScoreTable, row: int
) -> dict[str, Any]:
    """The sample ``index`` of a part, whose scores are those of ``row``."""
    prompt = part.request.prompts[index]
    keys = part.request.keys
    return {
        "prompt_id": prompt.prompt_id,
        "sample": int(keys.samples[index]),
        "seed": keys.seed,
        "prompt": prompt.prompt,
        "target": prompt.target,
        "policy_version": part.report.version,
        "reward": _number_or_none(scores.reward[row]),
        "scores": {name: _number_or_none(values[row]) for name, values in scores.metrics.items()},
        "failure": scores.failures[row],
    }


def _join_scores(parts: Sequence[RolloutPart]) -> ScoreTable:
    return ScoreTable.concatenate([part.scores for part in parts])


def _build_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    columns = ("prompt_id", "prompt", "target", "reward", "failure")
    return pa.Table.from_pylist(
        [{name: row[name] for name in columns} | row["scores"] for row in rows]
    )


def _number_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _format_step(step: int) -> str:
    return f"step-{step:05d}"
