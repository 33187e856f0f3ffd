"""Writes pictures of random strings with captions, to fine-tune the glyph model on:
``python -m ebbflow.models.glyph_training.pictures FOLDER``.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
    default glyph model. A FOLDER that ends in .parquet becomes one file.
    """
    if folder.suffix == ".parquet":
        write_picture_file(folder, count, seed)
    else:
        write_pictures(folder, count, seed)
    click.echo(f"{count} pictures in {folder}; name it as data: {{path: {folder}}}")


def write_picture_file(path: Path, count: int, seed: int) -> None:
    """Write ``main``'s pictures into one Parquet file."""
    captions, pngs = _render_pictures(count, seed)
    pq.write_table(pa.table({"text": captions, "image": pngs}), path, compression="zstd")


def write_pictures(folder: Path, count: int, seed: int) -> None:
    """Write ``main``'s pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (caption, png) in enumerate(zip(*_render_pictures(count, seed), strict=True)):
        name = f"{number:05}.png"
        (folder / name).write_bytes(png)
        rows.append(json.dumps({FILE_COLUMN: name, "text": caption}))
    (folder / METADATA_FILES[0]).write_text("\n".join(rows) + "\n")


def _render_pictures(count: int, seed: int) -> tuple[list[str], list[bytes]]:
    """Render random strings; return the captions and the pictures as PNG files."""
    config = GlyphTrainingConfig()
    prompts = make_glyph_prompts(count, config.letters, seed, config.alphabet_characters)
    texts = [prompt.target or "" for prompt in prompts]
    images = render_batch(texts, config.height, config.width, np.random.default_rng(seed))
    # The model is one of grey pictures; PNG files that people open have three channels.
    pngs = [
        encode_pngs(np.stack([image] * 3, axis=-1)[None])[0]
        for image in show_progress("writing pictures", "picture", images)
    ]
    return [prompt.prompt for prompt in prompts], pngs


if __name__ == "__main__":
    main()
