"""Prompt tables: made of random strings or of a file's rows, split by text, kept as Parquet
(``ebbflow.data.schema.PROMPTS``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.schema import PROMPTS, SPLITS
from ebbflow.data.twins import group_twins, hash_input
from ebbflow.recipe.base import shorten_value
from ebbflow.recipe.model import CHARACTERS
from ebbflow.storage.tables import TableError, read_columns, read_table, write_table

LEFT_OUT = "left_out"
"""Of rows that exceed the number to hold out or to validate, and equal one that is."""


class PromptError(ValueError):
    """Prompts that cannot be used: names the file, the line, the value and the fix."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt table.

    Example:
        >>> Prompt(
        ...     prompt_id=17,
        ...     prompt='a sign that says "OPEN"',
        ...     negative_prompt="blurry",
        ...     target="OPEN",
        ...     source="signs.txt",
        ...     split="train",
        ...     metadata="{}",
        ... )
    """

    prompt_id: int
    prompt: str
    negative_prompt: str
    target: str | None
    source: str
    split: str
    metadata: str
    image: bytes | None = field(default=None, repr=False)
    """PNG of the image to edit, for image-to-image models; of several, one file after another."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt before it has an id and a split.

    Example:
        >>> PromptRow('a sign that says "OPEN"', target="OPEN", source="signs.txt")
    """

    prompt: str
    negative_prompt: str = ""
    target: str | None = None
    source: str = ""
    metadata: str = "{}"
    """Further columns of the source, as a JSON object with sorted keys."""
    image: bytes | None = field(default=None, repr=False)
    """PNG of the image to edit, for image-to-image models; of several, one file after another."""
    location: str = field(default="", repr=False, compare=False)
    """File and line, for errors."""


def make_glyph_prompts(
    count: int, letters: int, seed: int, alphabets: Sequence[str] = (CHARACTERS["capitals"],)
) -> list[PromptRow]:
    """``count`` different random strings of ``letters`` letters, each as a quoted prompt with
    itself as the target.

    Args:
        alphabets: of ``CHARACTERS``; as many strings of each, up to one.

    Raises:
        PromptError: there are not that many strings, or a number is below one.
    """
    if count < 1 or letters < 1:
        raise PromptError(f"count = {count}, letters = {letters}: both must be at least 1")
    # Raw random numbers: the bits of Philox are fixed, numpy's distributions on top may change.
    stream = np.random.Philox(key=seed)
    # As even as possible: 10 of 3 alphabets are 4, 3 and 3.
    counts = [len(range(index, count, len(alphabets))) for index in range(len(alphabets))]
    texts = [
        text
        for alphabet, share in zip(alphabets, counts, strict=True)
        for text in _generate_strings(stream, alphabet, share, letters)
    ]
    return [PromptRow(prompt=f'"{text}"', target=text, source="glyph") for text in texts]


def _generate_strings(
    stream: np.random.Philox, alphabet: str, count: int, letters: int
) -> list[str]:
    """``count`` different strings of one alphabet, which is a run of ASCII."""
    num_strings = len(alphabet) ** letters
    if count > num_strings:
        raise PromptError(
            f"there are only {num_strings} strings of {letters} letters"
            f" {alphabet[0]}-{alphabet[-1]}, not {count}; lower count or raise letters"
        )
    # A dictionary is a set that keeps its order, on which the ids of the prompts depend.
    texts: dict[str, None] = {}
    while len(texts) < count:
        indices = stream.random_raw((count, letters)) % len(alphabet)
        codes = (indices + ord(alphabet[0])).astype(np.uint8)
        texts |= dict.fromkeys(row.tobytes().decode("ascii") for row in codes)
    return list(texts)[:count]


def split_prompts(
    rows: Sequence[PromptRow], validation: int, held_out: int, seed: int | None = None
) -> pa.Table:
    """Build the prompt table: the id of a row is its position, and its text decides its split.

    The rows with the smallest hashes of what the model gets (``twins.hash_input``) are held out,
    the next ones validate. A threshold alone would hold out a random number of prompts. This one
    moves by a row when a held-out row is deleted, and the row that is then held out validated
    before: it was not trained on. Any other row keeps its split. Rows with equal hashes are on one
    side; those that exceed the number to hold out, or to validate, are left out of the table.

    Args:
        seed: of random strings, which are distinct and another list in every run: a permutation of
            their positions decides instead.

    Raises:
        PromptError: nothing would be left to train on.
    """
    if seed is None:
        groups = deque(group_twins(rows))
    else:
        order = [[index] for index in _permute_indices(len(rows), seed).tolist()]
        end = validation + held_out
        groups = deque(order[validation:end] + order[:validation] + order[end:])
    splits = ["train"] * len(rows)
    for split, size in (("held_out", held_out), ("validation", validation)):
        num_missing = size
        while num_missing > 0 and groups:
            twins = groups.popleft()
            for index in twins[:num_missing]:
                splits[index] = split
            for index in twins[num_missing:]:
                splits[index] = LEFT_OUT
            num_missing -= len(twins)
    if not groups:
        raise PromptError(
            f"{format_count(len(rows), 'prompt')} cannot be split into validation = {validation},"
            f" held_out = {held_out} and at least one for training, with those of the same text on"
            " one side; add prompts or lower one of the two"
        )
    return pa.Table.from_pylist(
        [
            {"prompt_id": index, "split": splits[index], **vars(row)}
            for index, row in enumerate(rows)
            if splits[index] != LEFT_OUT
        ],
        schema=PROMPTS,
    )


def split_with_held_out(
    rows: Sequence[PromptRow],
    judged: Sequence[PromptRow],
    validation: int,
    held_out: int,
    seed: int | None = None,
) -> tuple[pa.Table, int]:
    """The prompt table whose held-out prompts are ``held_out`` of ``judged``, and how many of
    ``rows`` are left out for that.

    What equals one of ``judged`` (``twins.hash_input``) is left out. The id of a held-out prompt is
    its place in ``judged``, so that its noise is the same whatever the run trains on; the others
    are numbered from there. A choice of ``judged`` is the same in every run.

    Raises:
        PromptError: ``judged`` has too few prompts, or nothing would be left to train on.
    """
    if held_out > len(judged):
        raise PromptError(
            f"prompts.held_out_source has {format_count(len(judged), 'prompt')}; lower"
            f" prompts.held_out = {held_out}"
        )
    judged_hashes = {hash_input(row) for row in judged}
    remaining_rows = [row for row in rows if hash_input(row) not in judged_hashes]
    others = split_prompts(remaining_rows, validation, 0, seed).to_pylist()
    # By hash, not by the run's seed: champion and challenger are judged by the same choice.
    by_hash = [index for group in group_twins(judged) for index in group]
    chosen = sorted(by_hash[:held_out])
    table = [{"prompt_id": index, "split": "held_out", **vars(judged[index])} for index in chosen]
    table += [row | {"prompt_id": len(judged) + row["prompt_id"]} for row in others]
    return pa.Table.from_pylist(table, schema=PROMPTS), len(rows) - len(remaining_rows)


def _permute_indices(count: int, seed: int) -> np.ndarray:
    """A seeded permutation: raw random numbers, sorted. The bit stream of Philox is fixed, numpy's
    own permutation may change.
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


def write_prompts(table: pa.Table, path: str | Path) -> None:
    """Write a prompt table as Parquet, whole or not at all.

    Raises:
        PromptError: the table does not have the schema ``PROMPTS``.
    """
    if not table.schema.equals(PROMPTS):
        raise PromptError(
            f"{path}: not written, its columns are\n{table.schema}\nMake prompt tables with"
            " split_prompts"
        )
    write_table(
        Path(path), PROMPTS, table.to_batches(), {"splits": Counter(table["split"].to_pylist())}
    )


def read_prompts(
    path: str | Path, split: str | None = None, ids: Iterable[int] | None = None
) -> list[Prompt]:
    """The prompts of a table written by ``write_prompts``, in order of their ids; of one split, or
    of all.

    Args:
        ids: only those with these ids, as far as there are any; a shard needs few of many.

    Raises:
        PromptError: there is no such split, or the file is not a prompt table.
    """
    table = _read_split(path, split)
    if ids is not None:
        table = table.filter(pc.is_in(table["prompt_id"], pa.array(list(ids), pa.int64())))
    return sorted((Prompt(**row) for row in table.to_pylist()), key=lambda prompt: prompt.prompt_id)


def read_prompt_ids(path: str | Path, split: str | None = None) -> list[int]:
    """The ids of ``read_prompts``, ascending.

    Raises:
        PromptError: as of ``read_prompts``.
    """
    return sorted(_read_split(path, split, ["prompt_id", "split"])["prompt_id"].to_pylist())


def read_prompt_sources(path: str | Path, split: str | None = None) -> list[str]:
    """The sources of ``read_prompts``, in its order.

    Raises:
        PromptError: as of ``read_prompts``.
    """
    table = _read_split(path, split, ["prompt_id", "split", "source"])
    sources: list[str] = table.sort_by("prompt_id")["source"].to_pylist()
    return sources


def _read_split(
    path: str | Path, split: str | None, columns: Sequence[str] | None = None
) -> pa.Table:
    if split is not None and split not in SPLITS:
        raise PromptError(f"there is no split {split!r}; use one of {', '.join(SPLITS)}")
    # Ids alone are read without the images to edit, which may be gigabytes.
    try:
        table = read_columns(Path(path), columns) if columns else read_table(Path(path), PROMPTS)
    except TableError as error:
        raise PromptError(
            f"{error}\nMake prompt tables with split_prompts and write_prompts"
        ) from None
    return table if split is None else table.filter(pc.equal(table["split"], split))


def check_targets(rows: Sequence[Prompt | PromptRow] | pa.Table, file: str | Path) -> None:
    """Check that every prompt names the text that its image should show, which rewards with OCR
    compare.

    Raises:
        PromptError: with the count and the first prompts that do not.
    """
    # Rows are dataclasses, whose vars are the columns of the table.
    prompts = rows.to_pylist() if isinstance(rows, pa.Table) else map(vars, rows)
    missing = [row["prompt"] for row in prompts if row["target"] is None]
    if missing:
        first_prompts = "; ".join(shorten_value(prompt) for prompt in missing[:3])
        raise PromptError(
            f"{file}: {len(missing)} of {len(rows)} prompts name no text to read, first:"
            f" {first_prompts}. Quote the text, add a column 'target', or use rewards that do not"
            " read"
        )


def format_count(number: int, noun: str) -> str:
    """``"1 prompt"``, ``"2 prompts"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
