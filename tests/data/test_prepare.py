from pathlib import Path

import pytest

from ebbflow.data.prepare import prepare
from ebbflow.data.prompts import PromptError
from ebbflow.recipe import Recipe

WORDS = Path(__file__).parents[2] / "datasets" / "words4" / "prompts.txt"


def recipe(**prompts: object) -> Recipe:
    return Recipe.model_validate({"prompts": {"validation": 2, "held_out": 3} | prompts})


def test_made_up_strings_have_all_splits() -> None:
    table, report = prepare(recipe(count=70), None)
    splits = table["split"].to_pylist()
    assert {name: splits.count(name) for name in ("train", "validation", "held_out")} == {
        "train": 65,
        "validation": 2,
        "held_out": 3,
    }
    assert "65 to train" in report


def test_the_words_that_come_along_can_be_trained_on() -> None:
    table, report = prepare(recipe(source=str(WORDS)), WORDS)
    assert table.num_rows > 500
    assert set(map(len, table["target"].to_pylist())) == {4}
    assert "0 duplicates" in report


@pytest.mark.parametrize("line", ['"HELLO"', '"A1"', 'a sign: "OK"', '"AB CD"'])
def test_what_the_glyph_model_cannot_draw_is_said_at_once(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f'"W{letter}"\n' for letter in "ABCDEFG") + line + "\n")
    with pytest.raises(PromptError, match=r"1 of 8 prompts are not 1 to 4 letters"):
        prepare(recipe(source=str(file)), file)


def test_too_few_prompts_for_a_stage_is_said_at_once() -> None:
    with pytest.raises(PromptError, match=r"stages.1 wants 64 different prompts at once and 45 are left"):
        prepare(recipe(count=50), None)


def test_a_files_split_does_not_follow_the_seed() -> None:
    one, other = (prepare(recipe(source=str(WORDS)).model_copy(update={"seed": seed}), WORDS)[0] for seed in (1, 2))
    assert one["split"] == other["split"]
