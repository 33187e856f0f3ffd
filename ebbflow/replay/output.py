"""What a replay leaves behind: a page with the pictures, and a table of the samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa

from ebbflow.data.schema import SAMPLE_KEY
from ebbflow.plots.images import MAX_SHARP_WIDTH, encode_data_uri, open_rgb_image
from ebbflow.plots.pages import create_page_environment
from ebbflow.recipe import Recipe
from ebbflow.storage.tables import write_table
from ebbflow.training.replay import ReplayedStep

PAGE = "index.html"
TABLE = "samples.parquet"


class Statistic(NamedTuple):
    """A metric of the step: None where it was not replayed, or not logged.

    Example::

        Statistic("reward/mean", replayed=0.531, logged=0.531)
        Statistic("grad_norm", replayed=None, logged=0.84)  # the update is not repeated
    """

    name: str
    replayed: float | None
    logged: float | None


class Group(NamedTuple):
    """The samples of a prompt, best first, each with its picture as a URI."""

    prompt: str
    target: str | None
    mean: float | None
    samples: list[tuple[dict[str, Any], str]]


@dataclass(frozen=True)
class Replay:
    """A replayed step, and what the run logged of it.

    Attributes:
        label: of the stage, such as ``1.1 online``.
        logged: metrics by name; empty where MLflow has none of this step.
    """

    run_id: str
    label: str
    step: int
    samples: ReplayedStep
    logged: Mapping[str, float]

    def __str__(self) -> str:
        summary = f"{len(self.samples.rows)} samples of {self.label}, step {self.step}"
        if not self.logged:
            return f"{summary}; the run logged nothing of this step"
        if self.differing:
            return f"{summary}; not what was logged: {', '.join(self.differing)}"
        return f"{summary}, with the statistics that were logged"

    @property
    def statistics(self) -> list[Statistic]:
        names = dict.fromkeys([*self.samples.metrics, *sorted(self.logged)])
        return [
            Statistic(name, self.samples.metrics.get(name), self.logged.get(name)) for name in names
        ]

    @property
    def differing(self) -> list[str]:
        """Statistics whose replayed value is another than the logged one."""
        # Exactly equal: on the same machine a replay repeats every operation of the run.
        return [
            one.name
            for one in self.statistics
            if one.replayed is not None and one.logged is not None and one.replayed != one.logged
        ]


def write_table_of_samples(path: Path, recipe: Recipe, replay: Replay) -> None:
    """Write a row per sample, with its picture, scores, advantage and whether it was trained on."""
    # A dictionary keeps the order of the first row that has each: columns are the same in every
    # run.
    scores = list(dict.fromkeys(name for row in replay.samples.rows for name in row["scores"]))
    schema = pa.schema(
        [
            *SAMPLE_KEY,
            pa.field("seed", pa.int64(), nullable=False),
            pa.field("prompt", pa.string(), nullable=False),
            pa.field("target", pa.string()),
            pa.field("policy_version", pa.int64(), nullable=False),
            pa.field("reward", pa.float64()),
            *(pa.field(name, pa.float64()) for name in scores),
            pa.field("failure", pa.string()),
            pa.field("advantage", pa.float64()),
            pa.field("trained", pa.bool_(), nullable=False),
            pa.field("image", pa.binary(), nullable=False),
        ]
    )
    rows = [
        row | row["scores"] | {"image": png}
        for row, png in zip(replay.samples.rows, replay.samples.pngs, strict=True)
    ]
    # The table's own metadata, so that it explains itself when it is copied.
    metadata = {
        "run_id": replay.run_id,
        "recipe_digest": recipe.digest,
        "stage": replay.label,
        "step": replay.step,
    }
    statistics = {
        "replayed": replay.samples.metrics,
        # The metadata is JSON, which has no NaN.
        "logged": {name: value for name, value in replay.logged.items() if math.isfinite(value)},
    }
    # Rewards may score some prompts only, so a row may lack the columns of others.
    columns = [{name: row.get(name) for name in schema.names} for row in rows]
    table = pa.Table.from_pylist(columns, schema)
    write_table(path, schema, table.to_batches(), metadata | statistics)


def render_page(recipe: Recipe, replay: Replay) -> str:
    """Render one HTML page without references to other files or the network."""
    environment = create_page_environment(Path(__file__).parent)
    environment.filters["number"] = _format_number
    names = list(dict.fromkeys(name for row in replay.samples.rows for name in row["scores"]))
    return environment.get_template("replay.html").render(
        recipe=recipe, replay=replay, groups=_group_by_prompt(replay), scores=names
    )


def _group_by_prompt(replay: Replay) -> list[Group]:
    """Group the samples by prompt: the best prompt first, and its best sample first. What was not
    scored is last. Large pictures are reduced here; the table has them as they are.
    """
    images = map(open_rgb_image, replay.samples.pngs)
    pairs = [
        (row, encode_data_uri(image, image.width <= MAX_SHARP_WIDTH))
        for row, image in zip(replay.samples.rows, images, strict=True)
    ]

    def order_of_sample(pair: tuple[dict[str, Any], str]) -> tuple[int, float, int]:
        row, _ = pair
        return row["prompt_id"], -_or_minus_infinity(row["reward"]), row["sample"]

    pairs.sort(key=order_of_sample)  # groupby joins neighbours only
    groups = []
    for _, members in groupby(pairs, key=lambda pair: pair[0]["prompt_id"]):
        samples = list(members)
        first = samples[0][0]
        scored = [row["reward"] for row, _ in samples if row["reward"] is not None]
        mean = fmean(scored) if scored else None
        groups.append(Group(first["prompt"], first["target"], mean, samples))
    # Sorted is stable: groups with the same mean stay in the order of their prompts.
    return sorted(groups, key=lambda group: -_or_minus_infinity(group.mean))


def _or_minus_infinity(value: float | None) -> float:
    return -math.inf if value is None else value


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
