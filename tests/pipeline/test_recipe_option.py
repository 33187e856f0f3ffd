"""``pyflyte run``: its help is a page, and a run without a recipe says which one to take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.forked import run_forked
from tests.pipeline.conftest import ROOT

RUN = [
    str(Path(sys.executable).with_name("pyflyte")),
    "run",
    "workflows/post_training.py",
    "post_train",
]


def words(*arguments: str) -> tuple[int, list[str], str]:
    """(exit status, lines, all words without the frames of boxes)."""
    done = run_forked(
        [*RUN, *arguments], cwd=ROOT, env=os.environ | {"COLUMNS": "100"}, timeout=900
    )
    text = done.stdout + done.stderr
    return done.returncode, text.splitlines(), " ".join(text.replace("│", " ").split())


def test_help_is_a_page() -> None:
    status, lines, text = words("--help")
    assert status == 0
    assert len(lines) < 60
    assert "Post-train a model by a recipe" in text
    assert "A YAML file such as workflows/recipes/glyph.yaml" in text
    assert "ebbflow keys" in text


def test_a_run_without_a_recipe_names_one() -> None:
    status, _, text = words()
    assert status != 0
    assert "Missing option '--recipe'" in text
    assert "--recipe workflows/recipes/glyph.yaml" in text
