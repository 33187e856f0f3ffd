"""Samples that were generated again, compared with those that the gate decided from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.schema import KEY
from ebbflow.evaluation.gate_scores import PICTURE_DIGEST, compute_picture_digests
from ebbflow.storage.tables import read_table
from ebbflow.verification import evidence as stored
from ebbflow.verification.version import (
    CheckFailedError,
    RegisteredVersion,
    check_file,
    read_column,
)

EARLIER_COMPRESSION = 6
"""Level of zlib of the pictures that versions from before it was lowered were decided with."""


def compare_pictures(registered: RegisteredVersion, side: str, paths: Mapping[str, Path]) -> str:
    """Compare the pictures of the samples of a side that were drawn again with the stored digests:
    by their pixels, as the level of compression of the files differs between versions.

    Raises:
        CheckFailedError: some differ; it says by how much.
    """
    rows = stored.select_held_out(read_table(paths[side]))
    digests_then = stored.index_by_key(registered.read_scores(side), PICTURE_DIGEST)
    # The rows of an index are in the order of the table, as the digests are.
    digests_now = dict(
        zip(stored.index_by_key(rows, "image"), compute_picture_digests(rows), strict=True)
    )
    other_bytes = [key for key in digests_now if digests_now[key] != digests_then.get(key)]
    if not other_bytes:
        return f"all {len(digests_now)} have the same bytes"
    pictures = stored.index_by_key(rows, "image")
    differing = [
        key
        for key in other_bytes
        if _compute_earlier_digest(pictures[key]) != digests_then.get(key)
    ]
    if not differing:
        return f"all {len(digests_now)} have the same pixels"
    # Only the candidate's pictures are stored.
    distance = ""
    if side == "candidate":
        distance = _measure_picture_difference(registered, rows, differing)
    raise CheckFailedError(f"{len(differing)} of {len(digests_now)} differ{distance}")


def _compute_earlier_digest(picture: bytes) -> str:
    """Compute the sha256 of the file that an earlier version would have made of the same pixels."""
    (file,) = encode_pngs(decode_pngs([picture]), EARLIER_COMPRESSION)
    return hashlib.sha256(file).hexdigest()


def _measure_picture_difference(
    registered: RegisteredVersion, rows: pa.Table, keys: list[tuple[int, int]]
) -> str:
    """Describe by how much the pictures of ``keys`` differ from the stored ones, in grey levels."""
    if stored.TAGS[stored.PICTURES] not in registered.tags:
        return "; by how much is not known: the stored pictures were too large to be kept"
    # A difference from stored pictures that somebody changed would say nothing.
    check_file(registered, stored.PICTURES)
    stored_rows = read_table(registered.find_file(stored.PICTURES), stored.PICTURE_TABLE)
    pictures_then = stored.index_by_key(stored_rows, "image")
    pictures_now = stored.index_by_key(rows, "image")
    # Signed integers: differences of uint8 would wrap around.
    pairs = [decode_pngs([pictures_then[key], pictures_now[key]]).astype(int) for key in keys]
    differences = [np.abs(then - now) for then, now in pairs]
    largest = max(int(difference.max()) for difference in differences)
    average = np.mean([difference.mean() for difference in differences])
    return f": by up to {largest} of 255 in a pixel, by {average:.3g} on average"


def compare_scores(registered: RegisteredVersion, side: str, paths: Mapping[str, Path]) -> str:
    """Compare all scores of the samples of a side that were drawn again with the stored ones.

    Raises:
        CheckFailedError: some differ, or a reward cannot run on this machine.
    """
    by_key = [(name, "ascending") for name in KEY]
    table_then = registered.read_scores(side).sort_by(by_key)
    table_now = stored.select_held_out(read_table(paths[side])).sort_by(by_key)
    names = [field.name for field in table_then.schema if pa.types.is_floating(field.type)]
    missing = [name for name in names if name not in table_now.column_names]
    if missing:
        raise CheckFailedError(f"{', '.join(missing)} cannot be measured here")
    # [columns, samples]
    scores_then = np.stack([read_column(table_then, name) for name in names])
    scores_now = np.stack([read_column(table_now, name) for name in names])
    equal = (scores_then == scores_now) | (np.isnan(scores_then) & np.isnan(scores_now))
    if equal.all():
        return f"all {equal.size} are equal"
    largest = np.nanmax(np.abs(scores_then - scores_now))
    raise CheckFailedError(f"{(~equal).sum()} of {equal.size} differ, by up to {largest:.3g}")
