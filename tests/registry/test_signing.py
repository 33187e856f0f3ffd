"""A version is used only as it was registered, and only signed where a key is configured."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import mlflow.pyfunc
import pandas as pd
import promotion_cases as cases
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from ebbflow.cli import main
from ebbflow.data.records import Evaluation, Registration, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.registry import signing
from ebbflow.registry.download import download_champion_folders
from ebbflow.registry.drawing import generate_pictures
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.model_version import BASE_STORED, POLICY_DIGEST, RegistryError
from ebbflow.registry.promotion import (
    ROLLED_BACK,
    promote_version,
    register_version,
    require_evaluated_policy,
    roll_back_champion,
)
from ebbflow.registry.serving import load_version
from ebbflow.registry.signing import (
    PROMOTION_SIGNATURE,
    SIGNATURE,
    SIGNING_KEY,
    VERIFY_KEYS,
    SignatureError,
    create_key_pair,
    require_signature,
)
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store
from ebbflow.training.policy_metadata import write_base_policy
from tests.mlflow_settings import restored_tracking_uri

pytestmark = pytest.mark.usefixtures("few_sources")


class Crowned(NamedTuple):
    """A champion in a store, and the folders of its version there."""

    uri: str
    name: str
    version: str
    model: Path
    client: MlflowClient

    @property
    def tags(self) -> dict[str, str]:
        return self.client.get_model_version(self.name, self.version).tags

    def set_tag(self, key: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, self.version, key, value)

    @property
    def policy(self) -> Path:
        return self.model / "data" / "ebbflow" / "policy"


@pytest.fixture
def write_policy(base_folder: Path, tmp_path: Path) -> Callable[[int], Path]:
    """``write_policy(steps)``: an untrained policy, sampled in so many steps."""

    def write(steps: int) -> Path:
        folder = tmp_path / f"policy-{steps}"
        digest = verify_folder(base_folder)
        evaluation = EvaluationConfig(steps=steps)
        write_base_policy(folder, digest, "recipe", PolicyConfig(), ModelConfig(), evaluation)
        return folder

    return write


@pytest.fixture
def register(
    recipe: Recipe, base_folder: Path, write_policy: Callable[[int], Path]
) -> Callable[[str], tuple[TrackedRun, Registration]]:
    def make(name: str) -> tuple[TrackedRun, Registration]:
        tracked = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")
        made = register_version(
            tracked,
            write_policy(2),
            base_folder,
            cases.WON,
            {"base_digest": verify_folder(base_folder)},
            model_name=name,
            expected_champion=None,
        )
        return tracked, made

    return make


@pytest.fixture
def crown(register: Callable[[str], tuple[TrackedRun, Registration]]) -> Callable[[], Crowned]:
    def make() -> Crowned:
        name = f"model-{uuid.uuid4().hex[:8]}"
        tracked, made = register(name)
        promote_version(tracked, made, {}, expected_champion=None)
        client = connect_to_store(tracked.tracking_uri)
        place = client.get_model_version_download_uri(name, made.version)
        model = Path(place.removeprefix("file://"))
        return Crowned(tracked.tracking_uri, name, made.version, model, client)

    return make


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return create_key_pair(tmp_path / "keys")


USES = {
    "gate": lambda champion, base, folder: download_champion_folders(
        find_champion(champion.uri, champion.name), folder, base
    ),
    "draw": lambda champion, base, folder: list(
        generate_pictures(champion.uri, champion.name, ['"EBBS"'], folder / "pictures")
    ),
    "load_version": lambda champion, base, folder: load_version(
        champion.uri, champion.name, folder
    ),
    "load_model": lambda champion, base, folder: load_with_mlflow(champion),
}


def load_with_mlflow(champion: Crowned) -> None:
    # MLflow puts the sources of the version, which are not all, first on the path, and leaves them.
    with restored_tracking_uri(), patch.object(sys, "path", [*sys.path]):
        mlflow.set_tracking_uri(champion.uri)
        mlflow.pyfunc.load_model(f"models:/{champion.name}@champion")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_another_policy_in_the_place_of_the_champion_is_refused(
    crown: Callable[[], Crowned],
    write_policy: Callable[[int], Path],
    base_folder: Path,
    tmp_path: Path,
    use: Callable[[Crowned, Path, Path], object],
) -> None:
    """One with a manifest and a COMMIT that fit, as Ebbflow writes them."""
    champion = crown()
    (tmp_path / "sound").mkdir()
    use(champion, base_folder, tmp_path / "sound")
    shutil.rmtree(champion.policy)
    shutil.copytree(write_policy(3), champion.policy)
    (tmp_path / "exchanged").mkdir()
    with pytest.raises(RegistryError, match="is not what was registered: its digest is"):
        use(champion, base_folder, tmp_path / "exchanged")


@pytest.mark.parametrize("tag", [POLICY_DIGEST, BASE_STORED])
def test_a_version_whose_tags_are_gone_or_files_are_missing_is_refused(
    crown: Callable[[], Crowned], tmp_path: Path, tag: str
) -> None:
    champion = crown()
    if tag == POLICY_DIGEST:
        champion.client.delete_model_version_tag(champion.name, champion.version, tag)
    else:
        shutil.rmtree(champion.policy.parent / "base")
    with pytest.raises(RegistryError, match="has no tag ebbflow.policy_digest|which is missing"):
        load_version(champion.uri, champion.name, tmp_path)


def test_importing_a_version_from_its_store_leaves_no_bytecode(
    crown: Callable[[], Crowned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow imports the sources from where they lie; bytecode there would fail `verify`."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    source = crown().model / "code" / "ebbflow" / "formatting.py"
    spec = importlib.util.spec_from_file_location("formatting_of_a_version", source)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert list(source.parent.rglob("*.pyc")) == []
    block = source.parent / "__pycache__"
    block.unlink()
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert list(block.glob("*.pyc")), "without the file, Python writes bytecode"


def test_a_version_that_was_loaded_draws(crown: Callable[[], Crowned], tmp_path: Path) -> None:
    champion = crown()
    drawn = load_version(champion.uri, champion.name, tmp_path).predict(
        pd.DataFrame({"prompt": ['"EBBS"']})
    )
    assert drawn["image"][0].startswith(b"\x89PNG")


def test_a_policy_that_was_not_evaluated_is_not_registered(
    write_policy: Callable[[int], Path],
) -> None:
    evaluation = Evaluation(
        label="after",
        policy_version=1,
        held_out={},
        validation={},
        coverage=1.0,
        velocity_drift=0.0,
        seconds={},
        policy_digest=verify_folder(write_policy(2)),
    )
    require_evaluated_policy(write_policy(2), evaluation)
    with pytest.raises(RegistryError, match="register the policy that was evaluated"):
        require_evaluated_policy(write_policy(3), evaluation)


def test_without_a_key_nothing_is_signed_or_asked_for(crown: Callable[[], Crowned]) -> None:
    champion = crown()
    assert SIGNATURE not in champion.tags
    version = champion.client.get_model_version(champion.name, champion.version)
    assert require_signature(version, promoted=True) is None


def test_a_signed_version_is_used_with_its_public_key(
    crown: Callable[[], Crowned],
    keys: tuple[Path, Path],
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private, public = keys
    assert private.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(SIGNING_KEY, str(private))
    champion = crown()
    monkeypatch.delenv(SIGNING_KEY)
    monkeypatch.setenv(VERIFY_KEYS, public.read_text())
    for name, use in USES.items():
        (tmp_path / name).mkdir()
        use(champion, base_folder, tmp_path / name)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_unsigned_version_is_refused_once_there_is_a_key(
    crown: Callable[[], Crowned],
    keys: tuple[Path, Path],
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Crowned, Path, Path], object],
) -> None:
    champion = crown()
    monkeypatch.setenv(VERIFY_KEYS, str(keys[1]))
    with pytest.raises(SignatureError, match="has no signature"):
        use(champion, base_folder, tmp_path)


def test_tags_that_were_changed_do_not_match_the_signature(
    crown: Callable[[], Crowned],
    keys: tuple[Path, Path],
    write_policy: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who can write files and tags exchanges the policy together with its digest."""
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    champion = crown()
    shutil.rmtree(champion.policy)
    shutil.copytree(write_policy(3), champion.policy)
    champion.set_tag(POLICY_DIGEST, verify_folder(champion.policy))
    with pytest.raises(SignatureError, match="is not what was signed: the tag ebbflow.signature"):
        load_version(champion.uri, champion.name, tmp_path)


@pytest.mark.parametrize("tag", [SIGNATURE, PROMOTION_SIGNATURE])
def test_a_signature_does_not_fit_another_version(
    crown: Callable[[], Crowned],
    register: Callable[[str], tuple[TrackedRun, Registration]],
    keys: tuple[Path, Path],
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tag: str,
) -> None:
    """An alias by hand on a version that the gate refused, with the tags of the champion."""
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    champion = crown()
    _, other = register(champion.name)
    copied = champion._replace(version=other.version)
    own = copied.tags
    for key, value in champion.tags.items():
        if key != SIGNATURE or tag == SIGNATURE:
            copied.set_tag(key, own.get(key, value) if key.endswith("_digest") else value)
    copied.set_tag("ebbflow.run_id", own["ebbflow.run_id"])
    champion.client.set_registered_model_alias(champion.name, "champion", other.version)
    found = find_champion(champion.uri, champion.name)
    assert found is not None
    with pytest.raises(SignatureError, match=f"the tag {tag} does not match"):
        download_champion_folders(found, tmp_path / "gate", base_folder)


def test_a_version_without_a_valid_signature_is_not_promoted(
    register: Callable[[str], tuple[TrackedRun, Registration]],
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"model-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    tracked, made = register(name)
    client = connect_to_store(tracked.tracking_uri)
    client.set_model_version_tag(name, made.version, POLICY_DIGEST, "0" * 64)
    with pytest.raises(SignatureError, match="is not what was signed"):
        promote_version(tracked, made, {}, expected_champion=None)
    assert find_champion(tracked.tracking_uri, name) is None


def test_a_planted_version_that_names_the_run_is_not_signed(
    recipe: Recipe,
    base_folder: Path,
    write_policy: Callable[[int], Path],
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry finds the version of its run by a tag, which anybody can write."""
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    name = f"model-{uuid.uuid4().hex[:8]}"
    tracked = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")
    client = connect_to_store(tracked.tracking_uri)
    client.create_registered_model(name)
    planted = client.create_model_version(
        name, str(base_folder), tracked.run_id, tags={"ebbflow.run_id": tracked.run_id}
    )

    def register_again() -> Registration:
        return register_version(
            tracked,
            write_policy(2),
            base_folder,
            cases.WON,
            {"base_digest": verify_folder(base_folder)},
            model_name=name,
            expected_champion=None,
        )

    with pytest.raises(SignatureError, match=r"has no signature \(tag ebbflow.attestation\)"):
        register_again()
    assert SIGNATURE not in client.get_model_version(name, planted.version).tags
    client.delete_model_version(name, planted.version)
    made = register_again()
    assert require_signature(client.get_model_version(name, made.version))


def test_a_rollback_signs_no_version_that_was_changed_and_leaves_no_trace(
    crown: Callable[[], Crowned], keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    champion = crown()
    # Another version of the model, whose signature does not match.
    source = champion.client.get_model_version(champion.name, champion.version)
    other = champion.client.create_model_version(champion.name, source.source, tags=source.tags)
    with pytest.raises(SignatureError, match="is not what was signed"):
        roll_back_champion(champion.uri, champion.name, to=str(other.version))
    # Who has only the public key cannot roll back either.
    signing.sign_version(champion.client, champion.name, str(other.version))
    monkeypatch.delenv(SIGNING_KEY)
    monkeypatch.setenv(VERIFY_KEYS, str(keys[1]))
    with pytest.raises(SignatureError, match="EBBFLOW_SIGNING_KEY is not set"):
        roll_back_champion(champion.uri, champion.name, to=str(other.version))
    assert ROLLED_BACK not in champion.tags
    found = find_champion(champion.uri, champion.name)
    assert found is not None
    assert found.version == champion.version


def test_without_the_private_key_no_champion_moves(
    register: Callable[[str], tuple[TrackedRun, Registration]],
    keys: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its promotion would be unsigned, and the next run would refuse it."""
    name = f"model-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    tracked, made = register(name)
    monkeypatch.delenv(SIGNING_KEY)
    monkeypatch.setenv(VERIFY_KEYS, str(keys[1]))
    with pytest.raises(SignatureError, match="EBBFLOW_SIGNING_KEY is not set"):
        promote_version(tracked, made, {}, expected_champion=None)
    assert find_champion(tracked.tracking_uri, name) is None


def test_a_new_key_takes_over_from_the_old_one(
    crown: Callable[[], Crowned],
    keys: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(keys[0]))
    champion = crown()
    private, public = create_key_pair(tmp_path / "new")
    monkeypatch.setenv(SIGNING_KEY, str(private))
    with pytest.raises(SignatureError, match="is signed with the key"):
        load_version(champion.uri, champion.name, tmp_path / "refused")
    both = tmp_path / "both.pem"
    both.write_text(keys[1].read_text() + public.read_text())
    monkeypatch.setenv(VERIFY_KEYS, str(both))
    (tmp_path / "served").mkdir()
    load_version(champion.uri, champion.name, tmp_path / "served")
    signing.sign_version(champion.client, champion.name, champion.version)
    monkeypatch.setenv(VERIFY_KEYS, str(public))
    version = champion.client.get_model_version(champion.name, champion.version)
    assert require_signature(version, promoted=True)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (SIGNING_KEY, "", "is set and empty"),
        (VERIFY_KEYS, "", "is set and empty"),
        (SIGNING_KEY, "nowhere.pem", "names a file that cannot be read"),
        (SIGNING_KEY, "-----BEGIN PRIVATE KEY-----\nx", "is no private key in PEM"),
        (VERIFY_KEYS, "-----BEGIN PRIVATE KEY-----\nx", "has no public key in PEM"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(
    crown: Callable[[], Crowned],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    champion = crown()
    version = champion.client.get_model_version(champion.name, champion.version)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SignatureError, match=f"{variable} {message}"):
        require_signature(version)


def test_the_command_makes_keys_and_overwrites_none(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["make-key", str(tmp_path / "keys")])
    assert made.exit_code == 0
    assert f"export {SIGNING_KEY}={tmp_path}/keys/signing_key.pem" in made.output
    again = CliRunner().invoke(main, ["make-key", str(tmp_path / "keys")])
    assert again.exit_code == 1
    assert "exists already" in again.output
