"""``summary.json`` of a run: its numbers for programs, with a digest of themselves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ebbflow.storage.disk import write_text

SUMMARY = "summary.json"
DIGEST = "digest"
"""Key of the sha256 of all others."""


class SummaryError(ValueError):
    """A summary that is not what a run wrote: names the file and the fix."""


def write_summary_file(path: Path, summary: dict[str, Any]) -> None:
    """Write a summary and its digest as JSON."""
    # NaN would be written as a word that JSON does not have and other parsers refuse.
    digest = _hash_summary(summary)
    write_text(path, json.dumps(summary | {DIGEST: digest}, indent=2, allow_nan=False) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        SummaryError: it is not what ``write_summary_file`` wrote.
        OSError: it cannot be read.
    """
    try:
        summary = json.loads(path.read_bytes())
        is_whole = summary.pop(DIGEST) == _hash_summary(summary)
    except KeyError:
        raise SummaryError(
            f"{path.name} has no digest, as one of an earlier version of Ebbflow"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise SummaryError(f"{path.name} was changed after the run had written it")
    return dict(summary)


def _hash_summary(summary: dict[str, Any]) -> str:
    text = json.dumps(summary, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
