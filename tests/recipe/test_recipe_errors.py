"""What an error of a recipe says: file and line, the nearest name, and what the key means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from tasks.deployment import DeploymentError, read_deployment


def explained(tmp_path: Path, text: str) -> list[str]:
    """The lines of the error, with ``FILE`` for the file."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    return str(error.value).replace(str(path), "FILE").splitlines()


STAGES = """\
name: mine
common: &common
  steps: 0
stages:
  - kind: online
    algorithm:
      name: mix_grpo
      clip_range: -1
  - kind: offline
    promts: 3
"""


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    first, *lines = explained(tmp_path, STAGES)
    assert first == "this recipe cannot be run:"
    assert [line.partition(": ")[0] for line in lines] == ["FILE:8", "FILE:10", "FILE:2"]
    assert "stages.0.online.algorithm.mix_grpo.clip_range = -1" in lines[0]
    assert "did you mean 'prompts'?" in lines[1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nname: a\nseed: 2\n", "FILE:3:1: not valid YAML: given twice: ['seed']"),
        ("seed: 1\nname: [\n", "FILE:3:1: not valid YAML: "),
        ("name: a\nrewards:\n- ocr\n- {name: nothing}\n", "FILE:4: rewards.1: "),
        ("name: a\nstages:\n- algorithm: {name: sft}\n", "FILE:3: stages.0: "),
        (
            "base: &base {steps: 5}\nstages:\n- kind: online\n  <<: *base\n  step: 5\n",
            "FILE:5: stages.0.online.step: ",
        ),
        (
            "name: a\nprompts:\n  source: https://me:hunter2@example.com/x\n",
            "FILE:3: prompts.source holds a password",
        ),
        ("name: 2020-01-01\nseed: 0\nthreads: 2020-01-01\n", "FILE:3: threads = "),
    ],
)
def test_the_line_is_that_of_the_key(tmp_path: Path, text: str, line: str) -> None:
    assert any(found.startswith(line) for found in explained(tmp_path, text)), explained(
        tmp_path, text
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "stages:\n- kind: online\n  algorithm: flow_grpo\n",
            "FILE:3: stages.0.online.algorithm = 'flow_grpo': must be a section, not a value; write"
            " {name: flow_grpo}, with name one of awm, ",
        ),
        (
            "prompts: mine.txt\n",
            "FILE:1: prompts = 'mine.txt': must be a section, not a value; its keys are source, ",
        ),
        ("stages:\n- steps: 3\n", "FILE:2: stages.0: the key 'kind' is missing"),
        (
            "rewards: similarity\n",
            "FILE:1: rewards = 'similarity': must be a list; write each item on a line of its own"
            " that begins with '- '",
        ),
        (
            "stages:\n- kind: online\n  latent_weights: 2\n",
            "FILE:3: stages.0.online.latent_weights = 2: must be a section; write each entry on a"
            " line of its own as 'NAME: VALUE'",
        ),
    ],
)
def test_a_value_of_another_shape_is_explained_in_words_of_yaml(
    tmp_path: Path, text: str, says: str
) -> None:
    _, line = explained(tmp_path, text)
    assert line.startswith(says), line


def test_a_text_without_a_file_has_no_lines() -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate({"seed": -1})
    assert str(error.value).splitlines()[1].startswith("seed = -1: ")


def test_a_deployment_has_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("light:\n  cpu: 2\n  men: 1Gi\n")
    with pytest.raises(DeploymentError) as error:
        read_deployment({"EBBFLOW_DEPLOYMENT": str(path)})
    assert f"{path}:3: light.men: unknown key; did you mean 'mem'?" in str(error.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"stages": [{"kind": "online", "algorithm": {"name": "flowgrpo"}}]},
            "algorithm.name = 'flowgrpo': did you mean 'flow_grpo'?",
        ),
        (
            {"stages": [{"kind": "online", "algorithm": {"name": "nft"}}]},
            "did you mean 'diffusion_nft'?",
        ),
        (
            {"stages": [{"kind": "onlin"}]},
            "stages.0.kind = 'onlin': did you mean 'online'? Take online, offline, custom",
        ),
        (
            {"stages": [{"kind": "online", "sampler": {"name": "flow-sde"}}]},
            "did you mean 'flow_sde'? Take cps, dance_sde",
        ),
        (
            {"stages": [{"kind": "online", "window": {"kind": "progresive"}}]},
            "did you mean 'progressive'? Take all",
        ),
        (
            {"stages": [{"kind": "online", "advantages": {"std": "groups"}}]},
            "did you mean 'group'? Take global, group, none",
        ),
        ({"rewards": ["pickscor"]}, "did you mean 'pickscore'?"),
        ({"model": {"family": "sd35", "path": "x"}}, "model.family = 'sd35': did you mean 'sd3'?"),
        ({"model": {"precision": "bf16"}}, "Take float32, bfloat16, float16"),
    ],
)
def test_a_wrong_value_has_the_nearest_right_one(data: dict, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(data)
    assert words in str(error.value)


def test_approval_is_hours_and_not_yes() -> None:
    with pytest.raises(
        RecipeError,
        match=r"promotion.approval = True: .*number. Hours in which a person must approve a policy",
    ):
        Recipe.model_validate({"promotion": {"approval": True}})


def test_a_missing_recipe_has_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "portraits.yaml").write_text("name: a\n")
    with pytest.raises(RecipeError, match=r"did you mean .*/portraits\.yaml\?"):
        load_recipe(tmp_path / "portrait.yaml")
    with pytest.raises(RecipeError, match=r"did you mean workflows/recipes/glyph_lora\.yaml\?"):
        load_recipe("glyph_lra.yaml")


# Paths


def paths_of(folder: Path, text: str) -> tuple[str | None, str | None, str | None]:
    (folder / "mine.yaml").write_text(text)
    recipe = load_recipe(folder / "mine.yaml")
    return recipe.prompts.source, recipe.model.path, recipe.stages[0].pairs


WITH_PATHS = """\
model: {family: sd3, path: base}
prompts: {source: prompts.txt}
stages: [{kind: offline, pairs: more/pairs.jsonl}]
"""


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    (folder / "base").mkdir(parents=True)
    (folder / "more").mkdir()
    for name in ("prompts.txt", "more/pairs.jsonl"):
        (folder / name).touch()
    monkeypatch.chdir(tmp_path)
    assert paths_of(folder, WITH_PATHS) == (
        "recipes/prompts.txt",
        "recipes/base",
        "recipes/more/pairs.jsonl",
    )
    monkeypatch.chdir(folder)
    assert paths_of(folder, WITH_PATHS) == ("prompts.txt", "base", "more/pairs.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert paths_of(folder, WITH_PATHS) == tuple(
        str(folder / name) for name in ("prompts.txt", "base", "more/pairs.jsonl")
    )


def test_a_path_from_the_working_directory_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "prompts.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert paths_of(tmp_path / "recipes", WITH_PATHS) == ("prompts.txt", "base", "more/pairs.jsonl")
    assert (
        load_recipe("recipes/mine.yaml").digest
        == load_recipe(tmp_path / "recipes" / "mine.yaml").digest
    )
    (tmp_path / "recipes" / "prompts.txt").touch()
    with pytest.warns(
        UserWarning,
        match="prompts.txt is in recipes and in the working directory; the first is used",
    ):
        assert load_recipe("recipes/mine.yaml").prompts.source == "recipes/prompts.txt"


def test_what_a_hub_or_a_uri_holds_has_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes" / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    pinned = (
        f"model: {{family: sd3, path: owner/name, revision: '{'0' * 40}'}}\nprompts: {{source:"
        " 's3://bucket/p.txt'}\n"
    )
    assert paths_of(tmp_path / "recipes", pinned + "stages: [{kind: offline}]") == (
        "s3://bucket/p.txt",
        "owner/name",
        None,
    )


def test_another_caller_may_pass_a_context_of_its_own() -> None:
    recipe = Recipe()
    assert Recipe.model_validate_json(recipe.model_dump_json(), context={"flyte": True}) == recipe


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "gradient_checkpointing_every: 2",
            "gradient_checkpointing_every = 2 chooses among recomputed blocks; set gradient_ch",
        ),
        (
            "fsdp: {gather: bfloat16}",
            (
                "fsdp.gather = 'bfloat16' computes in bfloat16, and precision is float32; set"
                " that, too"
            ),
        ),
    ],
)
def test_a_key_of_memory_that_would_do_nothing_is_refused(
    tmp_path: Path, model: str, said: str
) -> None:
    assert any(said in line for line in explained(tmp_path, f"model:\n  {model}\n"))
