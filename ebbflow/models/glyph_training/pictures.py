"""Writes pictures of random strings with captions, to fine-tune the glyph model on:
``python -m ebbflow.models.glyph_training.pictures FOLDER``.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from ebbflow.data.captioned import FILE_COLUMN, METADATA_FILES
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import make_glyph_prompts
from ebbflow.models.glyph_training.lettering import render_batch
from ebbflow.progress import show_progress
from ebbflow.recipe.model import GlyphTrainingConfig


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--count", default=512, show_default=True, help="Number of pictures.")
@click.option("--seed", default=1, show_default=True, help="Seed of the strings and their places.")
def main(folder: Path, count: int, seed: int) -> None:
    """Write COUNT pictures of random strings with a metadata.jsonl into FOLDER, in the size of the
    default glyph model.
    """
    write_pictures(folder, count, seed)
    click.echo(f"{count} pictures in {folder}; name it as data: {{path: {folder}}}")


def write_pictures(folder: Path, count: int, seed: int) -> None:
    """Write ``main``'s pictures."""
    config = GlyphTrainingConfig()
    prompts = make_glyph_prompts(count, config.letters, seed, config.alphabet_characters)
    texts = [prompt.target or "" for prompt in prompts]
    images = render_batch(texts, config.height, config.width, np.random.default_rng(seed))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, image in enumerate(show_progress("writing pictures", "picture", images)):
        name = f"{number:05}.png"
        (folder / name).write_bytes(encode_pngs(np.stack([image] * 3, axis=-1)[None])[0])
        rows.append(json.dumps({FILE_COLUMN: name, "text": prompts[number].prompt}))
    (folder / METADATA_FILES[0]).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
