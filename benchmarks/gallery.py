"""Pictures of a run before and after: ``python -m benchmarks.gallery runs/glyph-1a2b3c4d [--output
docs/gallery.png]``.

The first held-out prompts in the order of the table, so nobody chose them: a row before training,
below it the row of the candidate, from the same noise. Under each picture are the target and the
score that was trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from ebbflow.plots.images import build_image_grid, format_caption

ROOT = Path(__file__).parents[1]
COLUMNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a local run that is finished")
    parser.add_argument("--rows", type=int, default=2, help="pairs of rows")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gallery.png")
    arguments = parser.parse_args()
    build_gallery(arguments.run, arguments.rows).save(arguments.output, optimize=True)
    print(arguments.output)


def build_gallery(run: Path, rows: int) -> Image.Image:
    """The pictures of a run's folder, ``rows`` times two rows of them.

    Raises:
        ValueError: the candidate has fewer held-out prompts, or other ones than the policy before
            training.
    """
    # the candidate of the gate, which need not be the last policy
    candidate = json.loads((run / "summary.json").read_text())["candidate"]
    before = _load_first_samples(run, "before", rows * COLUMNS)
    after = _load_first_samples(run, candidate, rows * COLUMNS)
    if [sample["prompt"] for sample in before] != [sample["prompt"] for sample in after]:
        raise ValueError(
            f"{run}: before and {candidate} were evaluated on other prompts; name the folder of a"
            " whole run"
        )
    # Rows of the grid: COLUMNS pictures before, below them the same prompts after.
    labelled_samples: list[tuple[str, Mapping[str, Any]]] = []
    for start in range(0, len(before), COLUMNS):
        for label, samples in (("before", before), ("after", after)):
            labelled_samples += [(label, sample) for sample in samples[start : start + COLUMNS]]
    return build_image_grid(
        [sample["image"] for _, sample in labelled_samples],
        [f"{label}: {format_caption(sample)}" for label, sample in labelled_samples],
        COLUMNS,
    )


def _load_first_samples(run: Path, label: str, count: int) -> list[dict[str, Any]]:
    """The first sample of each of the first held-out prompts, of the evaluation with this label."""
    path = run / "nodes" / f"{label.replace(' ', '-')}-evaluation" / "samples.parquet"
    # sample 0: prompts may have several, and the same noise made this one before and after
    filters = [("split", "==", "held_out"), ("sample", "==", 0)]
    table = pq.read_table(
        path, columns=["prompt_id", "prompt", "target", "image", "reward"], filters=filters
    )
    if table.num_rows < count:
        raise ValueError(
            f"{path} has {table.num_rows} held-out prompts, {count} are shown; pass fewer --rows"
        )
    return table.sort_by("prompt_id").slice(0, count).to_pylist()


if __name__ == "__main__":
    main()
