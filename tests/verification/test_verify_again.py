"""``ebbflow verify``: what the command prints, and what ``--again`` finds by generating the samples
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from verification_cases import Version, flip, invoke, prompt_table, registered

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.evaluation.evaluate import evaluate_folder
from ebbflow.evaluation.gate_scores import score_tables_together, update_evaluation
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.identity import list_code
from ebbflow.storage.tables import read_table, write_table
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata, write_base_policy
from ebbflow.verification import evidence
from ebbflow.verification.checks import CHECKS, verify_version
from ebbflow.verification.comparison import EARLIER_COMPRESSION
from tests.parameters import move


@pytest.fixture
def recipe(gated_recipe: Recipe) -> Recipe:
    return gated_recipe


def test_the_command_prints_a_line_per_check(
    recipe: Recipe, version: Version, tmp_path: Path
) -> None:
    name = version.name
    for named in (name, f"{name}@champion", f"{name}@challenger", f"{name}/1"):
        done = invoke(recipe, tmp_path, named)
        assert done.exit_code == 0, done.output
        first, *lines = done.stdout.splitlines()
        assert first == f"{name} version 1"
        # No key is configured here, so that the signature is not looked at.
        assert [line[:2] for line in lines] == ["no", *["ok"] * (len(CHECKS) - 1)]
    flip(version.folder / "evidence" / "prompts.parquet")
    done = invoke(recipe, tmp_path, name)
    assert done.exit_code == 1
    assert "FAILED      prompts " in done.stdout
    assert f"1 of {len(CHECKS)} checks failed: prompts" in done.output


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("none", "no version of 'none' has the alias 'champion'"),
        ("{}@other", "has the alias 'other'"),
        ("{}/9", "no version '9'"),
        ("{}/x", "no version 'x'"),
        ("{}@champion/1", "in two ways"),
    ],
)
def test_a_version_that_is_not_there(
    recipe: Recipe, version: Version, tmp_path: Path, named: str, says: str
) -> None:
    done = invoke(recipe, tmp_path, named.format(version.name))
    assert done.exit_code == 1
    assert says in done.output
    assert "ok " not in done.output


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    done = invoke(Recipe(output=str(tmp_path / "none")), tmp_path, "model")
    assert done.exit_code == 1
    assert "no MLflow store at" in done.output
    assert not (tmp_path / "none").exists()


@pytest.fixture
def cheap_recipe(recipe: Recipe) -> Recipe:
    """With a guardrail that costs nothing: most of the time would go into reading letters."""
    rest = recipe.model_dump(exclude={"guardrails"}, exclude_unset=True)
    return Recipe.model_validate({**rest, "guardrails": ["jpeg_incompressibility"]})


@pytest.fixture
def trained(
    cheap_recipe: Recipe,
    name: str,
    base_folder: Path,
    prompts: list[Prompt],
    tmp_path: Path,
    few_sources: None,
) -> Callable[..., Version]:
    """``trained(change)``: a policy that draws, registered with the samples of both sides after
    ``change`` was made to those of one.
    """

    def make(change: Callable[[list[dict[str, Any]]], None], changed: str = "candidate") -> Version:
        policy = Policy(load_model(base_folder), cheap_recipe.policy, 0)
        move(policy, 0.01)
        metadata = PolicyMetadata(
            base_digest=verify_folder(base_folder),
            recipe_digest=cheap_recipe.digest,
            config=cheap_recipe.policy,
            version=5,
            steps=2,
        )
        policy.save_folder(tmp_path / "policy", metadata)
        table = prompt_table(tmp_path / "prompts.parquet", prompts)
        write_base_policy(
            tmp_path / "start",
            verify_folder(base_folder),
            cheap_recipe.digest,
            cheap_recipe.policy,
            cheap_recipe.model,
            cheap_recipe.evaluation,
        )
        folders = {"candidate": tmp_path / "policy", "champion": tmp_path / "start"}
        drawn = {side: tmp_path / f"{side}-drawn.parquet" for side in folders}
        paths = {side: tmp_path / f"{side}.parquet" for side in folders}
        evaluations = score_tables_together(
            cheap_recipe,
            table,
            {
                side: evaluate_folder(cheap_recipe, base_folder, folder, table, side, drawn[side])
                for side, folder in folders.items()
            },
            drawn,
            paths,
        )
        samples = read_table(paths[changed])
        rows = samples.to_pylist()
        change(rows)
        rewritten = pa.Table.from_pylist(rows, samples.schema)
        write_table(paths[changed], samples.schema, rewritten.to_batches(), {})
        evaluations[changed] = update_evaluation(evaluations[changed], rewritten, prompts)
        sides = {side: (evaluations[side], paths[side]) for side in folders}
        return registered(cheap_recipe, name, base_folder, tmp_path / "policy", sides, table)

    return make


def lighter(rows: list[dict[str, Any]]) -> None:
    """One pixel of one held-out picture by 4, and one score by .25."""
    row = next(row for row in rows if row["split"] == "held_out")
    picture = decode_pngs([row["image"]])
    picture[0, 0, 0, 0] ^= 4
    row.update(
        image=encode_pngs(picture)[0],
        similarity=row["similarity"] - 0.25,
        reward=row["reward"] - 0.5,
    )


def test_samples_that_are_generated_again_have_the_same_bytes(
    trained: Callable[..., Version],
) -> None:
    checks = trained(lambda rows: None).checks(again=True)
    assert checks.pop("signature").status == "not stored"
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["pictures again"].detail == "all 96 have the same bytes"
    assert checks["champion pictures"].detail == "all 96 have the same bytes"
    assert checks["champion again"].detail == "the base model, which the run began with"


def test_pictures_of_a_version_that_compressed_them_otherwise_have_the_same_pixels(
    trained: Callable[..., Version],
) -> None:
    def compress_as_before(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            picture = encode_pngs(decode_pngs([row["image"]]), EARLIER_COMPRESSION)[0]
            assert picture != row["image"]
            row["image"] = picture

    checks = trained(compress_as_before).checks(again=True)
    assert checks["pictures again"].detail == "all 96 have the same pixels"
    assert checks["pictures again"].status == "ok"
    assert checks["scores again"].status == "ok"


def test_forged_scores_of_the_champion_are_found(trained: Callable[..., Version]) -> None:
    """With all digests that belong to them: a champion of 0 loses to anybody."""

    def forge(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row.update(reward=0.0, similarity=0.0)

    version = trained(forge, "champion")
    assert version.failed() == set(), "only the champion's policy itself can tell"
    checks = version.checks(again=True)
    failed = {name for name, check in checks.items() if check.status == "FAILED"}
    assert failed == {"champion scores again"}


def test_samples_of_another_policy_are_found(trained: Callable[..., Version]) -> None:
    version = trained(lighter)
    assert version.failed() == set(), "only the policy itself can tell"
    checks = version.checks(again=True)
    assert {name for name, check in checks.items() if check.status == "FAILED"} == {
        "pictures again",
        "scores again",
    }
    assert checks["pictures again"].detail.startswith(
        "1 of 96 differ: by up to 4 of 255 in a pixel, by "
    )
    assert checks["scores again"].detail.endswith("differ, by up to 0.5")


def test_how_much_pictures_differ_is_not_known_when_they_were_too_large(
    trained: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_STORED_PICTURES", 1)
    checks = trained(lighter).checks(again=True)
    assert "1 of 96 differ; by how much is not known" in checks["pictures again"].detail


def test_a_policy_that_does_not_verify_is_not_loaded(trained: Callable[..., Version]) -> None:
    version = trained(lambda rows: None)
    flip(next((version.folder / "data" / "ebbflow" / "policy").rglob("*.safetensors")))
    assert version.checks(again=True)["samples again"].detail == "not generated, because of policy"


NAMED = {
    "family": ({"family": "shutil:rmtree", "path": "x"}, "shutil:rmtree", "shutil"),
    "attention from the hub": (
        {"family": "sd3", "path": "x", "attention": "_flash_3_hub"},
        "_flash_3_hub",
        "_flash_3_hub",
    ),
}


@pytest.mark.parametrize(("model", "code", "allowed_code"), NAMED.values(), ids=NAMED)
def test_code_that_a_version_names_runs_only_if_it_is_allowed(
    trained: Callable[..., Version], model: dict[str, str], code: str, allowed_code: str
) -> None:
    version = trained(lambda rows: None)
    path = version.folder / "evidence" / evidence.RECIPE
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"model": model}))
    version.set_tag(evidence.TAGS[evidence.RECIPE], evidence.sha256_of_file(path))
    asked = version.checks(again=True)["samples again"]
    assert asked.status == "FAILED"
    assert (
        asked.detail
        == f"the version names code to run, {code}; if you trust it, give --allow-code {code}"
    )
    _, allowed = verify_version(
        version.uri, f"{version.name}/{version.version}", again=True, allowed_code=[allowed_code]
    )
    (samples,) = [check for check in allowed if check.name == "samples again"]
    assert "--allow-code" not in samples.detail


def test_code_listing_is_what_the_digest_is_of(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("1")
    (names, *_) = json.loads(list_code(tmp_path))["sources"]
    assert [name for name, _ in names] == ["one.py"]
