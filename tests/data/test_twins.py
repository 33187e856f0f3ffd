"""Training prompts never meet held-out ones in another spelling."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import PromptError, PromptRow, split_prompts, split_with_held_out
from ebbflow.data.twins import digest_held_out, find_near_duplicates, hash_input, normalize_text
from ebbflow.recipe import Recipe

SPELLINGS = {
    "tab": lambda text: text.replace(" ", "\t", 1),
    "double blank": lambda text: text.replace(" ", "  ", 1),
    "no-break space": lambda text: text.replace(" ", "\u00a0", 1),
    "case": str.upper,
    "full stop": lambda text: text + ".",
    "zero width": lambda text: text[:3] + "\u200b" + text[3:],
    "Cyrillic letter": lambda text: text.replace("o", "\u043e", 1),
    "Greek capital": lambda text: text.replace("t", "\u03a4", 1),
    "accent": lambda text: text.replace("e", "\u00e9", 1),
    "combining accent": lambda text: text.replace("e", "e\u0301", 1),
    "curly quotes": lambda text: text.replace('"', "\u201c", 1).replace('"', "\u201d", 1),
    "full width": lambda text: text.replace("a", "\uff41", 1),
}


def split_by_prompt(rows: list[PromptRow], validation: int, held_out: int) -> dict[str, str]:
    table = split_prompts(rows, validation, held_out)
    return {row["prompt"]: row["split"] for row in table.to_pylist()}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_spelling_of_a_prompt_is_on_its_side(spelling: str) -> None:
    texts = [f'a sign that says "{letter}one", no {letter * 3}' for letter in "abcdefghijklm"]
    twins = [SPELLINGS[spelling](text) for text in texts]
    assert all(map(str.__ne__, texts, twins))
    rows = [PromptRow(text) for text in texts + twins]
    splits = split_by_prompt(rows, 6, 8)
    assert sorted(splits.values()) == ["held_out"] * 8 + ["train"] * 12 + ["validation"] * 6
    assert [splits[text] for text in texts] == [splits[twin] for twin in twins]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("\u304b\u304d", "\u304c\u304d"),  # kaki, gaki: a mark makes the ga
        ("\u0915\u093f\u0932", "\u0915\u0941\u0932"),  # kil, kul: vowels of Devanagari
        ("\u0e01\u0e34\u0e19", "\u0e01\u0e31\u0e19"),  # kin, kan: vowels of Thai
    ],
)
def test_marks_that_are_part_of_a_word_stay(text: str, other: str) -> None:
    assert normalize_text(text) != normalize_text(other)
    assert hash_input(PromptRow(text)) != hash_input(PromptRow(other))


def test_an_emoji_with_a_variation_selector_is_the_same() -> None:
    assert normalize_text("a \u2764\ufe0f") == normalize_text("a \u2764")


@pytest.mark.parametrize("columns", [{"negative_prompt": "blurry"}, {"target": "X"}])
def test_the_same_text_with_other_columns_is_on_its_side(columns: dict[str, str]) -> None:
    texts = [f"a cat, {number}" for number in range(20)]
    rows = [PromptRow(text) for text in texts] + [PromptRow(text, **columns) for text in texts]
    table = split_prompts(rows, 4, 10).to_pylist()
    sides = [{row["split"] for row in table if row["prompt"] == text} for text in texts]
    assert all(len(side) == 1 for side in sides)


def test_the_same_text_with_another_image_is_another_prompt() -> None:
    rows = [PromptRow("make it blue", image=bytes([index])) for index in range(20)]
    assert len({hash_input(row) for row in rows}) == 20


def test_twins_that_exceed_the_number_held_out_are_left_out() -> None:
    rows = [
        PromptRow(f"a cat{stop}", negative_prompt=negative)
        for stop in ("", ".")
        for negative in "ab"
    ]
    rows += [PromptRow(f"a dog no {number}") for number in range(40)]
    for held_out in range(1, 20):
        table = split_prompts(rows, 3, held_out).to_pylist()
        splits = [row["split"] for row in table]
        assert splits.count("held_out") == held_out
        assert splits.count("validation") == 3
        cats = [row["split"] for row in table if "cat" in row["prompt"]]
        assert len(set(cats)) == 1
        assert cats[0] != "train" or len(cats) == 4
    with pytest.raises(PromptError, match="4 prompts cannot be split .* same text on one side"):
        split_prompts(rows[:4], 1, 1)


def test_deleting_a_line_moves_no_other_line_to_the_held_out_side() -> None:
    rows = [PromptRow(f"prompt no {number}") for number in range(1000)]
    before = split_by_prompt(rows, 64, 128)
    for index in range(0, 1000, 8):
        after = split_by_prompt(rows[:index] + rows[index + 1 :], 64, 128)
        moved = [
            (before[prompt], split) for prompt, split in after.items() if before[prompt] != split
        ]
        expected = {
            "train": [],
            "validation": [("train", "validation")],
            "held_out": [("train", "validation"), ("validation", "held_out")],
        }
        assert sorted(moved) == expected[before[rows[index].prompt]]


def test_a_line_keeps_its_split_whatever_the_order_of_the_lines() -> None:
    rows = [PromptRow(f"prompt no {number}") for number in range(300)]
    shuffled = random.Random(0).sample(rows, len(rows))
    assert split_by_prompt(rows, 20, 30) == split_by_prompt(shuffled, 20, 30)


def test_training_leaves_out_what_a_held_out_file_has_in_another_spelling() -> None:
    rows = [PromptRow(f"a photo of the café no {number}") for number in range(20)]
    judged = [PromptRow("A photo of  the Cafe no 3."), PromptRow("a zebra")]
    table, num_shared = split_with_held_out(rows, judged, 2, 2)
    assert num_shared == 1
    assert rows[3].prompt not in table["prompt"].to_pylist()


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("C++", "c++"),
        ("C", "c"),
        ("?!", "?!"),
        ("Кот И ПЁС", normalize_text("кот и пес")),
        ("don’t", "don t"),
        ("ﬁne—line", "fine line"),
        ("\u202eabc", "abc"),
        ("Straße", "strasse"),
        ("3 cats 🐈", "3 cats 🐈"),
    ],
)
def test_normalized_texts(text: str, normalized: str) -> None:
    assert normalize_text(text) == normalized
    assert normalize_text(normalized) == normalized


def test_near_duplicates_are_the_pairs_of_high_jaccard_similarity() -> None:
    generator = random.Random(1)
    words = ["red", "green", "cat", "dog", "house", "under", "the", "old", "bridge", "river"]
    texts = [" ".join(generator.choices(words, k=12)) for _ in range(150)]
    # Some differ in a word, some in a letter.
    texts += [text.replace("red", "rad", 1) for text in texts] + [text + " x" for text in texts]
    generator.shuffle(texts)
    rows = [PromptRow(text) for text in texts]
    judged, trained = rows[:60], rows[60:]

    def similarity(one: str, other: str) -> float:
        first, second = ({text[i : i + 5] for i in range(len(text) - 4)} for text in (one, other))
        return len(first & second) / len(first | second)

    expected = {}
    for index, row in enumerate(judged):
        near = [i for i, other in enumerate(trained) if similarity(row.prompt, other.prompt) >= 0.8]
        if near:
            expected[index] = near[0]
    assert 5 < len(expected) < 60
    assert find_near_duplicates(judged, trained) == expected


def test_near_duplicates_are_counted_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    lines = [
        f"a long sentence about the weather in the town of {letter}" for letter in "abcdefghij"
    ]
    file.write_text("\n".join(lines))
    settings = {
        "prompts": {"source": str(file), "validation": 2, "held_out": 3},
        "model": {"family": "sd3", "path": "owner/sd3", "revision": "0" * 40},
        "rewards": ["pickscore"],
        "stages": [{"kind": "online", "prompts_per_step": 2}],
    }
    report = prepare_prompt_table(Recipe.model_validate(settings), file)[1]
    assert "3 of 3 held-out prompts nearly equal a training prompt, first 'a long sent" in report


def test_a_digest_of_held_out_prompts_is_that_of_their_texts() -> None:
    rows = [
        {"prompt": "A cat", "target": None, "split": "held_out"},
        {"prompt": 'a sign "HI"', "target": "HI", "split": "held_out"},
        {"prompt": "a dog", "target": None, "split": "train"},
    ]
    digest = digest_held_out(pa.Table.from_pylist(rows))
    again = [rows[1], rows[0] | {"prompt": "a  cat."}, rows[0], rows[2] | {"prompt": "a cow"}]
    assert digest_held_out(pa.Table.from_pylist(again)) == digest
    other = [rows[0], rows[1] | {"target": "HO"}, rows[2]]
    assert digest_held_out(pa.Table.from_pylist(other)) != digest
    assert digest_held_out(pa.Table.from_pylist(rows[:1])) != digest
