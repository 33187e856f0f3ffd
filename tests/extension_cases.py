"""The extensions that docs/extending.md shows, by their paths."""

from __future__ import annotations

from pathlib import Path

from ebbflow.recipe.model import ModelConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOC = (ROOT / "docs" / "extending.md").read_text()
REINFORCE = {"name": "custom", "path": "mine.reinforce:ALGORITHM"}
CONTRAST = "mine.contrast:Contrast"
SHIFTED = "mine.shifted:ShiftedGlyph"
FADING = "mine.fading:FADING"
COPY = "mine.second_copy:SecondCopy"
SOUP = "mine.soup:average_with_base"
MODEL = ModelConfig(family=SHIFTED, path="base")
