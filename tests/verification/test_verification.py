"""A registered version verifies itself: every single change to what was registered is found, and
named.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from verification_cases import Version, flip, invoke

from ebbflow.data.prompts import Prompt
from ebbflow.data.records import GateDecision
from ebbflow.evaluation import gate as gate_rules
from ebbflow.recipe import Recipe
from ebbflow.registry import model_version
from ebbflow.registry.promotion import (
    COMPARED_WITH,
    DECISION,
    REPLACES,
    register_version,
    roll_back_champion,
)
from ebbflow.registry.trained_prompts import TRAINING_TABLE
from ebbflow.storage.artifacts import COMMIT, MANIFEST, commit_folder, verify_folder
from ebbflow.storage.tables import read_table, write_table
from ebbflow.tracking.parent_run import start_run
from ebbflow.verification import evidence
from ebbflow.verification.checks import CHECKS, Check, verify_version


@pytest.fixture
def recipe(gated_recipe: Recipe) -> Recipe:
    return gated_recipe


def test_what_was_registered_verifies(version: Version) -> None:
    checks = version.checks()
    assert list(checks) == list(CHECKS)
    assert checks.pop("signature").status == "not stored", "no key is configured"
    assert {name: check for name, check in checks.items() if check.status != "ok"} == {}
    assert checks["gate"].detail.endswith("promote, as decided again from the stored scores")
    assert "24 held out" in checks["prompts"].detail


def test_a_prompt_with_several_samples_counts_once(make_version: Callable[..., Version]) -> None:
    assert make_version(repeated=5).failed() == set()


def test_one_that_the_gate_refused_verifies_as_challenger(
    make_version: Callable[..., Version],
) -> None:
    checks = make_version(gain=0.0).checks()
    del checks["signature"]
    assert {check.status for check in checks.values()} == {"ok"}
    assert ": do not promote" in checks["gate"].detail
    assert checks["alias"].detail == "the version is not champion"


def test_one_of_a_run_with_branches_verifies(
    make_version: Callable[..., Version], gated_recipe: Recipe
) -> None:
    """Its stages are not read, and branches without stages would be no recipe."""
    mixture = [{"name": "words", "source": "words.txt"}]
    branched = gated_recipe.model_dump() | {
        "prompts": gated_recipe.prompts.model_dump(exclude={"source"}) | {"mixture": mixture},
        "branches": {"words": {"prompts": ["words"]}},
        "stages": [
            {"kind": "online", "branch": "words"},
            {"kind": "online", "algorithm": {"name": "distillation", "teacher": "branch:words"}},
        ],
    }
    assert make_version(recipe=Recipe.model_validate(branched)).failed() == set()


def test_code_that_it_names_is_not_imported(
    make_version: Callable[..., Version],
    gated_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampler of the user's own draws the evaluation; without ``--again`` nothing draws, and what
    may run is asked first.
    """
    module = tmp_path / "drawn_by.py"
    module.write_text("from ebbflow.flow.sampler import Sampler\n\nOWN = Sampler()\n")
    monkeypatch.syspath_prepend(tmp_path)
    evaluation = gated_recipe.evaluation.model_dump() | {"sampler": "drawn_by:OWN"}
    version = make_version(
        recipe=Recipe.model_validate(gated_recipe.model_dump() | {"evaluation": evaluation})
    )
    monkeypatch.delitem(sys.modules, "drawn_by")
    checks = version.checks(again=True)
    assert {name for name, check in checks.items() if check.status == "FAILED"} == {"samples again"}
    assert "--allow-code drawn_by:OWN" in checks["samples again"].detail
    assert "drawn_by" not in sys.modules


TAMPERED_FILES: dict[str, tuple[str, str]] = {
    "model": ("MLmodel", "model files"),
    "packages": ("requirements.txt", "model files"),
    "sources": ("code/ebbflow/registry/serving.py", "model files"),
    "policy": ("data/ebbflow/policy/weights.safetensors", "policy"),
    "policy metadata": ("data/ebbflow/policy/policy.json", "policy"),
    "base": ("data/ebbflow/base/weights.safetensors", "base model"),
    "recipe": ("evidence/recipe.json", "recipe"),
    "prompts": ("evidence/prompts.parquet", "prompts"),
    "code": ("evidence/code.json", "code"),
    "candidate's scores": ("evidence/candidate.parquet", "candidate scores"),
    "champion's scores": ("evidence/champion.parquet", "champion scores"),
    "decision": ("evidence/gate.json", "gate"),
}


@pytest.mark.parametrize(("file", "check"), TAMPERED_FILES.values(), ids=TAMPERED_FILES)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(flip, id="flipped"),
        pytest.param(Path.unlink, id="deleted", marks=pytest.mark.exhaustive),
    ],
)
def test_a_byte_of_a_file_is_found(
    version: Version, file: str, check: str, change: Callable[[Path], None]
) -> None:
    change(version.folder / file)
    assert check in version.failed()


def committed_again(folder: Path) -> None:
    """A manifest and a COMMIT that fit, as somebody who changed the files would write them."""
    for file in (MANIFEST, COMMIT):
        (folder / file).unlink()
    commit_folder(folder)


@pytest.mark.parametrize(("part", "check"), [("policy", "policy"), ("base", "base model")])
def test_a_folder_that_was_committed_again_is_found(
    version: Version, part: str, check: str
) -> None:
    folder = version.folder / "data" / "ebbflow" / part
    flip(folder / "weights.safetensors")
    committed_again(folder)
    assert version.failed() == {check}


def test_a_stored_base_that_is_gone_is_found(version: Version) -> None:
    base = version.folder / "data" / "ebbflow" / "base"
    base.rename(version.folder / "elsewhere")
    assert version.checks()["base model"] == Check(
        "base model", "FAILED", "it was stored with the version and is missing"
    )


def changed_scores(
    version: Version, side: str, change: Callable[[dict[str, Any]], None], tag: bool
) -> None:
    """Change the first row of a table of scores; with ``tag``, its digest too, as who can write
    both would.
    """
    path = version.folder / "evidence" / f"{side}.parquet"
    table = read_table(path)
    rows = table.to_pylist()
    change(rows[0])
    write_table(path, table.schema, pa.Table.from_pylist(rows, table.schema).to_batches(), {})
    if tag:
        version.set_tag(evidence.TAGS[path.name], evidence.sha256_of_file(path))


def all_scores(row: dict[str, Any]) -> None:
    row.update(reward=row["reward"] + 2, similarity=row["similarity"] + 1)


SCORES = {
    "reward alone": (lambda row: row.update(reward=row["reward"] + 2), {"rewards", "gate"}),
    "all scores of a sample": (all_scores, {"gate"}),
    "guardrail": (lambda row: row.update(ocr=0.0), {"gate"}),
    "not scored": (lambda row: row.update(reward=None), {"rewards", "gate"}),
    "another prompt": (lambda row: row.update(prompt_id=99), {"prompts"}),
    "another text": (lambda row: row.update(prompt="another"), {"prompts"}),
}


@pytest.mark.parametrize(("change", "checks"), SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(
    "side", ["candidate", pytest.param("champion", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("tag", [False, True], ids=["file", "file and tag"])
def test_a_score_in_a_table_is_found(
    version: Version,
    change: Callable[[dict[str, Any]], None],
    checks: set[str],
    side: str,
    tag: bool,
) -> None:
    changed_scores(version, side, change, tag)
    failed = version.failed()
    assert failed >= checks
    assert tag or f"{side} scores" in failed


def test_a_decision_that_the_scores_do_not_give_is_found(
    make_version: Callable[..., Version],
) -> None:
    """All that says so is changed: the file, its digest and the tag of the decision."""
    version = make_version(gain=0.0)
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    assert not gate["decision"]["promote"]
    gate["decision"]["promote"] = True
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS["gate.json"], evidence.sha256_of_file(path))
    version.set_tag(DECISION, GateDecision.model_validate(gate["decision"]).model_dump_json())
    assert "promote differ: promote = False" in version.checks()["gate"].detail


def test_one_of_a_gate_that_asked_for_fewer_prompts_says_how_many_are_needed(
    make_version: Callable[..., Version],
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(gate_rules, "MIN_PROMPTS", 16)
        version = make_version(shown=prompts[:-8])
    assert version.failed() == {"gate"}
    detail = version.checks()["gate"].detail
    assert "promote = False. Refused: Too few held-out prompts" in detail
    assert "both sides scored 16, and the tests hold for 24 and more" in detail


def test_an_evaluation_that_the_scores_do_not_give_is_found(version: Version) -> None:
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    gate["champion"]["held_out"]["ocr"] = 0.1
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS["gate.json"], evidence.sha256_of_file(path))
    # The record of the promotion names the digest of the file, too.
    assert version.failed() == {"alias", "champion scores"}


RECIPES = {
    "a guardrail less": lambda settings: settings.update(guardrails=[]),
    "another weight": lambda settings: settings["rewards"][0].update(weight=1.0),
    "another confidence": lambda settings: settings["evaluation"].update(confidence=0.5001),
}


@pytest.mark.parametrize("change", RECIPES.values(), ids=RECIPES)
def test_another_recipe_is_found(
    version: Version, change: Callable[[dict[str, Any]], None]
) -> None:
    """Even where its digest was changed with it."""
    path = version.folder / "evidence" / "recipe.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings, sort_keys=True, separators=(",", ":")))
    assert "recipe" in version.failed()
    version.set_tag(evidence.TAGS["recipe.json"], evidence.sha256_of_file(path))
    assert version.failed() & {"rewards", "gate"}


@pytest.mark.parametrize(
    ("tag", "check"),
    [
        (DECISION, "gate"),
        (COMPARED_WITH, "gate"),
        (evidence.REWARDS_DIGEST, "rewards"),
        ("ebbflow.base_digest", "base model"),
        (model_version.POLICY_DIGEST, "policy"),
        *(
            (tag, None)
            for file, tag in evidence.TAGS.items()
            # This version was compared with no anchor.
            if file not in (evidence.PICTURES, evidence.ANCHOR)
        ),
    ],
)
def test_a_tag_that_was_changed_or_deleted_is_found(
    version: Version, tag: str, check: str | None
) -> None:
    named = {check} if check else set()
    version.set_tag(tag, "3")
    failed = version.failed()
    assert failed
    assert failed >= named
    version.client.delete_model_version_tag(version.name, version.version, tag)
    failed = version.failed()
    assert failed
    assert failed >= named


def test_training_prompts_that_are_too_many_leave_their_digest(
    make_version: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = make_version()
    assert stored.checks()["training prompts"].detail.endswith(", 3 trained on")
    (stored.folder / "evidence" / TRAINING_TABLE).unlink()
    assert stored.failed() == {"training prompts"}
    monkeypatch.setattr(evidence, "MAX_STORED_PROMPTS", 1)
    large = make_version(promoted=False)
    check = large.checks()["training prompts"]
    assert check.status == "not stored"
    assert len(large.tags[evidence.TAGS[TRAINING_TABLE]]) == 64


def test_a_version_names_the_commit_of_its_code(version: Version) -> None:
    assert re.fullmatch("[0-9a-f]{40}", version.tags["ebbflow.git_commit"])


def test_other_weights_of_a_reward_are_found(version: Version) -> None:
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    gate["candidate"]["reward_weights"] = {"similarity": "0" * 64}
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS["gate.json"], evidence.sha256_of_file(path))
    assert "rewards" in version.failed()


def test_an_alias_on_a_version_that_the_gate_refused_is_found(
    make_version: Callable[..., Version],
) -> None:
    version = make_version(gain=0.0)
    version.client.set_registered_model_alias(version.name, "champion", version.version)
    assert version.failed() == {"alias"}
    assert "which the gate refused" in version.checks()["alias"].detail


def test_an_alias_that_no_promotion_moved_is_found(make_version: Callable[..., Version]) -> None:
    version = make_version(promoted=False)
    assert version.failed() == set()
    version.client.set_registered_model_alias(version.name, "champion", version.version)
    assert version.failed() == {"alias"}


def test_a_rollback_moves_the_alias_lawfully(make_version: Callable[..., Version]) -> None:
    version = make_version()
    other = make_version(promoted=False)
    roll_back_champion(version.uri, version.name, other.version)
    assert REPLACES in other.tags
    assert other.failed() == set()
    assert version.failed() == {"alias"}, "it was rolled back, for a reason"
    assert "has been rolled back (to version" in version.checks()["alias"].detail
    roll_back_champion(version.uri, version.name, version.version)
    assert (version.failed(), other.failed()) == (set(), {"alias"})


def test_an_alias_on_a_copy_of_a_promoted_version_is_found(version: Version) -> None:
    """With all of its tags and files: they name the version that was promoted."""
    source = version.client.get_model_version(version.name, version.version)
    copy = version.client.create_model_version(
        version.name, source.source, source.run_id, tags=version.tags
    )
    version.client.set_registered_model_alias(version.name, "champion", copy.version)
    copied = version._replace(version=str(copy.version))
    assert copied.failed() == {"alias"}
    assert "is not the promotion of this version" in copied.checks()["alias"].detail


def test_planted_bytecode_is_found(version: Version) -> None:
    """Python runs it instead of the sources, whose digests fit."""
    folder = version.folder / "code" / "ebbflow" / "__pycache__"
    assert folder.is_file(), "Python can write none here"
    folder.unlink()
    folder.mkdir()
    (folder / "cli.cpython-311.pyc").write_bytes(b"code")
    assert version.failed() == {"model files"}
    assert "code/ebbflow/__pycache__/cli.cpython-311.pyc" in version.checks()["model files"].detail


def test_a_version_from_before_says_what_cannot_be_verified(
    recipe: Recipe, version: Version, tmp_path: Path
) -> None:
    tracked = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")
    decision = GateDecision.model_validate(
        json.loads((version.folder / "evidence" / "gate.json").read_text())["decision"]
    )
    data = version.folder / "data" / "ebbflow"
    lineage = {"base_digest": verify_folder(data / "base")}
    made = register_version(
        tracked,
        data / "policy",
        data / "base",
        decision,
        lineage,
        model_name=version.name,
        expected_champion="1",
    )
    for tag in (
        model_version.POLICY_DIGEST,
        model_version.MODEL_FILES_DIGEST,
        model_version.BASE_STORED,
    ):
        version.client.delete_model_version_tag(version.name, made.version, tag)
    _, checks = verify_version(version.uri, f"{version.name}/{made.version}", again=True)
    status = {check.name: check.status for check in checks}
    assert {status.pop(check) for check in ("base model", "alias", "champion again")} == {"ok"}
    assert set(status.values()) == {"not stored"}
    shown = invoke(recipe, tmp_path, f"{version.name}/{made.version}")
    assert shown.exit_code == 3, "nothing failed, and nothing is known of it"
    assert "nothing to verify it by: policy, gate not stored" in shown.output


def test_a_base_that_is_only_referenced_is_not_stored(
    make_version: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_version, "MAX_STORED_BASE", 1)
    checks = make_version().checks()
    assert checks.pop("base model").status == "not stored"
    del checks["signature"]
    assert {check.status for check in checks.values()} == {"ok"}


def test_one_whose_prompt_sets_have_their_own_rewards_verifies(
    make_version: Callable[..., Version], gated_recipe: Recipe, prompts: list[Prompt]
) -> None:
    """And one that says that a prompt is of another set does not: that would change which reward
    counts.
    """
    sets = {"mixture": [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]}
    keys = {
        "prompts": gated_recipe.prompts.model_dump(exclude={"source", "mixture"}) | sets,
        "rewards": [
            {"name": name, "weight": 2, "prompts": [of]}
            for name, of in (("similarity", "words"), ("ocr", "signs"))
        ],
        "guardrails": [],
    }
    mixed = [replace(prompt, source=("words", "signs")[prompt.prompt_id % 2]) for prompt in prompts]
    version = make_version(
        recipe=Recipe.model_validate(gated_recipe.model_dump() | keys), shown=mixed
    )
    assert version.failed() == set()
    path = version.folder / "evidence" / "candidate.parquet"
    table = read_table(path)
    swapped = ["words" if name == "signs" else "signs" for name in table["source"].to_pylist()]
    table = table.set_column(table.column_names.index("source"), "source", pa.array(swapped))
    write_table(path, table.schema, table.to_batches(), {})
    assert {"rewards", "prompts"} <= version.failed()
