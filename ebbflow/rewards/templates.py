"""Read the texts that published models were trained or published to read, to the letter: the files
of ``templates/``. Their sources and licences are in NOTICE.

``{prompt}`` stands for the prompt of the image, or the instruction of an edit; other braces are
part of the text.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "templates"


@cache
def read_template(name: str) -> str:
    """Return the text of ``templates/NAME.txt``."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def fill_template(name: str, prompt: str) -> str:
    """Return the text with the prompt in its place."""
    # Not str.format: the texts have braces of their own, such as the JSON of an answer.
    return read_template(name).replace("{prompt}", prompt)
