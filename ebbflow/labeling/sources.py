"""The pairs of pictures that people compare: of two evaluations, or of the rollouts of one
policy."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image

from ebbflow.data.prompts import read_prompts
from ebbflow.offline.shards import LatentLayout, decode_latent, read_layout
from ebbflow.recipe.base import sanitize_text, shorten_value
from ebbflow.run_summary import SUMMARY, SummaryError, read_summary
from ebbflow.seeding import derive_seed, permute_indices
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import (
    TableError,
    read_batches,
    read_column,
    read_schema,
    read_table_metadata,
    write_table,
)

SIDES = ("champion", "candidate")
"""The sides of a comparison, in the order of ``LabelPair.pictures``."""
ROWS_AT_ONCE = 16
"""Rows of a table that are read at once; a row can have megabytes."""

K = TypeVar("K")
Key = tuple[int, int]
"""``(prompt_id, sample)`` of a picture."""


class LabelError(ValueError):
    """Pictures or answers that cannot be used: names the file, what is wrong and the fix."""


@dataclass(frozen=True)
class Picture:
    """A PNG, animated for a video; and the latent that it was decoded from, where the table has
    it."""

    png: bytes
    latent: np.ndarray | None = None


@dataclass(frozen=True)
class LabelPair:
    """Two pictures of one prompt.

    Example:
        Sample 2 of prompt 17, of champion and candidate::

            LabelPair("17-2", "a red fox", (Picture(png=b"..."), Picture(png=b"...")))

    Attributes:
        key: digits and hyphens, the same in every process; it is part of the page's addresses.
        pictures: in a comparison the pictures of the champion and of the candidate, in this order.
    """

    key: str
    prompt: str
    pictures: tuple[Picture, Picture]


@dataclass(frozen=True)
class LabelTask:
    """What people are asked to compare.

    Attributes:
        kind: ``comparison`` of a champion and a candidate, or ``pairs`` of one policy.
        names: names of the policies, in the order of ``SIDES``; one name for ``pairs``.
        files: the files that the pictures come from, by role.
        missing: number of pictures of one side that the other side lacks.
        identical: number of pairs that nobody is asked about, because their pictures are the same.
        is_ordered: every rater sees the pairs in their order, instead of an order of their own.
    """

    kind: Literal["comparison", "pairs"]
    names: tuple[str, ...]
    pairs: tuple[LabelPair, ...]
    files: dict[str, Path]
    missing: int = 0
    identical: int = 0
    is_ordered: bool = False

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """The sha256 of every file, by role."""
        return {role: sha256_of_file(path) for role, path in self.files.items()}


def load_label_task(
    sources: Sequence[Path], stage: str | None, prompts: Path | None, max_pairs: int, seed: int
) -> LabelTask:
    """Return the pairs of what a person named on the command line.

    Args:
        sources: the folder of a run; or a queue (``write_queue``); or the samples of the champion
            and of the candidate (``evaluation_schema``); or, with ``prompts``, rollout shards
            (``rollout_schema``).
        stage: of the run, the offline stage whose rollouts are compared; None: the run's champion
            and candidate.
        prompts: the prompt table of the shards.
        max_pairs: number of pairs; if there are more, ``seed`` chooses.

    Raises:
        LabelError, TableError, PromptError: they cannot be compared.
    """
    if len(sources) == 1 and sources[0].is_dir():
        if stage is not None:
            return load_rollouts(*find_rollouts(sources[0], stage), max_pairs, seed)
        return load_comparison(*find_comparison(sources[0]), max_pairs, seed)
    if stage is not None:
        raise LabelError(f"--stage {stage!r} belongs to the folder of a run; name that folder")
    if prompts is not None:
        return load_rollouts(list(sources), prompts, max_pairs, seed)
    if len(sources) == 1 and "jpg_0" in read_schema(sources[0]).names:
        return load_queue(sources[0], max_pairs)
    if len(sources) != 2:
        raise LabelError(
            f"{len(sources)} sources: name the folder of a run, a queue, the samples of champion"
            " and candidate (in this order), or rollouts with --prompts"
        )
    champion, candidate = sources
    return load_comparison(champion, candidate, max_pairs, seed)


# A queue of pairs.


def write_queue(path: Path, pairs: Sequence[tuple[str, bytes, bytes]]) -> None:
    """Write pairs of pictures for people to compare, the most informative first, in the layout of
    Pick-a-Pic.

    Args:
        pairs: prompt, PNG and PNG.
    """
    captions, first, second = zip(*pairs, strict=True) if pairs else ((), (), ())
    table = pa.table(
        {
            "caption": pa.array(captions, pa.string()),
            "jpg_0": pa.array(first, pa.binary()),
            "jpg_1": pa.array(second, pa.binary()),
            "has_label": pa.array([False for _ in captions], pa.bool_()),
        }
    )
    write_table(path, table.schema, table.to_batches(), {})


def load_queue(path: Path, max_pairs: int) -> LabelTask:
    """Return the first pairs of a queue, in its order.

    Raises:
        LabelError: it has no pair whose pictures differ.
        TableError: it is no queue.
    """
    names = ("caption", "jpg_0", "jpg_1")
    columns = [read_column(path, name).to_pylist()[:max_pairs] for name in names]
    pairs = [
        LabelPair(str(row), prompt, (Picture(first), Picture(second)))
        for row, (prompt, first, second) in enumerate(zip(*columns, strict=True))
    ]
    task = _build_task("pairs", (path.name,), pairs, {"queue": path})
    return replace(task, is_ordered=True)


# What a run left in its folder.


def find_comparison(run: Path) -> tuple[Path, Path]:
    """Return the samples of the champion and of the candidate that the run's gate compared.

    Raises:
        LabelError: the run has no summary, or its samples are not in its folder.
    """
    try:
        summary = read_summary(run / SUMMARY)
        labels = [str(summary[side]) for side in SIDES]
    except SummaryError as error:
        raise LabelError(f"{run}: {error}; name the samples.parquet of two evaluations") from None
    except (OSError, KeyError):
        raise LabelError(
            f"{run}: no summary.json that names champion and candidate; wait until the run has"
            " written its report, or name the samples.parquet of two evaluations"
        ) from None
    # Sorted by age, so that the newest evaluation of a label replaces older ones.
    samples_by_label = {
        str(_read_metadata(path).get("label")): path
        for path in _sort_by_age(run.glob("nodes/*/samples.parquet"))
    }
    missing = [label for label in labels if label not in samples_by_label]
    if missing:
        raise LabelError(
            f"{run}: no samples of {missing[0]!r} below nodes, only of"
            f" {sanitize_text(', '.join(samples_by_label)) or 'nothing'}; name the"
            " samples.parquet of two evaluations"
        )
    return samples_by_label[labels[0]], samples_by_label[labels[1]]


def find_rollouts(run: Path, stage: str) -> tuple[list[Path], Path]:
    """Return the rollout shards of an offline stage, and the run's prompt table.

    Raises:
        LabelError: the run's folder has no such shards, or no prompts.
    """
    shards: dict[str, dict[Any, Path]] = defaultdict(dict)
    for path in _sort_by_age(run.glob("nodes/*/rollouts-*.parquet")):
        metadata = _read_metadata(path)
        shards[str(metadata.get("stage"))][metadata.get("shard")] = path
    prompts = _sort_by_age(run.glob("nodes/*/prompts.parquet"))
    if stage not in shards or not prompts:
        known = ", ".join(map(repr, sorted(shards))) or "none"
        raise LabelError(
            f"{run}: no rollouts of a stage {stage!r} below nodes; offline stages that have some:"
            f" {sanitize_text(known)}"
        )
    return sorted(shards[stage].values(), key=lambda path: path.name), prompts[-1]


def _sort_by_age(paths: Iterable[Path]) -> list[Path]:
    """Return paths with the newest last: a task that was repeated has left several."""
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path))


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        return read_table_metadata(path)
    except TableError:
        return {}


# Tables to pairs.


def load_comparison(champion: Path, candidate: Path, max_pairs: int, seed: int) -> LabelTask:
    """Return a pair for every held-out sample that both evaluations have.

    Raises:
        LabelError: they have none in common, or other prompts or sizes.
        TableError: a file is no evaluation.
    """
    # Both evaluations use the same noise for a (prompt, sample), so pictures of one key differ by
    # the policy alone.
    prompts = [_read_held_out_prompts(path) for path in (champion, candidate)]
    common = sorted(prompts[0].keys() & prompts[1].keys())
    if not common:
        raise LabelError(
            f"{champion} and {candidate} have no held-out sample in common; evaluate both on the"
            " same prompts"
        )
    # Prompt ids are places in a table, and two runs may have different ones.
    for key in common:
        if prompts[0][key] != prompts[1][key]:
            raise LabelError(
                f"{candidate}: prompt_id {key[0]} is another prompt than in {champion}; evaluate"
                " both on the same"
            )
    keys = _choose_pairs(common, max_pairs, seed)
    sides = [_read_pictures([path], set(keys)) for path in (champion, candidate)]
    pairs = [
        LabelPair(_join_numbers(*key), prompts[0][key], (sides[0][key], sides[1][key]))
        for key in keys
    ]
    files = dict(zip(SIDES, (champion, candidate), strict=True))
    names = tuple(
        str(read_table_metadata(path).get("label", path.name)) for path in (champion, candidate)
    )
    return _build_task(
        "comparison", names, pairs, files, missing=len(prompts[0].keys() ^ prompts[1].keys())
    )


def load_rollouts(shards: Sequence[Path], prompts: Path, max_pairs: int, seed: int) -> LabelTask:
    """Return the samples of each prompt in pairs, each sample in one pair at most.

    Raises:
        LabelError: there is no pair, or a sample's prompt is missing.
        TableError, PromptError: a file is no rollout shard, or no prompt table.
    """
    texts = {prompt.prompt_id: prompt.prompt for prompt in read_prompts(prompts)}
    groups: dict[int, list[int]] = defaultdict(list)
    for path in shards:
        for prompt_id, sample in zip(*_read_columns(path, "prompt_id", "sample"), strict=True):
            if prompt_id not in texts:
                raise LabelError(
                    f"{path}: {prompts} has no prompt_id {prompt_id}; name the prompt table of the"
                    " same run"
                )
            groups[prompt_id].append(sample)
    paired = [
        (prompt_id, *pair)
        for prompt_id in sorted(groups)
        for pair in _pair_samples(prompt_id, groups[prompt_id], seed)
    ]
    if not paired:
        raise LabelError(
            f"{shards[0]}: no prompt has two samples; take a stage with group_size of 2 or more"
        )
    chosen = _choose_pairs(paired, max_pairs, seed)
    pictures = _read_pictures(
        shards, {(prompt_id, sample) for prompt_id, *pair in chosen for sample in pair}
    )
    pairs = [
        LabelPair(
            _join_numbers(prompt_id, one, other),
            texts[prompt_id],
            (pictures[prompt_id, one], pictures[prompt_id, other]),
        )
        for prompt_id, one, other in chosen
    ]
    metadata = read_table_metadata(shards[0])
    files = {f"rollouts {number}": path for number, path in enumerate(shards)} | {
        "prompts": prompts
    }
    return _build_task("pairs", (str(metadata.get("stage", shards[0].name)),), pairs, files)


def _build_task(
    kind: Literal["comparison", "pairs"],
    names: tuple[str, ...],
    pairs: list[LabelPair],
    files: dict[str, Path],
    missing: int = 0,
) -> LabelTask:
    # A candidate that was evaluated at another size would show on the page.
    for pair in pairs:
        sizes = [_read_picture_size(picture, pair, files) for picture in pair.pictures]
        if sizes[0] != sizes[1]:
            raise LabelError(
                f"prompt {shorten_value(pair.prompt)}: pictures of {sizes[0]} and {sizes[1]} pixels"
                " would show whose they are; evaluate both at one size"
            )
    # Nobody can prefer one of two equal pictures.
    different = tuple(pair for pair in pairs if pair.pictures[0].png != pair.pictures[1].png)
    if not different:
        raise LabelError(
            f"{', '.join(map(str, files.values()))}: all {len(pairs)} pairs have the same picture"
            " on both sides"
        )
    return LabelTask(kind, names, different, files, missing, len(pairs) - len(different))


def _read_picture_size(
    picture: Picture, pair: LabelPair, files: dict[str, Path]
) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(picture.png), formats=["PNG"]) as image:
            return image.size
    except Exception as error:
        # Every decoder of Pillow has its own errors, and the file may be anything.
        reason = sanitize_text(str(error), 200)
        raise LabelError(
            f"{', '.join(map(str, files.values()))}: pair {pair.key} has a picture that is no PNG"
            f" ({reason}); make it again"
        ) from None


def _read_held_out_prompts(path: Path) -> dict[Key, str]:
    """Return the held-out prompts of an evaluation, by (prompt_id, sample)."""
    columns = zip(*_read_columns(path, "prompt_id", "sample", "split", "prompt"), strict=True)
    return {
        (prompt_id, sample): prompt
        for prompt_id, sample, split, prompt in columns
        if split == "held_out"
    }


def _read_columns(path: Path, *names: str) -> list[list[Any]]:
    if "image" not in read_schema(path).names:
        raise TableError(
            f"{path} has no column 'image'; name the samples of an evaluation, or rollouts with"
            " --prompts"
        )
    return [read_column(path, name).to_pylist() for name in names]


def _read_pictures(paths: Sequence[Path], keys: set[Key]) -> dict[Key, Picture]:
    """Return the pictures with these keys; memory is bounded by them and a few rows."""
    pictures: dict[Key, Picture] = {}
    for path in paths:
        layout = read_layout(path) if "latent" in read_schema(path).names else None
        for batch in read_batches(path, ROWS_AT_ONCE):
            for row, key in enumerate(
                zip(batch["prompt_id"].to_pylist(), batch["sample"].to_pylist(), strict=True)
            ):
                if key in keys:
                    pictures[key] = Picture(
                        batch["image"][row].as_py(), _decode_latent(batch, row, layout)
                    )
    return pictures


def _decode_latent(
    batch: pa.RecordBatch, row: int, layout: LatentLayout | None
) -> np.ndarray | None:
    return decode_latent(layout, batch["latent"][row].as_py()) if layout else None


def _pair_samples(prompt_id: int, samples: list[int], seed: int) -> list[tuple[int, int]]:
    # Shards may come in any order, and the pairs must not depend on it.
    distinct = sorted(set(samples))
    order = [
        distinct[index]
        for index in permute_indices(
            len(distinct), derive_seed(seed, "pairs of a prompt", prompt_id)
        )
    ]
    # An odd sample at the end is in no pair.
    return list(zip(order[::2], order[1::2], strict=False))


def _choose_pairs(keys: Sequence[K], most: int, seed: int) -> list[K]:
    """Return at most ``most`` of the keys, in their order."""
    # Sorted again, so that only the choice depends on the seed; each rater has an order of their
    # own (``Session.order_of_pairs``).
    chosen = sorted(permute_indices(len(keys), derive_seed(seed, "drawn pairs"))[:most])
    return [keys[index] for index in chosen]


def _join_numbers(*numbers: int) -> str:
    return "-".join(map(str, numbers))
