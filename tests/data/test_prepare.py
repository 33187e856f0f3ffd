import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.prepare import prepare_prompt_table, select_branch_prompts
from ebbflow.data.prompts import PromptError
from ebbflow.data.schema import SPLITS
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.guardrails import MIN_PROMPTS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAIRS = [first + second for first in LETTERS for second in LETTERS[:4]]
WORDS = Path(__file__).parents[2] / "datasets" / "words4" / "prompts.txt"


def recipe(**prompts: object) -> Recipe:
    return Recipe.model_validate({"prompts": {"validation": 2, "held_out": 3} | prompts})


def test_made_up_strings_have_all_splits() -> None:
    table, report = prepare_prompt_table(recipe(count=70))
    splits = table["split"].to_pylist()
    assert {name: splits.count(name) for name in ("train", "validation", "held_out")} == {
        "train": 65,
        "validation": 2,
        "held_out": 3,
    }
    assert "65 to train" in report


def test_the_words_that_come_along_can_be_trained_on() -> None:
    table, report = prepare_prompt_table(recipe(source=str(WORDS)), WORDS)
    assert table.num_rows > 500
    assert set(map(len, table["target"].to_pylist())) == {4}
    assert "0 duplicates" in report


@pytest.mark.parametrize("line", ['"HELLO"', '"A1"', 'a sign: "OK"', '"AB CD"'])
def test_what_the_glyph_model_cannot_draw_is_said_at_once(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f'"W{letter}"\n' for letter in "ABCDEFG") + line + "\n")
    with pytest.raises(PromptError, match=r"1 of 8 prompts are not 1 to 4 letters"):
        prepare_prompt_table(recipe(source=str(file)), file)


def test_what_a_glyph_model_draws_depends_on_its_alphabets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(
        "".join(f'"{text}"\n' for text in ("12", "34", "5678", "90", "77", "31", "ABCD", "ab"))
    )

    def prepared(*alphabets: str) -> str:
        settings = recipe(source=str(file)).model_dump(mode="json") | {
            "model": {"training": {"alphabets": alphabets}},
            "stages": [{"kind": "offline", "prompts": 2}],
        }
        return prepare_prompt_table(Recipe.model_validate(settings), file)[1]

    assert "to train" in prepared("digits", "capitals")
    with pytest.raises(
        PromptError,
        match=(
            r"2 of 8 prompts are not 1 to 4 letters 0-9, as .* or add to model.training.alphabets"
        ),
    ):
        prepared("digits")


def mixture(
    tmp_path: Path, stages: dict[str, int], **files: list[str]
) -> tuple[Recipe, list[Path]]:
    paths = [tmp_path / f"{name}.txt" for name in files]
    for path, lines in zip(paths, files.values(), strict=True):
        path.write_text("".join(f'"{line}"\n' for line in lines))
    sets = [
        {"source": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)
    ]
    stage = {"kind": "online", "prompts_per_step": 4} | stages
    return (
        Recipe.model_validate(
            {"prompts": {"mixture": sets, "validation": 1, "held_out": 2}, "stages": [stage]}
        ),
        paths,
    )


def test_a_mixture_has_the_prompts_of_all_files_once(tmp_path: Path) -> None:
    recipe, files = mixture(
        tmp_path, {}, one=["AA", "AB", "AC", "AD", "AE", "AF"], two=["BA", "AB", "BC", "BD", "BE"]
    )
    table, report = prepare_prompt_table(recipe, *files)
    assert table["target"].to_pylist() == [
        "AA",
        "AB",
        "AC",
        "AD",
        "AE",
        "AF",
        "BA",
        "BC",
        "BD",
        "BE",
    ]
    assert table["source"].to_pylist() == ["one.txt"] * 6 + ["two.txt"] * 4
    assert "1 in several files, taken from the first; 7 to train" in report


def test_a_set_with_too_few_prompts_is_said_at_once(tmp_path: Path) -> None:
    recipe, files = mixture(
        tmp_path,
        {"prompts_per_step": 12},
        one=["AA", "AB"],
        two=["BA", "BB", "BC", "BD", "BE", "BF"] * 9,
    )
    with pytest.raises(PromptError, match=r"stages.0 needs"):
        prepare_prompt_table(recipe, *files)
    recipe, files = mixture(
        tmp_path, {}, one=["AA", "AB"], two=[f"{a}{b}" for a in "CDE" for b in "FGHIJ"]
    )
    with pytest.raises(
        PromptError,
        match=(
            r"stages.0 needs 3 different prompts of one.txt per step and [012] are left for"
            r" training"
        ),
    ):
        prepare_prompt_table(recipe, *files)


def test_too_few_prompts_for_a_stage_is_said_at_once() -> None:
    with pytest.raises(
        PromptError, match=r"stages.1 needs 64 different prompts per step and 45 are left"
    ):
        prepare_prompt_table(recipe(count=50))


def test_a_files_split_does_not_follow_the_seed() -> None:
    one, other = (
        prepare_prompt_table(recipe(source=str(WORDS)).model_copy(update={"seed": seed}), WORDS)[0]
        for seed in (1, 2)
    )
    assert one["split"] == other["split"]


def held_out_file(folder: Path, *words: str) -> Path:
    (folder / "benchmark.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f'"{word}"', "tag": word[0]}) for word in words)
    )
    return folder / "benchmark.jsonl"


def test_held_out_prompts_of_their_own_file_are_all_of_it_and_not_trained_on(
    tmp_path: Path,
) -> None:
    with WORDS.open() as file:
        shared = [next(file).strip().strip('"') for _ in range(2)]
    judged = held_out_file(tmp_path, "ZZA", *shared, "ZZB")
    plain = prepare_prompt_table(recipe(source=str(WORDS)), WORDS)[0]
    table, report = prepare_prompt_table(
        recipe(source=str(WORDS), held_out_source=str(judged), held_out=4), WORDS, held_out=judged
    )
    rows = table.to_pylist()
    assert [
        (row["prompt_id"], row["target"]) for row in rows if row["split"] == "held_out"
    ] == list(enumerate(["ZZA", *shared, "ZZB"]))
    assert {row["source"] for row in rows if row["split"] == "held_out"} == {"benchmark.jsonl"}
    assert json.loads(rows[0]["metadata"]) == {"tag": "Z"}
    others = [row for row in rows if row["split"] != "held_out"]
    assert [row["target"] for row in others] == [
        text for text in plain["target"].to_pylist() if text not in shared
    ]
    assert [row["prompt_id"] for row in others] == list(range(4, plain.num_rows + 2))
    assert sum(row["split"] == "validation" for row in others) == 2
    assert "benchmark.jsonl: 4 prompts kept" in report
    assert (
        f"2 prompts in both, not trained on; {plain.num_rows - 4} to train, 2 to validate, 4"
        " held out" in report
    )


def test_a_choice_of_a_held_out_file_is_the_same_in_every_run_and_keeps_its_noise(
    tmp_path: Path,
) -> None:
    words = [f"Z{one}{other}" for one in "ABCD" for other in "EFGH"]
    judged = held_out_file(tmp_path, *words)

    def chosen(**keys: object) -> list[tuple[int, str]]:
        table, _ = prepare_prompt_table(
            recipe(held_out_source=str(judged), held_out=5).model_copy(update=keys), held_out=judged
        )
        return [
            (row["prompt_id"], row["target"])
            for row in table.to_pylist()
            if row["split"] == "held_out"
        ]

    assert chosen() == chosen(seed=5)
    assert len(chosen()) == 5
    assert all(words[prompt_id] == word for prompt_id, word in chosen())
    assert chosen() != list(enumerate(words))[:5]


def test_what_is_wrong_with_a_held_out_file_is_said_at_once(tmp_path: Path) -> None:
    judged = held_out_file(tmp_path, "ZA", "ZB")
    with pytest.raises(
        RecipeError, match=r"held_out_source needs held_out, the number of its prompts"
    ):
        Recipe.model_validate({"prompts": {"held_out_source": str(judged)}})
    with pytest.raises(
        PromptError, match=r"held_out_source has 2 prompts; lower prompts\.held_out = 3"
    ):
        prepare_prompt_table(recipe(held_out_source=str(judged)), held_out=judged)
    judged = held_out_file(tmp_path, "ZA", "ZB", "TOOLONG")
    with pytest.raises(
        PromptError, match=r"benchmark\.jsonl: 1 of 3 prompts are not 1 to 4 letters"
    ):
        prepare_prompt_table(recipe(held_out_source=str(judged)), held_out=judged)
    (tmp_path / "benchmark.jsonl").write_text(
        '{"prompt": "a tree"}\n' * 3 + '{"prompt": "a lake"}\n{"prompt": "a sea"}'
    )
    with pytest.raises(PromptError, match=r"benchmark\.jsonl: 3 of 3 prompts name no text to read"):
        prepare_prompt_table(recipe(held_out_source=str(judged)), held_out=judged)


def prompts_with_images(folder: Path, without: int = 0) -> Path:
    """Ten prompts beside their images, each of its own grey; the last ones have none."""
    pngs = encode_pngs(
        np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 6, 3), np.uint8)
    )
    rows = []
    for index, png in enumerate(pngs):
        (folder / f"{index}.png").write_bytes(png)
        rows.append(
            {"prompt": f'a card "W{index}"'}
            | ({"image": f"{index}.png"} if index < 10 - without else {})
        )
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
        table, report = prepare_prompt_table(of_family("qwen_image_edit", source), source)
    assert decode_pngs(table["image"].to_pylist())[:, 0, 0, 0].tolist() == list(range(10))
    assert "10 prompts kept" in report


def test_an_editing_model_without_an_image_to_edit_is_said_at_once(tmp_path: Path) -> None:
    source = prompts_with_images(tmp_path, without=3)
    with pytest.raises(
        PromptError,
        match=r"prompts.jsonl: 3 of 10 prompts have no image, and qwen_image_edit edits images",
    ):
        prepare_prompt_table(of_family("qwen_image_edit", source), source)


@pytest.mark.parametrize(
    ("family", "counts", "message"),
    [
        ("flux_kontext", [1, 2, 1], r"line 2: image has 2 images, and flux_kontext takes 1; leave"),
        ("wan_flf2v", [2, 1, 2], r"line 2: image has 1 image, and wan_flf2v takes 2; write a list"),
        ("wan_flf2v", [2, 2, 3], r"line 3: image has 3 images, and wan_flf2v takes 2; leave the"),
        ("flux2_edit", [2, 2, 3], r"line 3: image has 3 images, and .*line 1 has 2; give each"),
    ],
)
def test_a_prompt_with_another_number_of_images_is_refused_by_its_line(
    tmp_path: Path, family: str, counts: list[int], message: str
) -> None:
    source = prompts_with_images(tmp_path)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    kept = [{**row, "image": [row["image"]] * n} for row, n in zip(rows, counts, strict=False)]
    source.write_text("\n".join(json.dumps(row) for row in kept))
    with pytest.raises(PromptError, match=message):
        prepare_prompt_table(of_family(family, source), source)


def test_images_that_the_model_does_not_look_at_are_warned_of(tmp_path: Path) -> None:
    source = prompts_with_images(tmp_path, without=3)
    with pytest.warns(
        UserWarning, match=r"7 of 10 prompts have an image, which qwen_image ignores"
    ):
        prepare_prompt_table(of_family("qwen_image", source), source)


@pytest.mark.parametrize(
    ("family", "guidance", "warned"), [("sd3", 1.0, True), ("sd3", 4.5, False), ("flux", 3.5, True)]
)
def test_negative_prompts_that_nothing_steers_away_from_are_warned_of(
    tmp_path: Path, family: str, guidance: float, warned: bool
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        "\n".join(
            json.dumps({"prompt": f'"W{i}"', "negative_prompt": "blurry" * (i > 3)})
            for i in range(9)
        )
    )
    recipe = of_family(family, source)
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"guidance": guidance})}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_prompt_table(recipe, source)
    assert [
        "5 of 9 prompts have a negative prompt" in str(warning.message) for warning in caught
    ] == [True] * warned


def branched(validation: int, files: list[Path]) -> Recipe:
    sets = [
        {"name": name, "source": str(path)}
        for name, path in zip(("one", "two"), files, strict=True)
    ]
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
    _, files = mixture(tmp_path, {}, one=[f"A{b}" for b in PAIRS], two=[f"B{b}" for b in PAIRS])
    recipe = branched(120, files)
    table, _ = prepare_prompt_table(recipe, *files)
    by_split = {
        split: {row["prompt_id"] for row in table.to_pylist() if row["split"] == split}
        for split in SPLITS
    }
    for name in ("one", "two"):
        rows = select_branch_prompts(recipe, table, name).to_pylist()
        branch_ids = {
            split: {row["prompt_id"] for row in rows if row["split"] == split} for split in SPLITS
        }
        assert {row["source"] for row in rows} == {name}
        assert not by_split["held_out"] & {row["prompt_id"] for row in rows}
        assert branch_ids["train"] <= by_split["train"]
        assert branch_ids["validation"] | branch_ids["held_out"] <= by_split["validation"]
        assert abs(len(branch_ids["validation"]) - len(branch_ids["held_out"])) <= 1


def test_the_gate_of_a_branch_must_be_able_to_compare(tmp_path: Path) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    files[0].write_text("".join(f'a sign "A{text}"\n' for text in PAIRS))
    files[1].write_text("".join(f"a photo of {text}\n" for text in PAIRS))
    settings = branched(120, files).model_dump(mode="json", exclude_unset=True)
    settings["prompts"]["held_out"] = 60
    settings |= {
        "model": {"family": "sd3", "path": "somewhere"},
        "rewards": ["jpeg_compressibility"],
        "guardrails": ["similarity"],
    }
    with pytest.raises(
        PromptError,
        match=r"branches\.two: guardrails: similarity can score 0 of \d+ held-out prompts",
    ):
        prepare_prompt_table(Recipe.model_validate(settings), *files)


def test_a_branch_needs_as_many_prompts_as_its_gate_compares(tmp_path: Path) -> None:
    _, files = mixture(tmp_path, {}, one=[f"A{b}" for b in PAIRS], two=[f"B{b}" for b in PAIRS])
    with pytest.raises(
        PromptError,
        match=(
            r"one has \d+ validation prompts, of which its gate compares \d+ and needs"
            rf" {MIN_PROMPTS}"
        ),
    ):
        prepare_prompt_table(branched(48, files), *files)


@pytest.mark.parametrize("held_out", [MIN_PROMPTS, MIN_PROMPTS - 1])
def test_a_guardrail_needs_as_many_prompts_as_the_gate_compares(
    tmp_path: Path, held_out: int
) -> None:
    """A run that holds out fewer prompts than the gate needs promotes nothing anyway."""
    recipe, files = mixture(
        tmp_path, {}, one=[f"A{b}" for b in PAIRS], two=[f"B{b}" for b in PAIRS]
    )
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    settings["prompts"]["held_out"] = held_out
    settings["guardrails"] = [{"name": "similarity", "prompts": ["one.txt"]}]
    recipe = Recipe.model_validate(settings)
    if held_out < MIN_PROMPTS:
        prepare_prompt_table(recipe, *files)
        return
    with pytest.raises(
        PromptError, match=rf"\d prompts are held out, and the gate compares {MIN_PROMPTS}"
    ):
        prepare_prompt_table(recipe, *files)


def test_only_prompts_of_a_reward_that_reads_need_a_text(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    signs = tmp_path / "signs.txt"
    words.write_text("".join(f'"A{b}"\n' for b in LETTERS))
    signs.write_text("".join(f"sign {b}\n" for b in LETTERS))

    def prepared(held_out: int = 12, **reads: object) -> pa.Table:
        settings = {
            "model": {"family": "sd3", "path": "somewhere"},
            "prompts": {
                "mixture": [{"source": str(words)}, {"source": str(signs)}],
                "validation": 2,
                "held_out": held_out,
            },
            "rewards": [{"name": "ocr", **reads}, "jpeg_compressibility"],
            "guardrails": [{"name": "similarity", "prompts": ["words.txt"]}],
            "stages": [{"kind": "online", "prompts_per_step": 2}],
        }
        return prepare_prompt_table(Recipe.model_validate(settings), words, signs)[0]

    assert prepared(prompts=["words.txt"]).num_rows == 2 * len(LETTERS)
    with pytest.raises(
        PromptError, match=rf"{len(LETTERS)} of {2 * len(LETTERS)} prompts name no text to read"
    ):
        prepared()
    with pytest.raises(
        PromptError,
        match=(
            r"the guardrail similarity scores words.txt, of which [01] prompts are held out, .* 2;"
            r" raise"
        ),
    ):
        prepared(held_out=2, prompts=["words.txt"])


@pytest.mark.parametrize(
    ("without_rules", "repeated", "message"),
    [
        # One of six prompts, and four of nine samples.
        ([0], 1, "0.2 of the samples to fail, here 4 of 9"),
        ([5], 1, None),
        # Two of six prompts are more than the share allows, and two of twelve samples are not.
        ([4, 5], 2, None),
        ([3, 4, 5], 1, "0.2 of the samples to fail, here 3 of 9"),
    ],
)
def test_prompts_that_a_guardrail_cannot_score_count_by_their_samples(
    tmp_path: Path, without_rules: list[int], repeated: int, message: str | None
) -> None:
    training = tmp_path / "training.txt"
    training.write_text("".join(f"a cat {letter}\n" for letter in LETTERS))
    rules = {"include": [{"class": "dog", "count": 1}]}
    rows = [
        {"prompt": f"a dog {index}"} | ({} if index in without_rules else rules)
        for index in range(6)
    ]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"family": "sd3", "path": "somewhere"},
        "prompts": {
            "source": str(training),
            "held_out_source": str(held_out),
            "validation": 2,
            "held_out": 6,
        },
        "rewards": ["jpeg_compressibility"],
        "guardrails": [{"name": "geneval", "clip": {"path": "/models/clip"}}],
        "max_failed_share": 0.2,
        "evaluation": {"samples": 4, "repeated_prompts": repeated},
        "stages": [{"kind": "online", "prompts_per_step": 2}],
    }
    run = Recipe.model_validate(settings)
    if message:
        with pytest.raises(PromptError, match=message):
            prepare_prompt_table(run, training, held_out=held_out)
    else:
        assert prepare_prompt_table(run, training, held_out=held_out)[0].num_rows == 32
