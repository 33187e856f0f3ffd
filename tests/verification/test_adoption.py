"""A person adopts a champion of an earlier release, whose decision nobody can make again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from verification_cases import Version

from ebbflow.cli import main
from ebbflow.data.records import GateDecision
from ebbflow.recipe import Recipe
from ebbflow.registry.model_version import POLICY_DIGEST
from ebbflow.registry.promotion import DECISION, ROLLED_BACK, format_decision_tag
from ebbflow.registry.signing import (
    ADOPTED,
    PROMOTION,
    SIGNATURE,
    SIGNING_KEY,
    SignatureError,
    create_key_pair,
    require_signature,
    sign_version,
)
from ebbflow.storage.disk import sha256_of_file
from ebbflow.verification import evidence


@pytest.fixture
def old(version: Version) -> Version:
    """A champion of a release whose gate computed other intervals and left no record of its
    promotion.
    """
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    gate["decision"]["target"]["low"] -= 0.01
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS[evidence.GATE], sha256_of_file(path))
    decision = GateDecision.model_validate(gate["decision"])
    version.set_tag(DECISION, format_decision_tag(decision))
    version.client.delete_model_version_tag(version.name, version.version, PROMOTION)
    return version


def call(recipe: Recipe, folder: Path, *arguments: str) -> Result:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": recipe.output}))
    return CliRunner().invoke(main, [*arguments, "--recipe", str(path)])


def test_an_adopted_champion_of_an_earlier_release_is_signed(
    old: Version, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = create_key_pair(tmp_path / "keys")
    monkeypatch.setenv(SIGNING_KEY, str(private))
    named = f"{old.name}/{old.version}"
    assert old.failed() == {"gate", "alias", "signature"}
    refused = call(recipe, tmp_path, "sign", named)
    assert refused.exit_code == 1
    assert f"ebbflow adopt {named} --reason" in refused.output

    adopted = call(recipe, tmp_path, "adopt", named, "--reason", "champion of release 1")
    assert adopted.exit_code == 0, adopted.output
    assert "is adopted and signed, although gate, alias did not verify" in adopted.output
    checks = old.checks()
    assert old.failed() == set()
    assert checks["gate"].status == "adopted"
    assert "champion of release 1" in checks["gate"].detail
    assert checks["alias"].status == "ok"
    version = old.client.get_model_version(old.name, old.version)
    assert require_signature(version, promoted=True)
    assert call(recipe, tmp_path, "verify", named).exit_code == 0
    # A new key signs it as any other.
    assert call(recipe, tmp_path, "sign", named).exit_code == 0

    # Who adopts is signed as well.
    record = json.loads(old.tags[ADOPTED])
    old.set_tag(ADOPTED, json.dumps(record | {"why": "somebody else's reason"}))
    assert "signature" in old.failed()


def test_a_version_whose_files_changed_is_not_adopted(
    old: Version, recipe: Recipe, tmp_path: Path
) -> None:
    (old.folder / "evidence" / "gate.json").write_text("{}")
    refused = call(recipe, tmp_path, "adopt", old.name, "--reason", "it looks good")
    assert refused.exit_code == 1
    assert "is not what was registered, and cannot be adopted" in refused.output
    assert ADOPTED not in old.tags


def test_an_adoption_hides_nothing_that_happens_after_it(
    old: Version, recipe: Recipe, tmp_path: Path
) -> None:
    assert call(recipe, tmp_path, "adopt", old.name, "--reason", "release 1").exit_code == 0
    assert old.failed() == set()
    old.set_tag(ROLLED_BACK, "to version 1, today")
    assert old.failed() == {"alias"}
    old.client.delete_model_version_tag(old.name, old.version, ROLLED_BACK)
    path = old.folder / "evidence" / "candidate.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    assert "candidate scores" in old.failed()
    # With a digest that fits, it is another version than the one that was adopted.
    old.set_tag(evidence.TAGS[evidence.SCORES["candidate"]], sha256_of_file(path))
    assert "gate" in old.failed()


def test_no_command_signs_a_version_whose_signature_says_that_it_changed(
    version: Version, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = create_key_pair(tmp_path / "keys")
    monkeypatch.setenv(SIGNING_KEY, str(private))
    named = f"{version.name}/{version.version}"
    assert call(recipe, tmp_path, "sign", named).exit_code == 0
    # A tag that no check but the signature reads.
    version.set_tag("ebbflow.planted_digest", "0" * 64)
    said = call(recipe, tmp_path, "sign", named)
    assert (said.exit_code, "is not what was signed" in said.output) == (1, True)
    version.client.delete_model_version_tag(version.name, version.version, "ebbflow.planted_digest")
    # A gate's record with the digests that belong to it, and other numbers.
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    gate["decision"]["target"]["low"] -= 0.01
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS[evidence.GATE], sha256_of_file(path))
    decision = GateDecision.model_validate(gate["decision"])
    version.set_tag(DECISION, format_decision_tag(decision))
    said = call(recipe, tmp_path, "adopt", named, "--reason", "it looks good")
    assert (said.exit_code, "is not what was signed" in said.output) == (1, True)
    assert ADOPTED not in version.tags


def test_a_version_that_changes_while_it_is_verified_is_not_signed(
    version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = create_key_pair(tmp_path / "keys")
    monkeypatch.setenv(SIGNING_KEY, str(private))
    verified = version.client.get_model_version(version.name, version.version)
    version.set_tag(POLICY_DIGEST, "0" * 64)
    with pytest.raises(SignatureError, match="has changed since it was verified"):
        sign_version(version.client, version.name, version.version, verified)
    assert SIGNATURE not in version.tags


@pytest.mark.parametrize("reason", ["", " "])
def test_an_adoption_needs_a_reason(
    old: Version, recipe: Recipe, tmp_path: Path, reason: str
) -> None:
    refused = call(recipe, tmp_path, "adopt", old.name, "--reason", reason)
    assert (refused.exit_code, "needs a reason" in refused.output) == (1, True)
    assert ADOPTED not in old.tags


def test_a_version_that_verifies_or_was_refused_is_not_adopted(
    make_version: Callable[..., Version], recipe: Recipe, tmp_path: Path
) -> None:
    version = make_version()
    named = f"{version.name}/{version.version}"
    said = call(recipe, tmp_path, "adopt", named, "--reason", "why not")
    assert "verifies, so that nothing has to be adopted" in said.output
    refused = make_version(gain=0.0)
    refused.client.set_registered_model_alias(refused.name, "champion", refused.version)
    named = f"{refused.name}/{refused.version}"
    said = call(recipe, tmp_path, "adopt", named, "--reason", "why not")
    assert "which no adoption changes" in said.output
