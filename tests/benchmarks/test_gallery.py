"""The gallery of a run: which pictures it shows, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.gallery import COLUMNS, build_gallery
from ebbflow.data.images import encode_pngs
from ebbflow.plots.images import CAPTION_SIZE, MARGIN, MIN_WIDTH


def evaluation(run: Path, label: str, grey: int, first: int = 0) -> None:
    """Two samples of 9 held-out prompts and one of a validation prompt; the first are ``grey``,
    plus the prompt's number.
    """
    rows = [
        {
            "prompt_id": prompt,
            "sample": sample,
            "split": split,
            "prompt": f'"{prompt}"',
            "target": str(prompt),
            "reward": 0.5,
        }
        | {
            "image": encode_pngs(
                np.full((1, 16, 32, 3), grey + prompt if sample == 0 else 0, np.uint8)
            )[0]
        }
        for prompt, sample, split in [(40, 0, "validation")]
        + [
            (prompt, sample, "held_out")
            for prompt in range(first + 8, first - 1, -1)
            for sample in (1, 0)
        ]
    ]
    folder = run / "nodes" / f"{label.replace(' ', '-')}-evaluation"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "summary.json").write_text(json.dumps({"candidate": "1.2 offline"}))
    evaluation(tmp_path, "before", 100)
    return tmp_path


def test_it_shows_the_first_held_out_prompts_before_above_after(run: Path) -> None:
    evaluation(run, "1.2 offline", 200)
    sheet = np.asarray(build_gallery(run, rows=1))
    middle = MARGIN + 32
    below = MARGIN + 32 + MIN_WIDTH // 2 + MARGIN + CAPTION_SIZE + 6
    centres = [MARGIN + MIN_WIDTH // 2 + column * (MIN_WIDTH + MARGIN) for column in range(COLUMNS)]
    shown = [[int(sheet[y, x, 0]) for x in centres] for y in (middle, below)]
    assert shown == [[100 + prompt for prompt in range(8)], [200 + prompt for prompt in range(8)]]


def test_other_or_too_few_prompts_are_refused(run: Path) -> None:
    evaluation(run, "1.2 offline", 200, first=1)
    with pytest.raises(ValueError, match="before and 1.2 offline were evaluated on other prompts"):
        build_gallery(run, rows=1)
    with pytest.raises(ValueError, match="has 9 held-out prompts, 16 are shown"):
        build_gallery(run, rows=2)
