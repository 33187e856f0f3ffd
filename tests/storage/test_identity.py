"""Digests follow the code and the inputs of a run, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbflow.recipe import Recipe, paths
from ebbflow.storage import identity
from ebbflow.storage.identity import (
    compute_code_digest,
    compute_inputs_digest,
    digest_named_weights,
)


def test_the_code_digest_follows_every_source_and_no_place(tmp_path: Path) -> None:
    def copied(name: str, **changes: str) -> str:
        folder = tmp_path / name
        for path, text in ({"a.py": "1", "b/c.html": "2", "notes.md": "3"} | changes).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return compute_code_digest(folder)

    same = copied("one")
    assert copied("two") == same
    assert copied("three", **{"notes.md": "4"}) == same
    # The prompts that an installed package has and the package of a clone has not.
    assert copied("seven", **{"datasets/signs/prompts.txt": "a sign"}) == same
    assert copied("nine", **{"datasets/signs/loader.py": ""}) != same
    assert copied("eight", **{"rewards/question.txt": "Is it?"}) != same
    assert (
        len(
            {
                same,
                copied("four", **{"a.py": "2"}),
                copied("five", **{"b/c.html": "3"}),
                copied("six", **{"b/d.py": ""}),
            }
        )
        == 4
    )


def test_the_code_digest_follows_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_digest = compute_code_digest(tmp_path)
    installed = identity.version
    with monkeypatch.context() as patch:
        patch.setattr(
            identity, "version", lambda name: "0.0" if name == "torch" else installed(name)
        )
        # As another process, whose versions are others.
        identity._list_versions.cache_clear()
        assert compute_code_digest(tmp_path) != old_digest
    identity._list_versions.cache_clear()
    assert compute_code_digest(tmp_path) == old_digest


@pytest.mark.parametrize("committed", [True, False])
def test_inputs_in_a_folder(tmp_path: Path, committed: bool) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "weights").write_text("one")
    if committed:
        (folder / "COMMIT").write_text("digest")
    recipe = Recipe.model_validate({"model": {"path": str(folder)}})
    old_digest = compute_inputs_digest(recipe)
    assert compute_inputs_digest(recipe) == old_digest
    (folder / ("COMMIT" if committed else "weights")).write_text("another")
    assert compute_inputs_digest(recipe) != old_digest


def test_the_teachers_of_prompt_sets_are_inputs(tmp_path: Path) -> None:
    stage = {
        "kind": "online",
        "algorithm": {"name": "distillation", "teachers": {"words": str(tmp_path)}},
    }
    mixture = [{"name": "words", "source": "s3://bucket/words.txt"}]
    recipe = Recipe.model_validate({"prompts": {"mixture": mixture}, "stages": [stage]})
    (tmp_path / "COMMIT").write_text("one")
    old_digest = compute_inputs_digest(recipe)
    (tmp_path / "COMMIT").write_text("another")
    assert compute_inputs_digest(recipe) != old_digest


def test_inputs_that_ebbflow_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "datasets" / "mine" / "prompts.txt"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    monkeypatch.setattr(paths, "SHIPPED_HOME", tmp_path)
    recipe = Recipe.model_validate({"prompts": {"source": "ebbflow:datasets/mine/prompts.txt"}})
    old_digest = compute_inputs_digest(recipe)
    file.write_text("another")
    assert compute_inputs_digest(recipe) != old_digest


def test_inputs_of_ones_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "own_rewards"
    package.mkdir()
    for name in ("__init__", "used", "helper"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.model_validate({"rewards": ["own_rewards.used:Reward"]})
    old_digest = compute_inputs_digest(recipe)
    (package / "helper.py").write_text("changed = True")
    assert compute_inputs_digest(recipe) != old_digest


@pytest.mark.parametrize(
    "text",
    [
        "Is it true: " + 60 * "very " + "good?",
        "no: such",
        "__main__:Reward",
        "nowhere.at_all:Reward",
    ],
)
def test_a_text_that_only_looks_like_a_name(text: str) -> None:
    reward = {"name": "json:loads", "options": {"question": text}}
    recipe = Recipe.model_validate({"rewards": [reward]})
    assert compute_inputs_digest(recipe) == compute_inputs_digest(recipe)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"model": {"path": "owner/name", "revision": "0" * 40}},
        {"policy": {"start": {"path": "s3://bucket/policy"}}},
    ],
)
def test_what_is_elsewhere_is_taken_as_unchanged(named: dict[str, Any]) -> None:
    assert compute_inputs_digest(Recipe.model_validate(named)) == compute_inputs_digest(
        Recipe.model_validate(named)
    )


def test_weights_are_named_by_their_contents_or_commit(tmp_path: Path) -> None:
    """Two files of one size and time are other weights."""
    folder = tmp_path / "clip"
    folder.mkdir()
    (folder / "model.safetensors").write_text("one")
    commit = "a" * 40
    reward = {
        "weights": {"path": "owner/name", "revision": commit},
        "tokenizer": {"path": str(folder), "revision": None},
        "weight": 1.0,
    }
    first = digest_named_weights({"pickscore": reward})
    assert first["pickscore.weights"] == f"owner/name@{commit}"
    assert len(first["pickscore.tokenizer.path"]) == 64
    (folder / "model.safetensors").write_text("two")
    second = digest_named_weights({"pickscore": reward})
    assert {key for key in first if first[key] != second[key]} == {"pickscore.tokenizer.path"}
