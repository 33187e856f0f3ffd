"""What is watched and kept of an online stage beside its training, which it does not change."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import setitem
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ebbflow.data.images import encode_png
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import SamplingError
from ebbflow.evaluation.evaluate import evaluation_keys, means
from ebbflow.models.encoding import Embeddings
from ebbflow.online.ahead import Ahead, Harvest, Step, lead
from ebbflow.online.placement import Placement
from ebbflow.online.timeline import Timeline
from ebbflow.online.work import Busy, Part
from ebbflow.plots.images import PICTURED, caption, image_grid
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rewards.combine import ScoreTable
from ebbflow.stage import MetricsLogger, StageContext


class Observer:
    """Watches a stage, and tells its recorder.

    Attributes:
        timeline: what the workers did so far.
        score: mean reward of the policy as it is, where it was just validated.
    """

    def __init__(
        self,
        ctx: StageContext,
        placement: Placement,
        ahead: Ahead,
        metrics_logger: MetricsLogger,
        prompts: Sequence[Prompt],
        embeddings: Embeddings | None,
    ) -> None:
        """``prompts``: what is validated on; ``embeddings``: theirs, where there are any."""
        self.ctx, self.placement, self.ahead, self.metrics_logger = ctx, placement, ahead, metrics_logger
        self.prompts, self.embeddings = prompts, embeddings
        self.timeline = Timeline(ctx.online.resources)
        self.score: float | None = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the timeline, of a stage that failed too: it may show why."""
        self._add(())
        if self.timeline.busy:
            self.metrics_logger.log_file("timeline.json", self.timeline.table())
            self.metrics_logger.log_file("timeline.png", self.timeline.picture())

    def after(
        self, number: int, step: Step, advantages: np.ndarray, busy: Sequence[Busy], start: float, end: float
    ) -> dict[str, float]:
        """Take note of the training step ``number``, from ``start`` to ``end``; gives the utilisation of the workers.

        Workers say what they did when it is done, so this is the utilisation of the last step in whose time nothing of what
        is still under way was done.

        Args:
            step: what was trained on.
            advantages: of its samples.
            busy: what training did.
        """
        config, ahead = self.ctx.online, lead(self.ctx.online)
        self.timeline.steps[number] = (start, end)
        self._add(busy)
        if config.dumps and number % config.dumps.every == 0:
            rows = [row | {"advantage": _number(value)} for row, value in zip(sample_rows(step.rows), advantages, strict=True)]
            self._dump(number, "rollouts", rows, self._pictures(step.rows))
        return self.timeline.utilisation(number - ahead, ahead)

    def validates(self, version: int, last: bool = False) -> bool:
        """Whether there is a validation after so many training steps, ``last``: when the stage is over."""
        config = self.ctx.online.validation
        return config is not None and (version % config.every == 0 or last) and len(self.prompts) > 0

    def validate(self, version: int, last: bool = False) -> float:
        """Where it is time to: sample and score the validation prompts, with the weights that would be served now.

        Seconds that it took. The rollouts of later steps go on with the weights that are there for them.
        """
        self.score = None
        if not self.validates(version, last):
            return 0.0
        start = time.time()
        harvest = self._harvest(version)
        rows, scores, pngs = sample_rows(harvest), _scores(harvest), list(self._pictures(harvest))
        found = means(scores)
        self.score = found.get("reward")
        found |= {"scored_share": 1 - scores.failed_share}
        self.metrics_logger.log_metrics({f"validation/{name}": value for name, value in found.items()}, version)
        self.metrics_logger.log_table(f"validation/{_named(version)}", _table(rows))
        grid = image_grid(pngs[:PICTURED], [caption(row) for row in rows[:PICTURED]], columns=4)
        self.metrics_logger.log_image("validation", grid, version)
        if self.ctx.online.dumps:
            self._dump(version, "validation", rows, pngs)
        return time.time() - start

    def _harvest(self, version: int) -> list[Harvest]:
        """The validation samples and their scores, guardrails included, by the stage's own workers."""
        served = "ema" if self.ctx.recipe.policy.ema else "current"
        generates = self.ctx.algorithm.generates
        weights = self.ahead.newest if served == generates else self.placement.publish(version, served)
        assert self.embeddings is not None
        parts = validation_parts(self.ctx, self.prompts, self.embeddings, version)
        found: dict[int, Harvest] = {}
        for index, part in enumerate(parts):
            self.ahead.sample(part, lambda: weights, partial(setitem, found, index), guardrails=True)
        self.ahead.desk.until(lambda: len(found) == len(parts))
        if served != generates:
            self.ahead.newest = self.placement.publish(version)
        return [found[index] for index in range(len(parts))]

    def _dump(self, number: int, kind: str, rows: Sequence[dict[str, Any]], pngs: Iterable[bytes]) -> None:
        """Keep the first samples: images, and a JSON line for each."""
        assert self.ctx.online.dumps is not None
        folder, lines = f"dumps/{_named(number)}/{kind}", ""
        for row, png in zip(rows[: self.ctx.online.dumps.samples], pngs, strict=False):
            name = f"{row['prompt_id']}-{row['sample']}.png"
            self.metrics_logger.log_file(f"{folder}/{name}", png)
            lines += json.dumps({"image": name, **row}, ensure_ascii=False, allow_nan=False) + "\n"
        self.metrics_logger.log_file(f"{folder}/samples.jsonl", lines.encode())

    def _pictures(self, harvest: Sequence[Harvest]) -> Iterator[bytes]:
        """The PNG of each sample; images are brought here when their turn comes."""
        for one in harvest:
            for picture in self.placement.fetch(one.images):
                yield from encode_png(picture[None])

    def _add(self, busy: Sequence[Busy]) -> None:
        """Note what the workers did; profiles go to the recorder, for they are large."""
        told, self.ahead.busy = [*self.ahead.busy, *busy], []
        for one in told:
            for ending, content in one.files.items():
                self.metrics_logger.log_file(f"profile/{_named(one.step)}/{one.role}-{one.worker}.{ending}", content)
            one.files.clear()
        self.timeline.add(told)


def validation_prompts(ctx: StageContext, path: Path) -> list[Prompt]:
    """What the stage validates on: the first prompts of the table's validation split, as many as the recipe wants.

    Raises:
        SamplingError: the split is empty.
    """
    config = ctx.online.validation
    if config is None:
        return []
    prompts = read_prompts(path, "validation")[: config.prompts]
    if not prompts:
        raise SamplingError("validation needs prompts of the split 'validation' and there are none; set prompts.validation")
    if len(prompts) < config.prompts:
        warnings.warn(
            f"validation.prompts = {config.prompts} and the split 'validation' has {len(prompts)}: all are taken", stacklevel=2
        )
    return prompts


def validation_parts(ctx: StageContext, prompts: Sequence[Prompt], embeddings: Embeddings, version: int) -> list[Part]:
    """One sample a prompt with the noise, the sampler and the steps of an evaluation, a micro-batch each."""
    sampler, size = SamplerConfig(name="ode", steps=ctx.recipe.evaluation.steps), ctx.config.micro_batch
    batches = [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    return [
        Part(version, batch, embeddings(batch), np.arange(len(batch)), evaluation_keys(batch), sampler, None, task="validation")
        for batch in batches
    ]


def sample_rows(harvest: Sequence[Harvest]) -> list[dict[str, Any]]:
    """Every sample as a JSON object: its keys, what it should show, and its scores; null where there is none."""
    scores = _scores(harvest)
    samples = [(one, index) for one in harvest for index in range(len(one.part))]
    return [_row(one, index, scores, row) for row, (one, index) in enumerate(samples)]


def _row(one: Harvest, index: int, scores: ScoreTable, row: int) -> dict[str, Any]:
    """The sample ``index`` of a part, whose scores are those of ``row``."""
    prompt, keys = one.part.prompts[index], one.part.keys
    return {
        "prompt_id": prompt.prompt_id,
        "sample": int(keys.samples[index]),
        "seed": keys.seed,
        "prompt": prompt.prompt,
        "target": prompt.target,
        "policy_version": one.generated.version,
        "reward": _number(scores.reward[row]),
        "scores": {name: _number(values[row]) for name, values in scores.metrics.items()},
        "failure": scores.failures[row],
    }


def _scores(harvest: Sequence[Harvest]) -> ScoreTable:
    return ScoreTable.cat([one.scores for one in harvest])


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    shown = ("prompt_id", "prompt", "target", "reward", "failure")
    return pa.Table.from_pylist([{name: row[name] for name in shown} | row["scores"] for row in rows])


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _named(step: int) -> str:
    return f"step-{step:05d}"
