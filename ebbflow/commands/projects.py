"""``ebbflow init``: a folder to start from."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import click

from ebbflow.commands.options import OutputPath

RECIPE = """\
# ebbflow check {folder}/recipe.yaml
# ebbflow run {folder}/recipe.yaml
name: "{name}"
# Without a path, the run first trains a small model that draws words, without a download.
# A model of Hugging Face: {{family: sd3, path: OWNER/NAME, revision: COMMIT}} (docs/models.md).
model:
  training: {{steps: 100, batch: 16}}
prompts: {{source: prompts.txt, validation: 8, held_out: 24}}
rewards:
  - similarity
  - {{name: "my_rewards:score_contrast", weight: 0.5}}
stages:
  # A few steps, to see the whole pipeline; `ebbflow keys` explains every key.
  - kind: online
    steps: 4
    prompts_per_step: 2
    group_size: 4
    micro_batch: 8
promotion: {{model_name: "{name}"}}
"""
REWARD = '''\
"""A reward of one's own: a function of images and prompts, named in recipe.yaml."""

import numpy as np


def score_contrast(images, prompts):
    """Score N images, uint8 RGB [N, height, width, 3], of N prompts: 0 for one grey, 1 for half
    black and half white.
    """
    return images.mean(-1).std((1, 2)) / 127.5
'''
TEST = '''\
"""Run with: pytest {folder}"""

import numpy as np
from my_rewards import score_contrast


def test_images_with_contrast_score_higher():
    images = np.zeros((2, 16, 16, 3), np.uint8)
    images[1, :8] = 255
    grey, striped = score_contrast(images, ["a", "b"])
    assert (grey, striped) == (0, 1)
'''
WORDS = "ebbflow:datasets/words4/prompts.txt"
EVERY = 10
"""Which of the words become prompts."""


@click.command("init")
@click.argument("folder", type=OutputPath())
def create_project(folder: Path) -> None:
    """Create FOLDER with a recipe, a reward of your own, prompts and a test, to start from.

    FOLDER must be new or empty.
    """
    from ebbflow.recipe.paths import resolve_local_path

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"{folder} exists and is no empty folder; name a new one")
    name = re.sub(r"[^a-z0-9-]+", "-", folder.resolve().name.lower()).strip("-")
    if not name:
        sys.exit(f"{folder} has no letters or digits to name a recipe by; choose another name")
    quoted = shlex.quote(str(folder))
    words = resolve_local_path(WORDS).read_text().splitlines()
    files = {
        "recipe.yaml": RECIPE.format(folder=quoted, name=name),
        "my_rewards.py": REWARD,
        "test_my_rewards.py": TEST.format(folder=quoted),
        "prompts.txt": "\n".join(words[::EVERY]) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in files.items():
        (folder / file_name).write_text(text)
        click.echo(folder / file_name)
    click.echo(f"Check it with: ebbflow check {shlex.quote(str(folder / 'recipe.yaml'))}")
