"""Registered versions with evidence, from made-up scores, which the tests of verification
change."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa
import yaml
from click.testing import CliRunner, Result
from mlflow import MlflowClient

from ebbflow.cli import main
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.records import Evaluation
from ebbflow.data.schema import PROMPTS, build_evaluation_schema
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.evaluation.gate_scores import refuse_unequal_scores
from ebbflow.recipe import Recipe
from ebbflow.registry.promotion import promote_version, register_version
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.tables import read_table, write_table
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from ebbflow.verification.checks import Check, verify_version
from ebbflow.verification.evidence import GateInputs, write_evidence

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


class VersionCopy:
    """A version's files and its store as they are now, in a folder of their own."""

    def __init__(self, version: Version, folder: Path) -> None:
        self.version = version
        self.database = Path(version.uri.removeprefix("sqlite:///"))
        self.files_copy = folder / "files"
        self.database_copy = folder / self.database.name
        shutil.copytree(version.folder, self.files_copy)
        copy_database(self.database, self.database_copy)

    def restore(self) -> None:
        shutil.rmtree(self.version.folder)
        shutil.copytree(self.files_copy, self.version.folder)
        copy_database(self.database_copy, self.database)


def copy_database(source: Path, target: Path) -> None:
    """Copy by SQLite, whose open connections to ``target`` then read the copy."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def committed(folder: Path, files: dict[str, str]) -> Path:
    with write_new_folder(folder) as unfinished:
        for path, text in files.items():
            (unfinished / path).write_text(text)
    return folder


def prompt_table(path: Path, prompts: list[Prompt]) -> Path:
    write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS), path)
    return path


def evaluated(
    path: Path, prompts: list[Prompt], gain: float, label: str, repeated: int = 0
) -> tuple[Evaluation, Path]:
    """An evaluation with made-up scores; of the candidate they are higher by about ``gain``.

    Args:
        repeated: how many prompts have three samples instead of one.
    """
    drawn = [prompt for prompt in prompts if prompt.split != "train"]
    numbers = [0] * len(drawn) + [1] * repeated + [2] * repeated
    shown = [*drawn, *drawn[:repeated], *drawn[:repeated]]
    scores = np.random.default_rng(len(label)).uniform(0.2, 0.4, len(shown)) + gain
    # Other pictures on each side: equal ones would have to have equal scores.
    pictures = encode_pngs(
        (np.arange(len(shown), dtype=np.uint8) + 100 * (label == "before"))[:, None, None, None]
        .repeat(8, 1)
        .repeat(8, 2)
        .repeat(3, 3)
    )
    keys = ("prompt_id", "prompt", "target", "split", "source")
    rows = [
        {key: vars(prompt)[key] for key in keys}
        | {
            "sample": number,
            "image": picture,
            "reward": 2 * score,
            "similarity": score,
            "ocr": 0.5,
            "failure": None,
        }
        | ({"similarity": None, "ocr": score} if prompt.source == "signs" else {})
        for prompt, number, picture, score in zip(shown, numbers, pictures, scores, strict=True)
    ]
    table = pa.Table.from_pylist(rows, build_evaluation_schema(METRICS))
    write_table(path, table.schema, table.to_batches(), {})
    held_out = table.to_pandas().query("split == 'held_out'")
    means = held_out.groupby("prompt_id")[METRICS].mean().mean().to_dict()
    record = Evaluation(
        label=label,
        policy_version=1,
        held_out=means,
        validation={},
        coverage=1.0,
        velocity_drift=0.0,
        seconds={"sampling": 1.0},
    )
    return record, path


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
    scores = read_table(its), read_table(other)
    decision = refuse_unequal_scores(decide_by_gate(recipe, candidate, champion, *scores), *scores)
    evaluations = {side: evaluation for side, (evaluation, _) in sides.items()}
    inputs = GateInputs(
        recipe,
        decision,
        evaluations,
        {side: path for side, (_, path) in sides.items()},
        prompts,
        CODE,
    )
    tags = write_evidence(policy.parent / "evidence", inputs) | {"base_digest": verify_folder(base)}
    tracked = start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")
    uri = resolve_tracking_uri(recipe)
    made = register_version(
        tracked,
        policy,
        base,
        decision,
        tags,
        model_name=name,
        expected_champion=None,
        evidence=policy.parent / "evidence",
    )
    if promoted and decision.promote:
        promote_version(tracked, made, {"promoted_in": "an execution"}, expected_champion=None)
    client = connect_to_store(uri)
    place = client.get_model_version_download_uri(name, made.version)
    return Version(uri, name, made.version, Path(url2pathname(urlparse(place).path)), client)


def flip(path: Path) -> None:
    """Change one byte, the last: that of a number, a brace or a tensor."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def invoke(recipe: Recipe, folder: Path, *arguments: str) -> Result:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": recipe.output}))
    return CliRunner().invoke(main, ["verify", *arguments, "--recipe", str(path)])
