"""Read one line, or a page, with the PP-OCR models that rapidocr's wheel carries. Nothing is
downloaded.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HEIGHT = 48
"""Height in pixels that PP-OCR recognisers read."""
BATCH = 16
"""Images per forward pass: every column of an image is scored against 18,710 characters, which
fills memory in larger ones.
"""
MAX_THREADS = 2
"""The batches are too small for more."""
BLANK = 0
"""The class of CTC that stands for no character."""
PAGE_SIDE = 960
"""Pixels of the longer side above which a page is made smaller before text is searched in it;
smaller ones stay as they are.
"""
DETECTOR = "det"
RECOGNISER = "rec"
"""What rapidocr calls its models."""


def read_lines_of_text(images: np.ndarray) -> list[str]:
    """Read the line of text in each image, "" where there is none.

    Args:
        images: uint8 RGB [N, height, width, 3], one line each, dark on light, letters about half
            the height or more.
    """
    session, characters = _load_recogniser()
    input_name = session.get_inputs()[0].name
    texts: list[str] = []
    for start in range(0, len(images), BATCH):
        lines = prepare_line_images(images[start : start + BATCH])
        scores = session.run(None, {input_name: lines})[0]  # [n, columns, characters]
        texts += decode_ctc(scores.argmax(axis=2), characters)
    return texts


def read_pages(images: np.ndarray) -> tuple[list[str | None], dict[int, str]]:
    """Read all text of each image in reading order, "" where there is none, None where reading
    failed; and why, by position.

    Args:
        images: uint8 RGB [N, height, width, 3], with text anywhere in them.
    """
    reader = _load_page_reader()
    texts: list[str | None] = []
    failures: dict[int, str] = {}
    for index, image in enumerate(images):
        try:
            # rapidocr, like OpenCV, takes arrays for BGR.
            page = reader(np.ascontiguousarray(image[..., ::-1]))
        except Exception as error:
            # rapidocr's geometry has accidents of many types on odd shapes of text.
            failures[index] = (
                f"rapidocr failed: {type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            )
            texts.append(None)
            continue
        if page.txts:
            order = sort_into_reading_order(page.boxes)
            texts.append(" ".join(page.txts[box] for box in order))
        else:
            texts.append("")
    return texts, failures


def sort_into_reading_order(boxes: np.ndarray) -> list[int]:
    """Return the positions of the boxes [N, 4 corners, (x, y)], in lines from top to bottom, each
    from left to right.

    A box belongs to the line whose first box has its middle within half the height of the lower of
    both. rapidocr's own order has a fixed tolerance of ten pixels at the upper edge instead, which
    takes words of large letters for lines of their own.
    """
    left = boxes[..., 0].min(axis=1)  # [N], as the next three
    top = boxes[..., 1].min(axis=1)
    height = boxes[..., 1].max(axis=1) - top
    middle = top + height / 2
    # From top to bottom, so that only the line before can be the line of a box. Compared with the
    # first box of the line: with its last one, a slanted row of boxes would become one line.
    lines: list[list[int]] = []
    for box in np.argsort(middle, kind="stable"):
        first = lines[-1][0] if lines else None
        if first is not None and middle[box] - middle[first] < min(height[box], height[first]) / 2:
            lines[-1].append(int(box))
        else:
            lines.append([int(box)])
    return [box for line in lines for box in sorted(line, key=lambda box: left[box])]


def prepare_line_images(images: np.ndarray) -> np.ndarray:
    """Prepare images for the recogniser: float32 BGR [N, 3, 48, width'] in [-1, 1], the aspect
    kept, at least square.
    """
    height, width = images.shape[1:3]
    scaled = max(1, round(width * HEIGHT / height))
    # White to the right of a narrow image: the columns of the network there are blanks.
    sheet = np.full((len(images), HEIGHT, max(HEIGHT, scaled), 3), 255, np.uint8)
    for index, image in enumerate(images):
        sheet[index, :, :scaled] = Image.fromarray(image).resize(
            (scaled, HEIGHT), Image.Resampling.BICUBIC
        )
    return np.ascontiguousarray(sheet[..., ::-1].transpose(0, 3, 1, 2), np.float32) / 127.5 - 1


def decode_ctc(classes: np.ndarray, characters: Sequence[str]) -> list[str]:
    """Return the texts of the best CTC path: int [N, columns] -> N texts. Repeats are merged, then
    blanks dropped.

    Example:
        The columns "-LL-L-O" (- is the blank) read "LLO": the blank keeps the two L apart.
    """
    texts = []
    for row in classes:
        # No class is -1, so the first column always counts as a change.
        changes = np.flatnonzero(np.diff(row, prepend=-1))
        texts.append("".join(characters[label] for label in row[changes] if label != BLANK))
    return texts


def find_model_file(part: str) -> Path:
    """Return a model among the files that rapidocr's wheel installed; models it downloaded later do
    not count.

    Args:
        part: ``DETECTOR`` or ``RECOGNISER``.

    Raises:
        FileNotFoundError: rapidocr is not installed, or this version carries no such model.
    """
    try:
        files = importlib.metadata.files("rapidocr") or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            "the package rapidocr is not installed; install it with: pip install 'ebbflow[ocr]'"
        ) from None
    # From the list of the wheel and not from the folder, so that the version decides what reads.
    models = sorted(
        Path(str(file.locate())) for file in files if file.match(f"models/*{part}*.onnx")
    )
    if not models or not models[-1].is_file():
        version = importlib.metadata.version("rapidocr")
        raise FileNotFoundError(
            f"rapidocr {version} has no models/*{part}*.onnx; install the version in"
            " constraints.txt"
        )
    return models[-1]


@cache
def _load_recogniser() -> tuple[Any, list[str]]:
    """Open the session; return it and its classes: blank, the characters that the model's metadata
    lists, space.
    """
    session = _open_session(RECOGNISER)
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return session, ["", *characters, " "]


@cache
def _load_page_reader() -> Any:
    """Open rapidocr's pipeline without its classifier of lines that stand on their head."""
    from omegaconf import flag_override
    from rapidocr import RapidOCR

    limits = {"Det.limit_type": "max", "Det.limit_side_len": PAGE_SIDE}
    reader = RapidOCR(params={"Global.use_cls": False, "Global.log_level": "critical", **limits})
    # Its own sessions would wait with spinning threads; omegaconf takes plain values only, unless
    # it is asked to.
    with flag_override(reader.cfg, "allow_objects", True):
        reader.cfg.Det["session"] = _open_session(DETECTOR)
        reader.cfg.Rec["session"] = _open_session(RECOGNISER)
    return reader


@cache
def _open_session(part: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    # Threads that spin while they wait would slow whatever else runs here down many times over.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(
        str(find_model_file(part)), options, providers=["CPUExecutionProvider"]
    )
