"""``ocr``: a neural line reader, the PP-OCR recogniser that rapidocr's wheel carries.

The model is run directly: images of generated text are one line already, so rapidocr's detector and its per-image calls would
only cost time. Nothing is downloaded and nothing is told about the alphabet.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.text import judge_readings

HEIGHT = 48
"""Height in pixels that PP-OCR recognisers read."""
BATCH = 16
"""Images per forward pass: every column of an image is scored against 18,710 characters, which fills memory in larger ones."""
MOST_THREADS = 2
"""The batches are too small for more."""
BLANK = 0
"""The class of CTC that stands for no character."""


class Ocr:
    """Similarity of what PP-OCR reads to the prompt's target; the metric ``exact_match`` is 1 where they are equal."""

    name = "ocr"

    def unavailable(self) -> str | None:
        try:
            model_file()
        except FileNotFoundError as error:
            return str(error)
        return None

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return judge_readings(read(images), prompts, "exact_match")


def read(images: np.ndarray) -> list[str]:
    """The line of text in each image, "" where there is none.

    Args:
        images: uint8 RGB [N, height, width, 3], one line each, dark on light, letters about half the height or more.
    """
    session, characters = _recogniser()
    texts: list[str] = []
    for start in range(0, len(images), BATCH):
        scores = session.run(None, {session.get_inputs()[0].name: prepare(images[start : start + BATCH])})[0]
        texts += decode(scores.argmax(axis=2), characters)
    return texts


def prepare(images: np.ndarray) -> np.ndarray:
    """Images as the recogniser wants them: float32 BGR [N, 3, 48, width'] in [-1, 1], the aspect kept, at least square."""
    height, width = images.shape[1:3]
    scaled = max(1, round(width * HEIGHT / height))
    sheet = np.full((len(images), HEIGHT, max(HEIGHT, scaled), 3), 255, np.uint8)
    for index, image in enumerate(images):
        sheet[index, :, :scaled] = Image.fromarray(image).resize((scaled, HEIGHT), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(sheet[..., ::-1].transpose(0, 3, 1, 2), np.float32) / 127.5 - 1


def decode(classes: np.ndarray, characters: Sequence[str]) -> list[str]:
    """Texts of the best CTC path: int [N, columns] -> N texts. Repeats are merged, then blanks dropped."""
    return ["".join(characters[label] for label in _merged(row) if label != BLANK) for row in classes]


def _merged(row: np.ndarray) -> Iterator[int]:
    changes = np.flatnonzero(np.diff(row, prepend=-1))
    return iter(row[changes])


def model_file() -> Path:
    """The recogniser among the files that rapidocr's wheel installed; models it downloaded later do not count.

    Raises:
        FileNotFoundError: rapidocr is not installed, or this version carries no recogniser.
    """
    try:
        files = importlib.metadata.files("rapidocr") or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError("the package rapidocr is not installed; install it with: pip install rapidocr") from None
    found = sorted(Path(str(file.locate())) for file in files if file.match("models/*rec*.onnx"))
    if not found or not found[-1].is_file():
        version = importlib.metadata.version("rapidocr")
        raise FileNotFoundError(f"rapidocr {version} has no models/*rec*.onnx; install the version in constraints.txt")
    return found[-1]


@cache
def _recogniser() -> tuple[Any, list[str]]:
    """The session and its classes: blank, the characters that the model's metadata lists, space."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = min(MOST_THREADS, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    # Threads that spin while they wait would slow whatever else runs here down many times over.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model_file()), options, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return session, ["", *characters, " "]
