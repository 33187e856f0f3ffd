"""A registered version verifies itself: every single change to what was registered is found, and named."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient

from ebbflow.cli import main
from ebbflow.data.images import decode_png, encode_png
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import PROMPTS, evaluation_schema
from ebbflow.evaluation.evaluate import evaluate_folder
from ebbflow.evaluation.gate import decide
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import COMMIT, MANIFEST, commit, new_folder, verify
from ebbflow.storage.identity import code_listing
from ebbflow.storage.tables import read_table, write_table
from ebbflow.tracking import evidence, model_version
from ebbflow.tracking.evidence import GateInputs, write_evidence
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.registry import COMPARED_WITH, DECISION, REPLACES, promote, register, rollback
from ebbflow.tracking.store import connect, resolve_tracking_uri
from ebbflow.tracking.verification import CHECKS, Check, verify_version
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from tests.parameters import move

METRICS = ["reward", "similarity", "ocr"]
CODE = json.dumps({"sources": [[["cli.py", "0" * 64]]], "versions": {"torch": "0.0"}})


class Version(NamedTuple):
    """A registered version, and where its artifacts lie."""

    uri: str
    name: str
    version: str
    folder: Path
    client: MlflowClient

    def checks(self, again: bool = False) -> dict[str, Check]:
        _, checks = verify_version(self.uri, f"{self.name}/{self.version}", again)
        return {check.name: check for check in checks}

    def failed(self) -> set[str]:
        return {name for name, check in self.checks().items() if check.status == "FAILED"}

    def set_tag(self, key: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, self.version, key, value)

    @property
    def tags(self) -> dict[str, str]:
        return self.client.get_model_version(self.name, self.version).tags


@pytest.fixture
def recipe(store: Path) -> Recipe:
    settings = {"output": str(store), "rewards": [{"name": "similarity", "weight": 2}], "guardrails": ["ocr"]}
    return Recipe.model_validate(settings | {"evaluation": {"steps": 2, "resamples": 200}})


@pytest.fixture
def name() -> str:
    return f"model-{uuid.uuid4().hex[:8]}"


def committed(folder: Path, files: dict[str, str]) -> Path:
    with new_folder(folder) as unfinished:
        for path, text in files.items():
            (unfinished / path).write_text(text)
    return folder


def prompt_table(path: Path, prompts: list[Prompt]) -> Path:
    write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS), path)
    return path


def evaluated(path: Path, prompts: list[Prompt], gain: float, label: str) -> tuple[Evaluation, Path]:
    """An evaluation with made-up scores; of the candidate they are higher by about ``gain``."""
    shown = [prompt for prompt in prompts if prompt.split != "train"]
    scores = np.random.default_rng(len(label)).uniform(0.2, 0.4, len(shown)) + gain
    pictures = encode_png(np.arange(len(shown), dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2).repeat(3, 3))
    keys = ("prompt_id", "prompt", "target", "split")
    rows = [
        {key: vars(prompt)[key] for key in keys}
        | {"sample": 0, "image": picture, "reward": 2 * score, "similarity": score, "ocr": 0.5, "failure": None}
        for prompt, picture, score in zip(shown, pictures, scores, strict=True)
    ]
    table = pa.Table.from_pylist(rows, evaluation_schema(METRICS))
    write_table(path, table.schema, table.to_batches(), {})
    held_out = [row for row in rows if row["split"] == "held_out"]
    means = {metric: float(np.mean([row[metric] for row in held_out])) for metric in METRICS}
    record = Evaluation(
        label=label, policy_version=1, held_out=means, validation={}, coverage=1.0, velocity_drift=0.0, seconds={"sampling": 1.0}
    )
    return record, path


@pytest.fixture
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    shown = [*make_prompts(3), *make_prompts(3, "validation"), *make_prompts(12, "held_out")]
    return [Prompt(**vars(prompt) | {"prompt_id": index}) for index, prompt in enumerate(shown)]


@pytest.fixture
def make_version(recipe: Recipe, name: str, prompts: list[Prompt], tmp_path: Path) -> Callable[..., Version]:
    """``make_version(gain=0.2, promoted=True)``: registered with evidence, and promoted where the gate lets it through."""

    def make(gain: float = 0.2, promoted: bool = True) -> Version:
        folder = tmp_path / uuid.uuid4().hex
        base = committed(folder / "base", {"model_index.json": "{}", "weights.safetensors": "w" * 64})
        metadata = PolicyMetadata(base_digest=verify(base), recipe_digest=recipe.digest, config=recipe.policy, version=7)
        policy = committed(folder / "policy", {"policy.json": metadata.model_dump_json(), "weights.safetensors": "p" * 64})
        sides = {
            "candidate": evaluated(folder / "candidate.parquet", prompts, gain, "1.1 online"),
            "champion": evaluated(folder / "champion.parquet", prompts, 0.0, "before"),
        }
        return registered(recipe, name, base, policy, sides, prompt_table(folder / "prompts.parquet", prompts), promoted)

    return make


def registered(
    recipe: Recipe,
    name: str,
    base: Path,
    policy: Path,
    sides: dict[str, tuple[Evaluation, Path]],
    prompts: Path,
    promoted: bool = True,
) -> Version:
    (candidate, its), (champion, other) = sides["candidate"], sides["champion"]
    decision = decide(recipe, candidate, champion, read_table(its), read_table(other))
    evaluations = {side: evaluation for side, (evaluation, _) in sides.items()}
    inputs = GateInputs(recipe, decision, evaluations, {side: path for side, (_, path) in sides.items()}, prompts, CODE)
    tags = write_evidence(policy.parent / "evidence", inputs) | {"base_digest": verify(base)}
    tracked, uri = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}"), resolve_tracking_uri(recipe)
    made = register(
        tracked, policy, base, decision, tags, model_name=name, expected_champion=None, evidence=policy.parent / "evidence"
    )
    if promoted and decision.promote:
        promote(tracked, made, {"promoted_in": "an execution"}, expected_champion=None)
    client = connect(uri)
    place = client.get_model_version_download_uri(name, made.version)
    return Version(uri, name, made.version, Path(url2pathname(urlparse(place).path)), client)


@pytest.fixture
def version(make_version: Callable[..., Version]) -> Version:
    return make_version()


def flip(path: Path) -> None:
    """Change one byte, the last: that of a number, a brace or a tensor."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_what_was_registered_verifies(version: Version) -> None:
    checks = version.checks()
    assert list(checks) == list(CHECKS)
    assert {name: check for name, check in checks.items() if check.status != "ok"} == {}
    assert checks["gate"].detail.endswith("promote, as decided again from the stored scores")
    assert "12 held out" in checks["prompts"].detail


def test_one_that_the_gate_refused_verifies_as_challenger(make_version: Callable[..., Version]) -> None:
    checks = make_version(gain=0.0).checks()
    assert {check.status for check in checks.values()} == {"ok"}
    assert ": do not promote" in checks["gate"].detail
    assert checks["alias"].detail == "the version is not champion"


TAMPERED_FILES: dict[str, tuple[str, str]] = {
    "model": ("MLmodel", "model files"),
    "packages": ("requirements.txt", "model files"),
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
@pytest.mark.parametrize("change", [flip, Path.unlink], ids=["flipped", "deleted"])
def test_a_byte_of_a_file_is_found(version: Version, file: str, check: str, change: Callable[[Path], None]) -> None:
    change(version.folder / file)
    assert check in version.failed()


def committed_again(folder: Path) -> None:
    """A manifest and a COMMIT that fit, as somebody who changed the files would write them."""
    for file in (MANIFEST, COMMIT):
        (folder / file).unlink()
    commit(folder)


@pytest.mark.parametrize(("part", "check"), [("policy", "policy"), ("base", "base model")])
def test_a_folder_that_was_committed_again_is_found(version: Version, part: str, check: str) -> None:
    folder = version.folder / "data" / "ebbflow" / part
    flip(folder / "weights.safetensors")
    committed_again(folder)
    assert version.failed() == {check}


def test_a_stored_base_that_is_gone_is_found(version: Version) -> None:
    base = version.folder / "data" / "ebbflow" / "base"
    base.rename(version.folder / "elsewhere")
    assert version.checks()["base model"] == Check("base model", "FAILED", "it was stored with the version and is missing")


def changed_scores(version: Version, side: str, change: Callable[[dict[str, Any]], None], tag: bool) -> None:
    """Change the first row of a table of scores; with ``tag``, its digest too, as who can write both would."""
    path = version.folder / "evidence" / f"{side}.parquet"
    table = read_table(path)
    rows = table.to_pylist()
    change(rows[0])
    write_table(path, table.schema, pa.Table.from_pylist(rows, table.schema).to_batches(), {})
    if tag:
        version.set_tag(evidence.TAGS[path.name], evidence.sha256_of(path))


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
@pytest.mark.parametrize("side", evidence.SIDES)
@pytest.mark.parametrize("tag", [False, True], ids=["file", "file and tag"])
def test_a_score_in_a_table_is_found(
    version: Version, change: Callable[[dict[str, Any]], None], checks: set[str], side: str, tag: bool
) -> None:
    changed_scores(version, side, change, tag)
    assert version.failed() >= checks
    assert tag or f"{side} scores" in version.failed()


def test_a_decision_that_the_scores_do_not_give_is_found(make_version: Callable[..., Version]) -> None:
    """All that says so is changed: the file, its digest and the tag of the decision."""
    version = make_version(gain=0.0)
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    assert not gate["decision"]["promote"]
    gate["decision"]["promote"] = True
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS["gate.json"], evidence.sha256_of(path))
    version.set_tag(DECISION, GateDecision.model_validate(gate["decision"]).model_dump_json())
    assert "promote differ: promote = False" in version.checks()["gate"].detail


def test_an_evaluation_that_the_scores_do_not_give_is_found(version: Version) -> None:
    path = version.folder / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    gate["champion"]["held_out"]["ocr"] = 0.1
    path.write_text(json.dumps(gate, sort_keys=True))
    version.set_tag(evidence.TAGS["gate.json"], evidence.sha256_of(path))
    assert version.failed() == {"champion scores"}


RECIPES = {
    "a guardrail less": lambda settings: settings.update(guardrails=[]),
    "another weight": lambda settings: settings["rewards"][0].update(weight=1.0),
    "another confidence": lambda settings: settings["evaluation"].update(confidence=0.5001),
}


@pytest.mark.parametrize("change", RECIPES.values(), ids=RECIPES)
def test_another_recipe_is_found(version: Version, change: Callable[[dict[str, Any]], None]) -> None:
    """Even where its digest was changed with it."""
    path = version.folder / "evidence" / "recipe.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings, sort_keys=True, separators=(",", ":")))
    assert "recipe" in version.failed()
    version.set_tag(evidence.TAGS["recipe.json"], evidence.sha256_of(path))
    assert version.failed() & {"rewards", "gate"}


@pytest.mark.parametrize(
    ("tag", "check"),
    [
        (DECISION, "gate"),
        (COMPARED_WITH, "gate"),
        (evidence.REWARDS_DIGEST, "rewards"),
        ("ebbflow.base_digest", "base model"),
        (model_version.POLICY_DIGEST, "policy"),
        *((tag, None) for file, tag in evidence.TAGS.items() if file != evidence.PICTURES),
    ],
)
def test_a_tag_that_was_changed_or_deleted_is_found(version: Version, tag: str, check: str | None) -> None:
    version.set_tag(tag, "3")
    assert version.failed() >= ({check} if check else set())
    assert version.failed()
    version.client.delete_model_version_tag(version.name, version.version, tag)
    assert version.failed() >= ({check} if check else set())
    assert version.failed()


def test_an_alias_on_a_version_that_the_gate_refused_is_found(make_version: Callable[..., Version]) -> None:
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
    version, other = make_version(), make_version(promoted=False)
    rollback(version.uri, version.name, other.version)
    assert REPLACES in other.tags
    assert (version.failed(), other.failed()) == (set(), set())


def test_a_version_from_before_says_what_cannot_be_verified(recipe: Recipe, name: str, version: Version, tmp_path: Path) -> None:
    tracked = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")
    decision = GateDecision.model_validate(json.loads((version.folder / "evidence" / "gate.json").read_text())["decision"])
    data = version.folder / "data" / "ebbflow"
    lineage = {"base_digest": verify(data / "base")}
    made = register(tracked, data / "policy", data / "base", decision, lineage, model_name=name, expected_champion="1")
    for tag in (model_version.POLICY_DIGEST, model_version.MODEL_FILES_DIGEST, model_version.BASE_STORED):
        version.client.delete_model_version_tag(name, made.version, tag)
    _, checks = verify_version(version.uri, f"{name}/{made.version}", again=True)
    status = {check.name: check.status for check in checks}
    assert {status.pop(check) for check in ("base model", "alias")} == {"ok"}
    assert set(status.values()) == {"not stored"}
    shown = invoke(recipe, tmp_path, f"{name}/{made.version}")
    assert (shown.exit_code, "before Ebbflow stored it" in shown.output) == (0, True)


def test_a_base_that_is_only_referenced_is_not_stored(
    make_version: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_version, "MAX_STORED_BASE", 1)
    checks = make_version().checks()
    assert checks.pop("base model").status == "not stored"
    assert {check.status for check in checks.values()} == {"ok"}


def invoke(recipe: Recipe, folder: Path, *arguments: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": recipe.output}))
    return CliRunner().invoke(main, ["verify", *arguments, "--recipe", str(path)])


def test_the_command_prints_a_line_per_check(recipe: Recipe, name: str, version: Version, tmp_path: Path) -> None:
    for named in (name, f"{name}@champion", f"{name}@challenger", f"{name}/1"):
        done = invoke(recipe, tmp_path, named)
        assert done.exit_code == 0, done.output
        first, *lines = done.stdout.splitlines()
        assert first == f"{name} version 1"
        assert [line[:2] for line in lines] == ["ok"] * len(CHECKS)
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
def test_a_version_that_is_not_there(recipe: Recipe, name: str, version: Version, tmp_path: Path, named: str, says: str) -> None:
    done = invoke(recipe, tmp_path, named.format(name))
    assert done.exit_code == 1
    assert says in done.output
    assert "ok " not in done.output


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    done = invoke(Recipe(output=str(tmp_path / "none")), tmp_path, "model")
    assert done.exit_code == 1
    assert "no MLflow store at" in done.output
    assert not (tmp_path / "none").exists()


# --- again


@pytest.fixture
def trained(
    recipe: Recipe, name: str, base_folder: Path, prompts: list[Prompt], tmp_path: Path
) -> Callable[[Callable[[list[dict[str, Any]]], None]], Version]:
    """``trained(change)``: a policy that draws, registered with its own samples after ``change`` was made to them."""

    def make(change: Callable[[list[dict[str, Any]]], None]) -> Version:
        policy = Policy(load_model(base_folder), recipe.policy, 0)
        move(policy, 0.01)
        metadata = PolicyMetadata(
            base_digest=verify(base_folder), recipe_digest=recipe.digest, config=recipe.policy, version=5, steps=2
        )
        policy.save(tmp_path / "policy", metadata)
        table = prompt_table(tmp_path / "prompts.parquet", prompts)
        path = tmp_path / "samples.parquet"
        evaluation = evaluate_folder(recipe, base_folder, tmp_path / "policy", table, "1.1 online", path)
        samples = read_table(path)
        rows = samples.to_pylist()
        change(rows)
        write_table(path, samples.schema, pa.Table.from_pylist(rows, samples.schema).to_batches(), {})
        held_out = [row for row in rows if row["split"] == "held_out"]
        means = {metric: float(np.mean([row[metric] for row in held_out])) for metric in evaluation.held_out}
        sides = {
            "candidate": (evaluation.model_copy(update={"held_out": means}), path),
            "champion": evaluated(tmp_path / "champion.parquet", prompts, 0.0, "before"),
        }
        return registered(recipe, name, base_folder, tmp_path / "policy", sides, table)

    return make


def lighter(rows: list[dict[str, Any]]) -> None:
    """One pixel of one held-out picture by 4, and one score by .25."""
    row = next(row for row in rows if row["split"] == "held_out")
    picture = decode_png([row["image"]])
    picture[0, 0, 0, 0] ^= 4
    row.update(image=encode_png(picture)[0], similarity=row["similarity"] - 0.25, reward=row["reward"] - 0.5)


def test_samples_that_are_generated_again_have_the_same_bytes(trained: Callable[..., Version]) -> None:
    checks = trained(lambda rows: None).checks(again=True)
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["pictures again"].detail == "all 48 have the same bytes"


def test_samples_of_another_policy_are_found(trained: Callable[..., Version]) -> None:
    version = trained(lighter)
    assert version.failed() == set(), "only the policy itself can tell"
    checks = version.checks(again=True)
    assert {name for name, check in checks.items() if check.status == "FAILED"} == {"pictures again", "scores again"}
    assert checks["pictures again"].detail.startswith("1 of 48 differ: by up to 4 of 255 in a pixel, by ")
    assert checks["scores again"].detail.endswith("differ, by up to 0.5")


def test_how_much_pictures_differ_is_not_known_when_they_were_too_large(
    trained: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_STORED_PICTURES", 1)
    checks = trained(lighter).checks(again=True)
    assert "1 of 48 differ; by how much is not known" in checks["pictures again"].detail


def test_a_policy_that_does_not_verify_is_not_loaded(trained: Callable[..., Version]) -> None:
    version = trained(lambda rows: None)
    flip(next((version.folder / "data").rglob("diffusion_pytorch_model.safetensors")))
    assert version.checks(again=True)["samples again"].detail == "not generated, because of policy"


def test_code_that_a_version_names_runs_only_if_it_is_allowed(trained: Callable[..., Version]) -> None:
    version = trained(lambda rows: None)
    path = version.folder / "evidence" / evidence.RECIPE
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"model": {"family": "shutil:rmtree", "path": "x"}}))
    version.set_tag(evidence.TAGS[evidence.RECIPE], evidence.sha256_of(path))
    asked = version.checks(again=True)["samples again"]
    assert asked.status == "FAILED"
    assert asked.detail == "the version names code to run, shutil:rmtree; if you trust it, give --allow-code shutil:rmtree"
    _, allowed = verify_version(version.uri, f"{version.name}/{version.version}", again=True, allowed_code=["shutil"])
    assert "pictures again" in {check.name for check in allowed}, "which the policy, of another family, does not need"


def test_code_listing_is_what_the_digest_is_of(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("1")
    (names, *_) = json.loads(code_listing(tmp_path))["sources"]
    assert [name for name, _ in names] == ["one.py"]
