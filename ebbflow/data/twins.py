"""Which prompts are the same to a reader, or nearly so: no policy may train on a held-out prompt in
another spelling.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import pyarrow as pa

from ebbflow.progress import show_progress

NEAR_DUPLICATE = 0.8
"""Jaccard similarity from which two texts are near duplicates."""
SHINGLE = 5
"""Characters of the overlapping pieces by which two texts are compared."""

# Letters that look like Latin ones, by their small form, and stroked letters, which Unicode does
# not decompose. The Unicode Consortium's confusables.txt (UTS #39, Unicode 15.1) for Cyrillic,
# Greek, Armenian and phonetic letters, where the small or else the capital letter looks alike. No
# package: the table decides which prompts are held out, so an update must not change it.
_LATIN_LETTERS = {
    "a": "аαɑ",
    "b": "вβь",
    "c": "сϲ",
    "d": "ԁđ",
    "e": "еεҽ",
    "f": "ϝք",
    "g": "ԍɡց",
    "h": "нһհħ",
    "i": "іιıɩɪӏꙇ",
    "j": "јϳ",
    "k": "кκ",
    "l": "ł",
    "m": "мμϻ",
    "n": "ηոռ",
    "o": "оοσօø",
    "p": "рρ",
    "q": "ԛգզ",
    "r": "г",
    "s": "ѕտ",
    "t": "тτŧ",
    "u": "υսʋ",
    "v": "ѵν",
    "w": "ԝѡωաɯ",
    "x": "хχ",
    "y": "уүγɣʏ",
    "z": "ζ",
}
_LOOK_ALIKES = {letter: latin for latin, letters in _LATIN_LETTERS.items() for letter in letters}


class ModelInput(Protocol):
    """What a model generates from: a prompt, and in editing an image."""

    @property
    def prompt(self) -> str: ...

    @property
    def image(self) -> bytes | None: ...


def normalize_text(text: str) -> str:
    """Return what is left of a text without case, accents, punctuation, invisible characters,
    repeated blanks and look-alike letters of other scripts.

    Example:
        >>> normalize_text("A “Сafé”,\u00a0by the  sea.")
        'a cafe by the sea'
    """
    # Compatibility forms (full width, ligatures, no-break spaces), then accents as characters of
    # their own.
    folded = unicodedata.normalize("NFKC", text).casefold()
    characters = map(_normalize_character, unicodedata.normalize("NFKD", folded))
    # A prompt of punctuation alone, such as "?!", has nothing else to be known by.
    return " ".join("".join(characters).split()) or " ".join(folded.split())


@cache
def _normalize_character(character: str) -> str:
    category = unicodedata.category(character)
    # Accents, variation selectors, zero-width and direction marks. Other marks are part of a word:
    # the vowels of Hindi and Thai, and what makes a Japanese "ga" of a "ka".
    if "\u0300" <= character <= "\u036f" or "\ufe00" <= character <= "\ufe0f":
        return ""
    if category in ("Me", "Cf"):
        return ""
    # Punctuation and control characters separate words. Symbols stay: "C++" is not "C".
    if category[0] in "PZC":
        return " "
    return _LOOK_ALIKES.get(character, character)


def digest_held_out(table: pa.Table) -> str:
    """Return a digest of the held-out prompts and their targets. Case, punctuation, order and the
    number of samples do not change it.

    Args:
        table: of prompts, or of an evaluation's samples.
    """
    columns = (table[name].to_pylist() for name in ("split", "prompt", "target"))
    texts = sorted(
        {
            (normalize_text(prompt), target or "")
            for split, prompt, target in zip(*columns, strict=True)
            if split == "held_out"
        }
    )
    content = json.dumps(texts, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def hash_input(row: ModelInput) -> bytes:
    """Return a digest that rows share whose texts are equal once normalised, and whose images are.

    Negative prompts and targets do not count: a policy that was trained on the same text and image
    has seen what it is judged by.
    """
    image_digest = hashlib.sha256(row.image or b"").digest()
    text = normalize_text(row.prompt).encode("utf-8", "surrogatepass")
    return hashlib.sha256(image_digest + text).digest()


def group_twins(rows: Sequence[ModelInput]) -> list[list[int]]:
    """Return the positions of rows, those of equal ``hash_input`` together, in order of that hash.

    Example:
        >>> group_twins([PromptRow("a cat"), PromptRow("a dog"), PromptRow("A Cat.")])
        [[1], [0, 2]]
    """
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(hash_input(row), []).append(index)
    return [groups[digest] for digest in sorted(groups)]


def find_near_duplicates(
    judged: Sequence[ModelInput], trained: Sequence[ModelInput]
) -> dict[int, int]:
    """Return which of ``judged`` have a near duplicate among ``trained``, by position, and the
    first of these.

    The Jaccard similarity of the sets of runs of ``SHINGLE`` characters is computed itself, not
    estimated by MinHash: few prompts are held out, so there are few pairs to compare.
    """
    judged_shingles = [_shingle_text(row.prompt) for row in judged]
    frequencies = Counter(shingle for shingles in judged_shingles for shingle in shingles)
    # A near duplicate shares at least NEAR_DUPLICATE of the n shingles, so it shares one of any
    # n (1 - NEAR_DUPLICATE) + 1 of them. The rarest ones have the fewest candidates.
    positions: dict[str, list[int]] = {}
    for index, shingles in enumerate(judged_shingles):
        rarest = sorted(shingles, key=lambda shingle: (frequencies[shingle], shingle))
        num_indexed = math.floor(len(shingles) * (1 - NEAR_DUPLICATE) + 1e-9) + 1
        for shingle in rarest[:num_indexed]:
            positions.setdefault(shingle, []).append(index)

    duplicates: dict[int, int] = {}
    work = show_progress("looking for near duplicates of held-out prompts", "prompt", trained)
    for trained_index, row in enumerate(work):
        shingles = _shingle_text(row.prompt)
        candidates = {
            index for shared in positions.keys() & shingles for index in positions[shared]
        }
        for index in candidates - duplicates.keys():
            other = judged_shingles[index]
            similarity = len(shingles & other) / len(shingles | other)
            if similarity >= NEAR_DUPLICATE and judged[index].image == row.image:
                duplicates[index] = trained_index
    return duplicates


def _shingle_text(text: str) -> set[str]:
    normalized = normalize_text(text)
    return {
        normalized[start : start + SHINGLE]
        for start in range(max(1, len(normalized) - SHINGLE + 1))
    }
