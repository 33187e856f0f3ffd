"""Labels about pictures that are rendered and not generated: a picture that spells its prompt is
better than one that spells something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ebbflow.data.images import encode_pngs
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.recipe import Recipe
from ebbflow.storage.tables import write_table

HEIGHT = 16
WIDTH = 32
LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"


def draw_text(text: str, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """uint8 RGB [height, width, 3]."""
    return np.repeat(render_text(text, height, width)[..., None], 3, axis=2)


def encode(image: np.ndarray) -> bytes:
    return encode_pngs(image[None])[0]


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), 4)) for _ in range(count)]


def make_answers(count: int, raters: Sequence[str] = ("ann",), seed: int = 0) -> list[dict]:
    """An answer of every rater about each of ``count`` prompts, in the layout of Pick-a-Pic."""
    rng = np.random.default_rng(seed + 1)
    texts = make_texts(count, seed)
    rows = []
    for text, other in zip(texts, texts[1:] + texts[:1], strict=True):
        sides = [encode(draw_text(text)), encode(draw_text(other))]
        flip = bool(rng.integers(2))
        for rater in raters:
            rows.append(
                {
                    "caption": f'"{text}"',
                    "jpg_0": sides[flip],
                    "jpg_1": sides[not flip],
                    "label_0": float(not flip),
                    "label_1": float(flip),
                    "user_id": rater,
                }
            )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(list(rows))
    write_table(path, table.schema, table.to_batches(), {})
    return path


def build_recipe(folder: Path, labels: Path, **keys: Any) -> Recipe:
    """A recipe whose reward model trains in a few seconds."""
    section = {
        "name": "legible",
        "labels": [str(labels)],
        "network": {"name": "glyph_reader"},
        "epochs": 4,
        "lr": 0.003,
        "held_out": 0.4,
    }
    return Recipe.model_validate({"output": str(folder / "runs"), "reward_model": section | keys})
