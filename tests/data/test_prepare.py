import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from ebbflow.data.images import decode_png, encode_png
from ebbflow.data.prepare import branch_prompts, prepare
from ebbflow.data.prompts import PromptError
from ebbflow.data.schema import SPLITS
from ebbflow.recipe import Recipe

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = Path(__file__).parents[2] / "datasets" / "words4" / "prompts.txt"


def recipe(**prompts: object) -> Recipe:
    return Recipe.model_validate({"prompts": {"validation": 2, "held_out": 3} | prompts})


def test_made_up_strings_have_all_splits() -> None:
    table, report = prepare(recipe(count=70))
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


def test_what_a_glyph_model_draws_depends_on_its_alphabets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f'"{text}"\n' for text in ("12", "34", "5678", "90", "77", "31", "ABCD", "ab")))

    def prepared(*alphabets: str) -> str:
        settings = recipe(source=str(file)).model_dump(mode="json") | {
            "model": {"training": {"alphabets": alphabets}},
            "stages": [{"kind": "offline", "prompts": 2}],
        }
        return prepare(Recipe.model_validate(settings), file)[1]

    assert "to train" in prepared("digits", "capitals")
    with pytest.raises(PromptError, match=r"2 of 8 prompts are not 1 to 4 letters 0-9, as .* or add to model.training.alphabets"):
        prepared("digits")


def mixture(tmp_path: Path, stages: dict[str, int], **files: list[str]) -> tuple[Recipe, list[Path]]:
    paths = [tmp_path / f"{name}.txt" for name in files]
    for path, lines in zip(paths, files.values(), strict=True):
        path.write_text("".join(f'"{line}"\n' for line in lines))
    sets = [{"source": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)]
    stage = {"kind": "online", "prompts_per_step": 4} | stages
    return Recipe.model_validate({"prompts": {"mixture": sets, "validation": 1, "held_out": 2}, "stages": [stage]}), paths


def test_a_mixture_has_the_prompts_of_all_files_once(tmp_path: Path) -> None:
    recipe, files = mixture(tmp_path, {}, one=["AA", "AB", "AC", "AD", "AE", "AF"], two=["BA", "AB", "BC", "BD", "BE"])
    table, report = prepare(recipe, *files)
    assert table["target"].to_pylist() == ["AA", "AB", "AC", "AD", "AE", "AF", "BA", "BC", "BD", "BE"]
    assert table["source"].to_pylist() == ["one.txt"] * 6 + ["two.txt"] * 4
    assert "1 in several files, taken from the first; 7 to train" in report


def test_a_set_with_too_few_prompts_is_said_at_once(tmp_path: Path) -> None:
    recipe, files = mixture(tmp_path, {"prompts_per_step": 12}, one=["AA", "AB"], two=["BA", "BB", "BC", "BD", "BE", "BF"] * 9)
    with pytest.raises(PromptError, match=r"stages.0 needs"):
        prepare(recipe, *files)
    recipe, files = mixture(tmp_path, {}, one=["AA", "AB"], two=[f"{a}{b}" for a in "CDE" for b in "FGHIJ"])
    with pytest.raises(
        PromptError, match=r"stages.0 needs 3 different prompts of one.txt per step and [012] are left for training"
    ):
        prepare(recipe, *files)


def test_too_few_prompts_for_a_stage_is_said_at_once() -> None:
    with pytest.raises(PromptError, match=r"stages.1 needs 64 different prompts per step and 45 are left"):
        prepare(recipe(count=50))


def test_a_files_split_does_not_follow_the_seed() -> None:
    one, other = (prepare(recipe(source=str(WORDS)).model_copy(update={"seed": seed}), WORDS)[0] for seed in (1, 2))
    assert one["split"] == other["split"]


def prompts_with_images(folder: Path, without: int = 0) -> Path:
    """Ten prompts beside their images, each of its own grey; the last ones have none."""
    pngs = encode_png(np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 6, 3), np.uint8))
    rows = []
    for index, png in enumerate(pngs):
        (folder / f"{index}.png").write_bytes(png)
        rows.append({"prompt": f'a card "W{index}"'} | ({"image": f"{index}.png"} if index < 10 - without else {}))
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "prompts.jsonl"


def of_family(family: str, source: Path) -> Recipe:
    stages = [{"kind": "online", "prompts_per_step": 2, "group_size": 4}]
    return Recipe.model_validate(
        {
            "model": {"family": family, "path": "base"},
            "prompts": {"source": str(source), "validation": 2, "held_out": 3},
            "stages": stages,
        }
    )


def test_an_editing_model_gets_the_image_of_every_prompt(tmp_path: Path) -> None:
    source = prompts_with_images(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, report = prepare(of_family("qwen_image_edit", source), source)
    assert decode_png(table["image"].to_pylist())[:, 0, 0, 0].tolist() == list(range(10))
    assert "10 prompts kept" in report


def test_an_editing_model_without_an_image_to_edit_is_said_at_once(tmp_path: Path) -> None:
    source = prompts_with_images(tmp_path, without=3)
    with pytest.raises(PromptError, match=r"prompts.jsonl: 3 of 10 prompts have no image, and qwen_image_edit edits images"):
        prepare(of_family("qwen_image_edit", source), source)


def test_images_that_the_model_does_not_look_at_are_warned_of(tmp_path: Path) -> None:
    source = prompts_with_images(tmp_path, without=3)
    with pytest.warns(UserWarning, match=r"7 of 10 prompts have an image, which qwen_image ignores"):
        prepare(of_family("qwen_image", source), source)


@pytest.mark.parametrize(("family", "guidance", "warned"), [("sd3", 1.0, True), ("sd3", 4.5, False), ("flux", 3.5, True)])
def test_negative_prompts_that_nothing_steers_away_from_are_warned_of(
    tmp_path: Path, family: str, guidance: float, warned: bool
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f'"W{i}"', "negative_prompt": "blurry" * (i > 3)}) for i in range(9)))
    recipe = of_family(family, source)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"guidance": guidance})})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(recipe, source)
    assert ["5 of 9 prompts have a negative prompt" in str(warning.message) for warning in caught] == [True] * warned


def branched(validation: int, files: list[Path]) -> Recipe:
    sets = [{"name": name, "source": str(path)} for name, path in zip(("one", "two"), files, strict=True)]
    merge = {"name": "distillation", "teachers": {"one": "branch:one", "two": "branch:two"}}
    stages = [{"branch": "one"}, {"branch": "two"}, {"algorithm": merge}]
    return Recipe.model_validate(
        {
            "prompts": {"mixture": sets, "validation": validation, "held_out": 6},
            "branches": {name: {"prompts": [name]} for name in ("one", "two")},
            "stages": [{"kind": "online", "prompts_per_step": 2} | stage for stage in stages],
        }
    )


def test_a_branch_never_sees_what_is_held_out_of_the_run(tmp_path: Path) -> None:
    _, files = mixture(tmp_path, {}, one=[f"A{b}" for b in LETTERS], two=[f"B{b}" for b in LETTERS])
    recipe = branched(16, files)
    table, _ = prepare(recipe, *files)
    by_split = {split: {row["prompt_id"] for row in table.to_pylist() if row["split"] == split} for split in SPLITS}
    for name in ("one", "two"):
        rows = branch_prompts(recipe, table, name).to_pylist()
        own = {split: {row["prompt_id"] for row in rows if row["split"] == split} for split in SPLITS}
        assert {row["source"] for row in rows} == {name}
        assert not by_split["held_out"] & {row["prompt_id"] for row in rows}
        assert own["train"] <= by_split["train"]
        assert own["validation"] | own["held_out"] <= by_split["validation"]
        assert abs(len(own["validation"]) - len(own["held_out"])) <= 1


def test_a_branch_needs_prompts_to_be_judged_on(tmp_path: Path) -> None:
    _, files = mixture(tmp_path, {}, one=[f"A{b}" for b in LETTERS], two=[f"B{b}" for b in LETTERS])
    with pytest.raises(PromptError, match=r"branches\.one has \d validation prompts, .* need 4; raise prompts.validation"):
        prepare(branched(2, files), *files)
