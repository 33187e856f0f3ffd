import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny_models import build_tiny
from ebbflow import preflight, run_notes
from ebbflow.algorithms.base import Algorithm
from ebbflow.algorithms.built_in.distillation import DistillationConfig
from ebbflow.data.pairs import PairError
from ebbflow.data.prompts import Prompt, PromptError
from ebbflow.evaluation.look import find_needed_prompts, find_smallest_gain
from ebbflow.models import ModelError
from ebbflow.models.families.glyph import GlyphModel
from ebbflow.preflight import check_recipe, read_prompt_table
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.algorithms import TrajectoryConfig
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rewards.base import NO_TARGET, Reward, RewardError, RewardResult
from ebbflow.run_notes import describe_passes, describe_run, describe_shares
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.policy_metadata import write_base_policy

SERVER = "https://mlflow.example"


def test_a_laptop_may_keep_everything_on_its_disk(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path)), f"sqlite:///{tmp_path}/mlflow.db", on_cluster=False)


def test_a_cluster_needs_an_output_that_outlives_the_pod(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="lost with it; give a URI"):
        check_recipe(Recipe(output=str(tmp_path)), SERVER, on_cluster=True)


def test_a_cluster_needs_a_tracking_server() -> None:
    with pytest.raises(RecipeError, match="disk of a pod; set tracking.uri"):
        check_recipe(
            Recipe(output="s3://bucket/runs"), "sqlite:////root/mlflow.db", on_cluster=True
        )
    check_recipe(Recipe(output="s3://bucket/runs"), SERVER, on_cluster=True)


def with_pairs(tmp_path: Path, pairs: str) -> Recipe:
    return Recipe.model_validate(
        {
            "output": str(tmp_path),
            "stages": [{"kind": "online"}, {"kind": "offline", "pairs": pairs}],
        }
    )


def test_a_pairs_file_must_be_there(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, str(tmp_path / "none.parquet"))
    with pytest.raises(
        RecipeError, match=r"stages\.1\.pairs = .*none\.parquet.* no such file; .*Remove it"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_pairs_file_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "p", "chosen": "a.png", "rejected": "b.png"}\n'
    )
    with pytest.raises(
        PairError, match=r"pairs\.jsonl, line 1: chosen = 'a\.png' is no image file"
    ):
        check_recipe(with_pairs(tmp_path, str(tmp_path / "pairs.jsonl")), SERVER, on_cluster=False)


def test_a_cluster_needs_pairs_at_a_uri(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, "pairs.parquet").model_copy(update={"output": "s3://bucket/runs"})
    with pytest.raises(
        RecipeError, match=r"stages\.1\.pairs = 'pairs\.parquet' is a local path.* give its URI"
    ):
        check_recipe(recipe, SERVER, on_cluster=True)
    there = with_pairs(tmp_path, "s3://bucket/pairs.parquet").model_copy(
        update={"output": "s3://bucket/runs"}
    )
    check_recipe(there, SERVER, on_cluster=True)


class Mine(TrajectoryConfig):
    """Distillation of my own."""

    stage_defaults = DistillationConfig.stage_defaults
    teacher: str = "nowhere"


MINE = Algorithm(
    Mine, lambda rows, config: (-rows.log_prob, {}), copies=lambda config: frozenset({"teacher"})
)
BROKEN = Algorithm(TrajectoryConfig, lambda rows, config: (None, {}))


def with_teacher(output: str, teacher: str, own: bool = False) -> Recipe:
    distillation = {"name": "distillation", "teacher": teacher}
    custom = {"name": "custom", "path": f"{__name__}:MINE", "options": {"teacher": teacher}}
    stages = [{"kind": "offline"}, {"kind": "online", "algorithm": custom if own else distillation}]
    return Recipe.model_validate({"output": output, "stages": stages})


def test_a_teacher_is_a_policy_folder(tmp_path: Path) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    check_recipe(with_teacher(str(tmp_path), str(tmp_path / "teacher")), SERVER, on_cluster=False)


@pytest.mark.parametrize(
    ("own", "key"),
    [(False, r"stages\.1\.algorithm\.teacher"), (True, r"stages\.1\.algorithm\.options\.teacher")],
)
def test_a_teacher_must_be_there_and_whole(tmp_path: Path, own: bool, key: str) -> None:
    def check(folder: str) -> None:
        check_recipe(
            with_teacher(str(tmp_path), str(tmp_path / folder), own), SERVER, on_cluster=False
        )

    with pytest.raises(
        RecipeError, match=rf"{key} = '.*none' is not the policy folder .*none has no COMMIT"
    ):
        check("none")
    with write_new_folder(tmp_path / "other") as folder:
        (folder / "readme.txt").write_text("no policy")
    with pytest.raises(
        RecipeError, match=rf"{key} = '.*other' is not the policy folder .* is no policy folder"
    ):
        check("other")
    write_base_policy(tmp_path / "cut", "base", "recipe", PolicyConfig())
    (tmp_path / "cut" / "policy.json").write_text("{")
    with pytest.raises(
        RecipeError,
        match=rf"{key} = '.*cut' is not the policy folder .* does not match its manifest",
    ):
        check("cut")


def test_the_teacher_of_every_prompt_set_must_be_there(tmp_path: Path) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    stage = {
        "kind": "online",
        "algorithm": {
            "name": "distillation",
            "teachers": {"a": str(tmp_path / "teacher"), "b": "none"},
        },
    }
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f'"{name}{other}"' for other in "cdefghijkl")
        )
    prompts = {
        "mixture": [{"name": name, "source": str(tmp_path / f"{name}.txt")} for name in "ab"],
        "validation": 1,
        "held_out": 2,
    }
    recipe = Recipe.model_validate({"output": str(tmp_path), "prompts": prompts, "stages": [stage]})
    with pytest.raises(
        RecipeError, match=r"stages\.0\.algorithm\.teachers\.b = 'none' is not the policy folder"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


@pytest.mark.parametrize("own", [False, True])
def test_a_cluster_needs_a_teacher_at_a_uri(tmp_path: Path, own: bool) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    with pytest.raises(RecipeError, match=r"teacher = '.*teacher' is a local path.* give its URI"):
        check_recipe(
            with_teacher("s3://bucket/runs", str(tmp_path / "teacher"), own),
            SERVER,
            on_cluster=True,
        )
    check_recipe(
        with_teacher("s3://bucket/runs", "s3://bucket/teacher", own), SERVER, on_cluster=True
    )


def with_model(tmp_path: Path, **model: object) -> Recipe:
    return Recipe.model_validate({"output": str(tmp_path), "model": model})


def test_a_base_model_of_another_family_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    with pytest.raises(
        ModelError,
        match=r"base is not a sd3 base model: model_index.json missing.* as model.revision",
    ):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(
        ModelError, match="is a FluxPipeline, and model.family = 'sd3' .* set model.family to flux"
    ):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    check_recipe(with_model(tmp_path, family="flux", path=str(folder)), SERVER, on_cluster=False)


def test_a_cluster_needs_a_base_model_that_every_pod_can_fetch(tmp_path: Path) -> None:
    shared = {"output": "s3://bucket/runs"}
    local = with_model(tmp_path, family="sd3", path="models/sd3").model_copy(update=shared)
    with pytest.raises(RecipeError, match="model.path = 'models/sd3' is a local path"):
        check_recipe(local, SERVER, on_cluster=True)
    pinned = with_model(tmp_path, family="sd3", path="owner/sd3", revision="0" * 40).model_copy(
        update=shared
    )
    check_recipe(pinned, SERVER, on_cluster=True)


def with_prompts(tmp_path: Path, text: str, **keys: object) -> Recipe:
    (tmp_path / "prompts.txt").write_text(text)
    return Recipe.model_validate(
        {"output": str(tmp_path), "prompts": {"source": str(tmp_path / "prompts.txt")}} | keys
    )


def test_a_held_out_file_is_read_and_a_reward_tried_on_it(tmp_path: Path) -> None:
    (tmp_path / "judged.jsonl").write_text(
        "".join(f'{{"prompt": "\\"Z{letter}\\""}}\n' for letter in "ABCDE")
    )
    prompts = {"held_out_source": str(tmp_path / "judged.jsonl"), "held_out": 5}
    recipe = Recipe.model_validate({"output": str(tmp_path), "prompts": prompts})
    prepared = preflight.read_prompt_table(recipe, on_cluster=False)
    assert prepared
    tried = preflight._choose_tried_prompts(recipe, prepared[0])
    assert [prompt.split == "held_out" for prompt in tried] == [False, False, True]
    check_recipe(recipe, SERVER, on_cluster=False)
    missing = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": prompts | {"held_out_source": "nowhere.csv"}}
    )
    with pytest.raises(
        RecipeError,
        match=(
            r"prompts\.held_out_source = 'nowhere\.csv': no such file; .* hold out prompts of the"
        ),
    ):
        check_recipe(missing, SERVER, on_cluster=False)
    with pytest.raises(
        RecipeError, match=r"prompts\.held_out_source = 'nowhere\.csv' is a local path"
    ):
        check_recipe(
            missing.model_copy(update={"output": "s3://bucket/runs"}), SERVER, on_cluster=True
        )
    elsewhere = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": prompts | {"held_out_source": "s3://b/geneval.jsonl"}}
    )
    assert preflight.read_prompt_table(elsewhere, on_cluster=False) is None


def test_prompts_are_read_as_the_run_will(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="name no text to read"):
        check_recipe(with_prompts(tmp_path, "a cat\na dog\n"), SERVER, on_cluster=False)
    with pytest.raises(PromptError, match=r"prompts.* held_out"):
        check_recipe(with_prompts(tmp_path, '"A"\n"B"\n'), SERVER, on_cluster=False)


@pytest.mark.parametrize("on_cluster", [True, False])
def test_a_prompt_file_that_ebbflow_does_not_ship(tmp_path: Path, on_cluster: bool) -> None:
    recipe = Recipe.model_validate(
        {"output": "s3://bucket", "prompts": {"source": "ebbflow:datasets/sings/prompts.txt"}}
    )
    with pytest.raises(
        RecipeError,
        match=(
            r"Ebbflow ships no such file; take .* ebbflow:datasets/signs/prompts\.txt or ebbflow:"
        ),
    ):
        check_recipe(recipe, SERVER, on_cluster)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ({"frames": 8}, "model.frames = 8: wan draws 1 . a multiple of 4 frames; take 9"),
        (
            {"height": 100, "width": 96},
            "model.height = 100: wan draws multiples of 32 pixels; take 96",
        ),
    ],
)
def test_a_size_that_the_base_model_cannot_draw(
    tmp_path: Path, size: dict[str, int], says: str
) -> None:
    build_tiny("wan", tmp_path / "wan")
    model = {"family": "wan", "path": str(tmp_path / "wan"), "height": 64, "width": 96}
    check_recipe(with_model(tmp_path, **model, frames=5), SERVER, on_cluster=False)
    with pytest.raises(ModelError, match=says):
        check_recipe(with_model(tmp_path, **model | size), SERVER, on_cluster=False)


def test_the_size_of_a_published_model_is_checked_without_it(tmp_path: Path) -> None:
    model = {
        "family": "wan",
        "path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "revision": "0" * 40,
        "frames": 10,
    }
    with pytest.raises(ModelError, match=r"model.frames = 10: .* take 9"):
        check_recipe(with_model(tmp_path, **model), SERVER, on_cluster=False)


def test_a_loss_of_ones_own_is_called(tmp_path: Path) -> None:
    custom = {"name": "custom", "path": f"{__name__}:BROKEN"}
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online", "algorithm": custom}]}
    )
    with pytest.raises(
        RecipeError, match=r"the loss of .*:BROKEN, .*<lambda>, returned \(a NoneType, a dict\)"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_checking_a_recipe_writes_nothing(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path / "deep" / "runs")), SERVER, on_cluster=False)
    assert list(tmp_path.iterdir()) == []


def test_a_start_is_a_policy_or_a_lora(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "notes.txt").touch()
    start = {"train": "lora", "start": {"path": str(tmp_path / "start")}}
    with pytest.raises(
        RecipeError,
        match=r"is no policy folder and holds no LoRA \(.safetensors\); name one of them",
    ):
        check_recipe(
            Recipe.model_validate({"output": str(tmp_path), "policy": start}),
            SERVER,
            on_cluster=False,
        )


def test_a_start_must_be_there(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "policy": {"train": "lora", "start": {"path": "owner/lora"}}}
    )
    with pytest.raises(
        RecipeError, match=r"policy.start.path = 'owner/lora': no such .* policy.start.revision"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_an_algorithm_on_the_gradient_of_the_reward_needs_rewards_that_have_one(
    tmp_path: Path,
) -> None:
    stages = [{"kind": "online", "algorithm": {"name": "draft"}}]
    recipe = {
        "output": str(tmp_path),
        "rewards": ["similarity"],
        "guardrails": [],
        "stages": stages,
    }
    with pytest.raises(
        RewardError,
        match="draft learns from the gradient of the rewards, and 'similarity' has none; train on",
    ):
        check_recipe(Recipe.model_validate(recipe), SERVER, on_cluster=False)


def older_family() -> type:
    """A user's own family, written for other recipes: the members of the glyph model but two."""
    left_out = ("decode_with_gradient", "set_image_size")
    members = {
        name: value
        for name, value in vars(GlyphModel).items()
        if name not in left_out and not name.startswith("__")
    }
    return type("OlderFamily", (), members)


OLDER_FAMILY = older_family()


def test_an_algorithm_on_the_gradient_of_the_reward_needs_a_family_that_decodes_with_gradient(
    tmp_path: Path,
) -> None:
    model = {"family": f"{__name__}:OLDER_FAMILY", "path": "s3://bucket/base"}
    recipe = {"output": str(tmp_path), "rewards": ["recognizer"], "guardrails": [], "model": model}
    with pytest.raises(
        ModelError,
        match=r"draft learns .* rewards, and OlderFamily has no decode_with_gradient\(latents\)",
    ):
        check_recipe(
            Recipe.model_validate(recipe | {"stages": [on_gradient("draft")]}),
            SERVER,
            on_cluster=False,
        )
    check_recipe(
        Recipe.model_validate(recipe | {"stages": [on_gradient("mix_grpo")]}),
        SERVER,
        on_cluster=False,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": [{"kind": "online", "sizes": [{"height": 64, "width": 64}]}]},
        {"evaluation": {"height": 64}},
    ],
)
def test_several_sizes_need_a_family_that_generates_in_them(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    recipe = {
        "output": str(tmp_path),
        "model": {"family": f"{__name__}:OLDER_FAMILY", "path": "s3://bucket/base"},
    }
    with pytest.raises(
        ModelError, match=r"OlderFamily has no set_image_size\(height, width\); write one"
    ):
        check_recipe(Recipe.model_validate(recipe | settings), SERVER, on_cluster=False)


def on_gradient(algorithm: str) -> dict[str, object]:
    return {"kind": "online", "algorithm": {"name": algorithm}}


def test_the_sizes_of_a_stage_must_be_drawable(tmp_path: Path) -> None:
    build_tiny("sd3", tmp_path / "sd3")
    stages = [
        {"kind": "online", "sizes": [{"height": 64, "width": 64}, {"height": 40, "width": 64}]}
    ]
    model = {"family": "sd3", "path": str(tmp_path / "sd3"), "height": 64, "width": 64}
    recipe = Recipe.model_validate({"output": str(tmp_path), "model": model, "stages": stages})
    with pytest.raises(
        ModelError,
        match=r"stages\.0\.sizes\.1\.height = 40: sd3 draws multiples of 16 pixels; take 32",
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_the_size_of_an_evaluation_must_be_drawable(tmp_path: Path) -> None:
    build_tiny("sd3", tmp_path / "sd3")
    model = {"family": "sd3", "path": str(tmp_path / "sd3"), "height": 64, "width": 64}
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "model": model, "evaluation": {"height": 96, "width": 68}}
    )
    with pytest.raises(
        ModelError, match=r"evaluation\.width = 68: sd3 draws multiples of 16 pixels; take 64"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


class OnlySigns(Reward):
    """A reward that cannot score other prompts."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        assert [prompt.source for prompt in prompts] == ["signs", "signs"]
        return RewardResult(np.zeros(len(images)))


def test_a_reward_of_a_prompt_set_is_tried_on_its_prompts(tmp_path: Path) -> None:
    for name in ("words", "signs"):
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f'"{name[0]}{other}"' for other in "cdefghijkl")
        )
    sets = [{"name": name, "source": str(tmp_path / f"{name}.txt")} for name in ("words", "signs")]
    settings = {
        "output": str(tmp_path),
        "prompts": {"mixture": sets, "validation": 1, "held_out": 2},
        "rewards": [
            {"name": "similarity", "prompts": ["words"]},
            {"name": f"{__name__}:OnlySigns", "prompts": ["signs"]},
        ],
        "stages": [{"kind": "online", "prompts_per_step": 2}],
        "guardrails": [],
    }
    check_recipe(Recipe.model_validate(settings), SERVER, on_cluster=False)


STUDENT = {"kind": "online", "algorithm": {"name": "dmd2"}}
LEARNING_ON = {
    "kind": "online",
    "algorithm": {"name": "diffusion_nft"},
    "sampler": {"name": "ode", "steps": 4},
}


@pytest.mark.parametrize("stages", [[STUDENT], [{"kind": "online"}, STUDENT, LEARNING_ON]])
def test_a_student_that_is_evaluated_with_another_sampler_is_warned_of(
    tmp_path: Path, stages: list[dict[str, object]]
) -> None:
    of_student = {"sampler": "cps", "eta": 1.0, "steps": 4}
    for other in ({}, {"steps": 4}, of_student | {"eta": 0.8}, of_student | {"steps": 8}):
        recipe = Recipe.model_validate(
            {"output": str(tmp_path), "stages": stages, "evaluation": other}
        )
        says = rf"stages\.{len(stages) // 2} .*set evaluation: \{{sampler: cps, eta: 1, steps: 4\}}"
        with pytest.warns(UserWarning, match=says):
            check_recipe(recipe, SERVER, on_cluster=False)
    # Without guardrails: on a machine without tesseract, leaving that one out is a warning, too.
    settings = {"stages": stages, "evaluation": of_student, "guardrails": []}
    recipe = Recipe.model_validate({"output": str(tmp_path)} | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_recipe(recipe, SERVER, on_cluster=False)


PLAIN = "".join(f"a photo of {number} cats\n" for number in range(40))
"""Prompts that name no text."""
SMALL = {"validation": 4, "held_out": 8}


def on_plain_prompts(tmp_path: Path, **keys: object) -> Recipe:
    (tmp_path / "plain.txt").write_text(PLAIN)
    settings = {
        "output": str(tmp_path),
        "model": {"family": f"{__name__}:OLDER_FAMILY", "path": "s3://bucket/base"},
        "prompts": {"source": str(tmp_path / "plain.txt"), **SMALL},
        "rewards": ["jpeg_incompressibility"],
        "stages": [{"kind": "online", "steps": 7}],
    }
    return Recipe.model_validate(settings | keys)


def test_default_guardrails_that_read_are_left_out_of_prompts_without_text(tmp_path: Path) -> None:
    recipe = on_plain_prompts(tmp_path)
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    assert [note for note in notes if "guardrails" in note] == [
        (
            "guardrails are left out by default where they cannot be scored: tesseract,"
            " similarity, as 0 of 8 held-out prompts name a text to read"
        )
    ]


def test_a_guardrail_of_few_held_out_prompts_is_refused(tmp_path: Path) -> None:
    """The gate would refuse every policy of the run at its end."""
    texts = "".join(f'a sign that says "SIGN {number}"\n' for number in range(4))
    plain = "".join(f"a drawing of {number} dogs\n" for number in range(20))
    (tmp_path / "judged.txt").write_text(texts + plain)
    (tmp_path / "plain.txt").write_text(PLAIN)
    prompts = {
        "source": str(tmp_path / "plain.txt"),
        "held_out_source": str(tmp_path / "judged.txt"),
        "validation": 4,
        "held_out": MIN_PROMPTS,
    }
    recipe = on_plain_prompts(tmp_path, prompts=prompts, guardrails=["similarity"])
    with pytest.raises(
        PromptError, match="similarity can score 4 of 24 held-out prompts, and the gate compares 24"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


@pytest.mark.parametrize(("family", "expected"), [("ltx2", 1), ("ltx_video", 0)])
def test_a_family_whose_pipeline_generates_otherwise_says_so(family: str, expected: int) -> None:
    recipe = Recipe.model_validate({"model": {"family": family, "path": "/models/ltx"}})
    notes = [note for note in describe_run(recipe, None) if "further guidance" in note]
    assert len(notes) == expected
    assert all(note.startswith("model.family = ltx2: video and sound are") for note in notes)


@pytest.mark.parametrize(("held_out", "samples"), [(64, 1), (128, 4)])
def test_the_smallest_gain_that_the_gate_can_prove_is_said(held_out: int, samples: int) -> None:
    recipe = Recipe.model_validate(
        {"prompts": {"held_out": held_out}, "evaluation": {"samples": samples}}
    )
    notes = describe_run(recipe, read_prompt_table(recipe, on_cluster=False))
    promotion = recipe.promotion
    share = promotion.error_budget / promotion.looks_per_year
    gain = find_smallest_gain(held_out, share, samples)
    (note,) = [note for note in notes if note.startswith("the gate decides on")]
    assert f"{held_out} held-out prompts" in note
    assert f"it proves a gain of {gain:.2g} standard deviations" in note
    needed = find_needed_prompts(gain / 2, share, samples)
    assert note.endswith(f"half of that needs about {needed} prompts")


def test_too_few_held_out_prompts_for_any_promotion_are_said(tmp_path: Path) -> None:
    notes = check_recipe(on_plain_prompts(tmp_path), SERVER, on_cluster=False)
    (note,) = [note for note in notes if note.startswith("the gate decides on")]
    assert "8 held-out prompts, which are too few: it promotes nothing below 24" in note


@pytest.mark.parametrize("guardrails", [[], ["jpeg_compressibility"]])
def test_a_recipe_without_guardrails_is_told_so(tmp_path: Path, guardrails: list[str]) -> None:
    notes = check_recipe(
        on_plain_prompts(tmp_path, guardrails=guardrails), SERVER, on_cluster=False
    )
    says_so = any("no guardrails are named" in note for note in notes)
    assert says_so == (not guardrails)


@pytest.mark.parametrize("guardrails", [["similarity"], ["ocr", "similarity"]])
def test_named_guardrails_that_nothing_can_be_scored_with_are_refused(
    tmp_path: Path, guardrails: list[str]
) -> None:
    recipe = on_plain_prompts(tmp_path, guardrails=guardrails)
    with pytest.raises(
        PromptError,
        match=(
            rf"guardrails: {guardrails[0]} can score 0 of 8 held-out prompts, and the gate compares"
            rf" 2, so that no policy of this run could be promoted where {guardrails[0]} can run;"
            r" take it out of 'guardrails'.* it names no text to read: quote the text"
        ),
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_reward_must_be_able_to_score_every_held_out_prompt(tmp_path: Path) -> None:
    geneval = {"name": "geneval", "path": "/m", "clip": {"path": "/c"}}
    with pytest.raises(
        PromptError,
        match=(
            r"the reward geneval can score 0 of 8 held-out prompts, and the gate promotes no policy"
            r" without a reward for each; .*no rules of GenEval"
        ),
    ):
        check_recipe(on_plain_prompts(tmp_path, rewards=[geneval]), SERVER, on_cluster=False)


class Reads(Reward):
    """A reward of my own that reads."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        reasons = dict.fromkeys(range(len(images)), NO_TARGET)
        return RewardResult(np.full(len(images), np.nan), failures=reasons)


class FindsNothing(Reward):
    """A reward of my own that finds no face in noise."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        reasons = dict.fromkeys(range(len(images)), "no face")
        return RewardResult(np.full(len(images), np.nan), failures=reasons)


def test_a_reward_of_ones_own_without_a_score_is_refused_only_for_its_prompts(
    tmp_path: Path,
) -> None:
    with pytest.raises(RewardError, match="scores none of the 2 prompts .* names no text"):
        check_recipe(
            on_plain_prompts(tmp_path, rewards=[f"{__name__}:Reads"]), SERVER, on_cluster=False
        )
    notes = check_recipe(
        on_plain_prompts(tmp_path, rewards=[f"{__name__}:FindsNothing"]), SERVER, on_cluster=False
    )
    assert any(
        "FindsNothing gave no score to any of 2 images of noise (no face)" in n for n in notes
    )


def test_how_often_a_prompt_comes_back_is_said(tmp_path: Path) -> None:
    recipe = on_plain_prompts(tmp_path, rounds=2)
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    # 28 prompts are left to train on; 2 rounds of 7 steps take 8 each: 112.
    assert "28 to train, 4 to validate, 8 held out" in notes[0]
    assert notes[1] == "28 prompts to train on, each sampled about 4 times in the run"


def test_prompts_of_a_stage_from_the_base_model_come_back_in_the_first_round_alone(
    tmp_path: Path,
) -> None:
    online = {"kind": "online", "steps": 7, "prompts_per_step": 8}
    recipe = on_plain_prompts(
        tmp_path, rounds=4, stages=[online | {"only_from_base": True}, online]
    )
    # 28 prompts; 1 round of the one stage and 4 of the other take 56 each: 280.
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    assert notes[1] == "28 prompts to train on, each sampled about 10 times in the run"


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"group_size": 16, "micro_batch": 64}, []),
        (
            {"group_size": 16, "micro_batch": 48, "updates_per_step": 2},
            [
                (
                    "stages.0.micro_batch = 48: rollouts of a step in passes of unequal size (2 of"
                    " 48, 1 of 32 samples); 48 does not divide the 64 samples of an update; 32"
                    " divides every batch of the stage"
                )
            ],
        ),
        (
            {"group_size": 24, "micro_batch": 9, "updates_per_step": 1},
            [
                (
                    "stages.0.micro_batch = 9: passes have 8 samples, as groups of 24 are split"
                    " evenly; 8 divides every batch of the stage"
                )
            ],
        ),
        (
            {"group_size": 7, "micro_batch": 3, "prompts_per_step": 6, "updates_per_step": 4},
            [
                (
                    "stages.0.micro_batch = 3: rollouts of a step in passes of unequal size (6 of"
                    " 3, 12 of 2 samples); 1 divides every batch of the stage"
                )
            ],
        ),
        (
            {"kind": "offline", "batch_size": 100},
            [
                (
                    "stages.0.micro_batch = 64: 64 does not divide the 100 samples of an optimiser"
                    " step; 4 divides every batch of the stage"
                )
            ],
        ),
    ],
)
def test_passes_of_unequal_size_are_said(
    tmp_path: Path, stage: dict[str, object], says: list[str]
) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online"} | stage]}
    )
    assert describe_passes(recipe) == says


class Brightness(Reward):
    """A reward that reads no prompt."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(images.mean((1, 2, 3)))


class Loudness(Reward):
    """A reward that reads prompts."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(images.mean((1, 2, 3)) + [len(prompt.prompt) for prompt in prompts])


@pytest.mark.parametrize(
    ("rewards", "warns"),
    [
        (["jpeg_compressibility", f"{__name__}:Brightness"], True),
        (["jpeg_compressibility", f"{__name__}:Loudness"], False),
        ([f"{__name__}:Brightness", "clipscore"], False),
    ],
)
def test_rewards_that_read_no_prompt_are_warned_of(
    tmp_path: Path, rewards: list[str], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The network of CLIPScore is not on this machine.
    monkeypatch.setattr(preflight, "_check_rewards", lambda recipe: None)
    (tmp_path / "words.txt").write_text("".join(f"{'a' * n} cats\n" for n in range(1, 40)))
    prompts = {"source": str(tmp_path / "words.txt"), **SMALL}
    recipe = on_plain_prompts(tmp_path, prompts=prompts, rewards=rewards)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_recipe(recipe, SERVER, on_cluster=False)
    texts = [str(warning.message) for warning in caught]
    says = [text for text in texts if "no score depends on the prompt" in text]
    expected = "rewards: no score depends on the prompt (jpeg_compressibility, Brightness)"
    assert len(says) == warns
    assert all(text.startswith(expected) for text in says)


def note_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: int, *stages: dict[str, Any]
) -> list[str]:
    """The notes about GPUs of a recipe with these online stages, on a machine with so many."""
    monkeypatch.setattr(run_notes, "count_gpus", lambda: num_gpus)
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online"} | stage for stage in stages]}
    )
    return [note for note in check_recipe(recipe, SERVER, on_cluster=False) if "GPU" in note]


def test_gpus_that_this_machine_has_not_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"training": {"gpus": 1}, "rollout": {"count": 2, "gpus": 1}}
    split = {"placement": "ray", "resources": resources}
    assert note_gpus(monkeypatch, tmp_path, 1, {}, split) == [
        "stages.1.resources ask for 3 GPUs, and this machine has 1: here the stage would not start"
    ]


def test_gpus_that_a_stage_in_one_process_leaves_idle_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reusing = {
        "algorithm": {"name": "flow_grpo"},
        "reuse_rollout_forward": True,
        "updates_per_step": 1,
    }
    notes = note_gpus(monkeypatch, tmp_path, 8, {}, {"placement": "colocated"}, reusing)
    assert notes == [
        "stages.0 runs on one of the 8 GPUs of this machine; with placement: colocated all of them"
        " generate and train"
    ]


def test_a_run_that_is_started_from_the_root_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(RecipeError, match=r"output = 'runs' would be /runs, as the working direct"):
        check_recipe(Recipe(), SERVER, on_cluster=False)


def test_idle_processes_of_a_colocated_stage_are_said() -> None:
    stage = {"kind": "online", "placement": "colocated", "group_size": 16, "micro_batch": 32}
    recipe = Recipe.model_validate({"stages": [stage | {"prompts_per_step": 12}]})
    assert describe_shares(recipe, 3) == []
    assert describe_shares(recipe, 8) == [
        "stages.0: a step has 6 requests of 2 prompts for 8 processes, so 2 of them wait while the"
        " others generate; raise prompts_per_step or lower micro_batch"
    ]


def test_all_errors_of_a_recipe_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = f"""
name: wrong
output: {tmp_path}/file/runs
prompts:
  source: {tmp_path}/none.txt
stages:
  - kind: online
  - kind: offline
    pairs: {tmp_path}/none.parquet
policy:
  start: {{path: {tmp_path}/none}}
rewards:
  - "no_such_module:score"
"""
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        check_recipe(load_recipe(path), SERVER, on_cluster=False)
    lines = str(raised.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(" = ")[0] for line in lines] == [
        "3: output",
        "5: prompts.source",
        "9: stages.1.pairs",
        "13: no_such_module:score cannot be imported (No module named 'no_such_module'); install"
        " its package, put it beside the recipe or in the working directory, or put its folder on"
        " PYTHONPATH",
        "11: policy.start.path",
    ]


def test_a_single_error_keeps_its_type_and_gets_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    (tmp_path / "few.txt").write_text("a cat\n")
    path.write_text(f"name: wrong\noutput: {tmp_path}\nprompts:\n  source: few.txt\n")
    with pytest.raises(PromptError, match=rf"^{path}:3: "):
        check_recipe(load_recipe(path), SERVER, on_cluster=False)
