"""Files and folders of labels, which tasks of reward models read."""

from __future__ import annotations

from pathlib import Path

from tasks.files import fetch_folder, fetch_prompt_file


def fetch_labels(source: str) -> str:
    """Fetch the local copy of a file, or of a folder, of labels."""
    # Only files of labels have one of these endings (``ebbflow.data.labels``).
    # A URI does not tell a folder from a file.
    is_file = Path(source).suffix.lower() in (".parquet", ".jsonl", ".json")
    return str(fetch_prompt_file(source) if is_file else fetch_folder(source))
