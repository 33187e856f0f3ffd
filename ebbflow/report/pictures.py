"""The pictures of the report: the first prompts under every policy, and the prompts whose reward
changed most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from markupsafe import Markup

from ebbflow.data.sounds import decode_wavs, read_sound
from ebbflow.formatting import format_difference, format_number
from ebbflow.plots import charts
from ebbflow.plots.images import MAX_SHARP_WIDTH, encode_data_uri, open_rgb_image
from ebbflow.plots.sounds import draw_waveform, encode_wav_uri

MAX_PROMPTS = 16
MAX_CHANGES = 6
"""Prompts that rose most, and as many that fell most."""
MAX_PREVIEW_WIDTH = 320
HELD_OUT = ("split", "==", "held_out")


class Cell(NamedTuple):
    """One picture.

    Attributes:
        preview, full: URIs of the picture as the page shows it, and at its size; None where only
            the preview is embedded.
        exact: whether it matches the target exactly; None if that was not measured.
        scores: (name, value) of all metrics of the sample.
        waveform: SVG of the loudness of its sound over time; empty without sound.
        sound: URI of the sound as WAV; None where only the waveform is embedded.
    """

    evaluation: str
    preview: str
    full: str | None
    width: int
    height: int
    exact: bool | None
    reward: str
    scores: list[tuple[str, str]]
    waveform: Markup = Markup("")
    sound: str | None = None

    @property
    def sharp(self) -> bool:
        return self.width <= MAX_SHARP_WIDTH


class Row(NamedTuple):
    """One prompt with its pictures.

    Attributes:
        cells: one per evaluation of the grid; None if it lacks this sample.
        change: how much the prompt's reward changed, where rows are sorted by that.
    """

    prompt: str
    target: str | None
    cells: list[Cell | None]
    change: str = ""


LabelledSamples = Sequence[tuple[str, Path]]
"""Labels of evaluations, each with the Parquet file of its samples."""


def build_first_rows(
    pictured: LabelledSamples,
    metrics: Sequence[str],
    at_size: Collection[str],
    prompts: Collection[int] | None = None,
) -> list[Row]:
    """Build rows of the first held-out prompts, not the best ones, with every policy's picture from
    the same noise.

    Args:
        metrics: of a sample, those that stand beside its enlarged picture.
        at_size: labels of the evaluations whose pictures are embedded at their size; the page must
            stay small enough to open.
        prompts: the ids among which the first are taken; default: all.
    """
    first = None if prompts is None else sorted(prompts)[:MAX_PROMPTS]
    sides = [_read_first_samples(path, first) for _, path in pictured]
    labels = [label for label, _ in pictured]
    # By id, so that a prompt keeps its place in the reports of other runs.
    ids = sorted({prompt for side in sides for prompt in side})[:MAX_PROMPTS]
    return [
        _build_row([side.get(prompt) for side in sides], labels, metrics, at_size) for prompt in ids
    ]


def build_changed_rows(
    before: Path, after: Path, labels: tuple[str, str], metrics: Sequence[str]
) -> tuple[list[Row], list[Row]]:
    """Build rows of the held-out prompts whose reward fell most and rose most, each with its
    pictures before and after.

    By the first sample of each prompt, which is the one in the pictures.
    """
    rewards_before = _read_first_rewards(before)
    rewards_after = _read_first_rewards(after)
    changes = {
        prompt: rewards_after[prompt] - rewards_before[prompt]
        for prompt in rewards_before
        if prompt in rewards_after
    }
    # Equal changes are in the order of the prompts, so the page is the same in every run.
    ranked = sorted(changes, key=lambda prompt: (changes[prompt], prompt))
    fell = [prompt for prompt in ranked[:MAX_CHANGES] if changes[prompt] < 0]
    rose = [prompt for prompt in ranked[: -MAX_CHANGES - 1 : -1] if changes[prompt] > 0]
    sides = [_read_first_samples(path, {*fell, *rose}) for path in (before, after)]

    def build_row(prompt: int) -> Row:
        row = _build_row([side.get(prompt) for side in sides], labels, metrics, labels)
        return row._replace(change=format_difference(changes[prompt]))

    return [build_row(prompt) for prompt in fell], [build_row(prompt) for prompt in rose]


def _read_first_numbers(path: Path) -> dict[int, int]:
    """Read the number of the first held-out sample of each prompt."""
    keys = pq.read_table(path, columns=["prompt_id", "sample"], filters=[HELD_OUT])
    table = keys.group_by("prompt_id").aggregate([("sample", "min")])
    return dict(zip(table["prompt_id"].to_pylist(), table["sample_min"].to_pylist(), strict=True))


def _read_first_samples(
    path: Path, prompts: Collection[int] | None = None
) -> dict[int, dict[str, Any]]:
    """Read the first held-out sample of these or of the first prompts, and no others: their
    pictures can be gigabytes.
    """
    first = _read_first_numbers(path)
    ids = sorted(first)[:MAX_PROMPTS] if prompts is None else sorted(first.keys() & set(prompts))
    if not ids:
        return {}  # pyarrow cannot tell the type of an empty list in a filter
    rows = pq.read_table(path, filters=[HELD_OUT, ("prompt_id", "in", ids)]).to_pylist()
    return {row["prompt_id"]: row for row in rows if row["sample"] == first[row["prompt_id"]]}


def _read_first_rewards(path: Path) -> dict[int, float]:
    """Read the reward of the first held-out sample of each prompt that has one."""
    first = _read_first_numbers(path)
    rows = pq.read_table(
        path, columns=["prompt_id", "sample", "reward"], filters=[HELD_OUT]
    ).to_pylist()
    # A failed score is null or NaN, never 0.
    scored = (row for row in rows if row["reward"] is not None and math.isfinite(row["reward"]))
    return {
        row["prompt_id"]: row["reward"]
        for row in scored
        if row["sample"] == first[row["prompt_id"]]
    }


def _build_row(
    samples: Sequence[dict[str, Any] | None],
    labels: Sequence[str],
    metrics: Sequence[str],
    at_size: Collection[str],
) -> Row:
    # An evaluation may lack a prompt, so the text comes from any side that has it.
    first = next(sample for sample in samples if sample is not None)
    cells = [
        _build_cell(sample, label, metrics, label in at_size) if sample else None
        for sample, label in zip(samples, labels, strict=True)
    ]
    return Row(first["prompt"], first["target"], cells)


def _build_cell(sample: dict[str, Any], label: str, metrics: Sequence[str], at_size: bool) -> Cell:
    # Small pictures are embedded as they are; large ones as a JPEG preview, and those that the gate
    # compared at their size as well.
    image = open_rgb_image(sample["image"])
    sharp = image.width <= MAX_SHARP_WIDTH
    exact = sample.get("exact_match")
    preview = encode_data_uri(image, sharp, MAX_PREVIEW_WIDTH)
    full: str | None = None
    if image.width <= MAX_PREVIEW_WIDTH:
        full = preview
    elif at_size:
        full = encode_data_uri(image, False, image.width, quality=90)
    wav = read_sound(sample["image"])
    return Cell(
        waveform=draw_waveform(decode_wavs([wav])) if wav else Markup(""),
        # As the pictures: sounds at their length would make the page too large to open.
        sound=encode_wav_uri(wav) if wav and at_size else None,
        evaluation=label,
        preview=preview,
        full=full,
        width=image.width,
        height=image.height,
        exact=None if exact is None else exact >= 1,
        reward="not scored" if sample["reward"] is None else format_number(sample["reward"]),
        scores=[
            (charts.format_metric_name(metric), format_number(sample.get(metric)))
            for metric in metrics
        ],
    )
