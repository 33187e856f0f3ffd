"""A registered version that was downloaded to be verified, and how a check says what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion

from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import sanitize_text
from ebbflow.registry.download import find_data_folder
from ebbflow.registry.model_version import CLEANED, EVIDENCE
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import read_table
from ebbflow.training.policy_metadata import list_named_code
from ebbflow.verification import evidence as stored

OLDER = "the version was registered before Ebbflow stored it"


Status = Literal["ok", "FAILED", "not stored", "adopted"]


class Check(NamedTuple):
    """The outcome of one check, a line for a person.

    Example::

        Check("policy", "ok", "3f9a1c2b4d5e")
        Check("base model", "not stored", "the version references its base model, ...")

    Attributes:
        is_changed: whether it failed because a file is missing or not what was registered.
    """

    name: str
    status: Status
    detail: str
    is_changed: bool = False

    def __str__(self) -> str:
        return f"{self.status:<10}  {self.name:<16}  {self.detail}"


class CheckFailedError(Exception):
    """What a check compares differs; the message says how."""


class ChangedFileError(CheckFailedError):
    """A file is missing, or is not the one that was registered."""


class NotStoredError(Exception):
    """What a check needs was not stored with the version; the message says why."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A downloaded version.

    Its folder, as MLflow stores it::

        model/
            MLmodel, requirements.txt, code/    # MLflow's own files and Ebbflow's sources
            data/policy/, data/base/            # ``data``; the base model only where it is small
            evidence/recipe.json, gate.json ... # ``evidence``: what the gate decided from

    Attributes:
        model: the folder of MLflow's model.
        champion: whether it holds the alias ``champion``.
    """

    version: ModelVersion
    model: Path
    champion: bool

    @property
    def tags(self) -> dict[str, str]:
        return self.version.tags

    @property
    def evidence(self) -> Path:
        return self.model / EVIDENCE

    @cached_property
    def data(self) -> Path:
        when = self.tags.get(CLEANED)
        if when:
            raise NotStoredError(f"`ebbflow clean` has deleted the weights ({when})")
        return find_data_folder(self.model)

    @property
    def has_evidence(self) -> bool:
        """Whether it was registered with evidence. Then nothing of it may be missing."""
        # A remaining tag is enough: deleting the folder must not make a version look like an old
        # one, whose missing files are excused.
        return self.evidence.exists() or any(tag in self.tags for tag in stored.TAGS.values())

    def find_file(self, name: str) -> Path:
        """Return the path of a file of the evidence."""
        path = self.evidence / name
        # A link in a downloaded version could name any file of this machine.
        if path.is_file() and not path.is_symlink():
            return path
        if self.has_evidence:
            raise ChangedFileError(f"{EVIDENCE}/{name} is missing")
        raise NotStoredError(OLDER)

    def require_tag(self, name: str) -> str:
        """Return a tag that is set when a version is registered with evidence."""
        value = self.tags.get(name)
        if value:
            return value
        if self.has_evidence:
            raise CheckFailedError(f"the tag {name} is missing")
        raise NotStoredError(OLDER)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object of the evidence."""
        # Anything may be in a file that somebody changed; callers index it as a dictionary.
        values = json.loads(self.find_file(name).read_bytes())
        if not isinstance(values, dict):
            raise CheckFailedError(f"{EVIDENCE}/{name} is no JSON object")
        return values

    @property
    def recipe(self) -> Recipe:
        """The recipe as far as gate and registry need it: without its stages, their branches, and
        how the evaluation samples. Reading it imports no code that the version names.
        """
        settings = self._settings
        evaluation = {
            key: value
            for key, value in settings["evaluation"].items()
            if key not in ("sampler", "eta")
        }
        return Recipe.model_validate(settings | {"evaluation": evaluation})

    @property
    def evaluated_recipe(self) -> Recipe:
        """The recipe with how the evaluation samples. Reading it imports a sampler that is named
        by its path, so the caller must allow that code first (``named_code``).
        """
        return Recipe.model_validate(self._settings)

    @property
    def named_code(self) -> list[str]:
        """The code that sampling and scoring would run, apart from Ebbflow's own."""
        return [
            *self.recipe.plugin_paths,
            *list_named_code(self.recipe.model, self._settings["evaluation"].get("sampler", "ode")),
        ]

    # Stages and branches may name algorithms and teachers of the machine that trained; the gate did
    # not look at them.
    @property
    def _settings(self) -> dict[str, Any]:
        settings = {
            key: value
            for key, value in self.read_json(stored.RECIPE).items()
            if key not in ("stages", "branches")
        }
        return {"evaluation": {}, **settings}

    def read_scores(self, side: str) -> pa.Table:
        return read_table(self.find_file(stored.SCORES[side]))

    def read_evaluation(self, side: str) -> Evaluation:
        return Evaluation.model_validate(self.read_json(stored.GATE)[side])

    @property
    def decision(self) -> GateDecision:
        return GateDecision.model_validate(self.read_json(stored.GATE)["decision"])


def check_file(registered: RegisteredVersion, name: str) -> str:
    """Compare a file of the evidence with the digest in its tag; returns the shortened digest."""
    digest = sha256_of_file(registered.find_file(name))
    return compare_digests(digest, registered.require_tag(stored.TAGS[name]))


def read_column(table: pa.Table, name: str) -> np.ndarray:
    """Read a column as float64; NaN where there is no value."""
    if name not in table.column_names:
        raise CheckFailedError(f"the table of scores has no column {name!r}")
    return np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)


def compare_digests(digest: str, expected: str) -> str:
    """Return the digest, shortened for a person, if it is the expected one.

    Raises:
        ChangedFileError: it is another.
    """
    if digest != expected:
        raise ChangedFileError(
            f"sha256 {shorten_digest(digest)}, registered was {shorten_digest(expected)}"
        )
    return shorten_digest(digest)


def shorten_digest(digest: str) -> str:
    """Return the first characters of a digest, as a line of output may show them."""
    # It comes from a tag, which may hold anything.
    return sanitize_text(digest[:12], 40)
