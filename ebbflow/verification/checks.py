"""Whether a registered version is what the gate decided on: every digest, and the decision made
again from the stored scores.

Digests are tags of the version; the files are artifacts of it. Who can change both, consistently,
is not found out.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion

from ebbflow.data.images import decode_pngs
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import KEY
from ebbflow.evaluation.distribution import average_per_prompt
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import iter_leaves, sanitize_text
from ebbflow.recipe.plugins import list_disallowed_paths
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.registry.lock import CHAMPION, find_version_by_alias
from ebbflow.registry.model_version import (
    BASE_STORED,
    EVIDENCE,
    MODEL_FILES_DIGEST,
    POLICY_DIGEST,
    compute_model_files_digest,
)
from ebbflow.registry.promotion import (
    BASE_DIGEST,
    COMPARED_WITH,
    DECISION,
    NO_CHAMPION,
    REPLACES,
    download_version,
    find_data_folder,
    find_named_version,
    format_decision_tag,
)
from ebbflow.registry.serving import find_base_folder
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.identity import list_code
from ebbflow.storage.tables import read_table
from ebbflow.tracking.store import connect_to_store
from ebbflow.training.policy_metadata import list_named_code, read_policy_metadata
from ebbflow.verification import evidence as stored

LIBRARY = Path(__file__).parents[1]
OLDER = "the version was registered before Ebbflow stored it"
ROUNDING = 1e-9
"""Relative difference that sums of the same scores may have on another machine."""

Status = Literal["ok", "FAILED", "not stored"]


class Check(NamedTuple):
    """The outcome of one check, a line for a person."""

    name: str
    status: Status
    detail: str

    def __str__(self) -> str:
        return f"{self.status:<10}  {self.name:<16}  {self.detail}"


class _CheckFailed(Exception):
    """A check failed: says what differs."""


class _NotStored(Exception):
    """What a check needs was not stored with the version: says why."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A downloaded version.

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
        return find_data_folder(self.model)

    @property
    def has_evidence(self) -> bool:
        """Whether it was registered with evidence. Then nothing of it may be missing."""
        return self.evidence.exists() or any(tag in self.tags for tag in stored.TAGS.values())

    def find_file(self, name: str) -> Path:
        """A file of the evidence."""
        path = self.evidence / name
        if path.is_file() and not path.is_symlink():
            return path
        raise (
            _CheckFailed(f"{EVIDENCE}/{name} is missing")
            if self.has_evidence
            else _NotStored(OLDER)
        )

    def require_tag(self, name: str) -> str:
        """A tag that was set when the version was registered with evidence."""
        if value := self.tags.get(name):
            return value
        raise _CheckFailed(f"the tag {name} is missing") if self.has_evidence else _NotStored(OLDER)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object of the evidence."""
        values = json.loads(self.find_file(name).read_bytes())
        if not isinstance(values, dict):
            raise _CheckFailed(f"{EVIDENCE}/{name} is no JSON object")
        return values

    @property
    def recipe(self) -> Recipe:
        """The recipe as far as gate and registry need it, and nothing is imported to read it:
        without its stages, their branches, and how the evaluation draws.
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
        """The recipe with how the evaluation draws: a sampler that is code of somebody's is
        imported.
        """
        return Recipe.model_validate(self._settings)

    @property
    def named_code(self) -> list[str]:
        """The code that drawing and scoring run, apart from Ebbflow's own."""
        return [
            *self.recipe.plugin_paths,
            *list_named_code(self.recipe.model, self._settings["evaluation"].get("sampler", "ode")),
        ]

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


def verify_version(
    tracking_uri: str, named: str, again: bool = False, allowed_code: Collection[str] = ()
) -> tuple[ModelVersion, list[Check]]:
    """Check a registered version.

    Args:
        named: ``MODEL``, ``MODEL@alias`` or ``MODEL/version``.
        again: also generate the held-out samples again, and compare pictures and scores with the
            stored ones.
        allowed_code: code that the version may name and that runs then, ``package.module:name`` or
            a module.

    Raises:
        RegistryError: there is no such version, or it cannot be downloaded.
    """
    version = find_named_version(tracking_uri, named)
    champion = find_version_by_alias(connect_to_store(tracking_uri), version.name, CHAMPION)
    is_champion = champion is not None and str(champion.version) == str(version.version)
    with tempfile.TemporaryDirectory(prefix="ebbflow-verify-") as folder:
        model = download_version(tracking_uri, version.name, str(version.version), Path(folder))
        found = RegisteredVersion(version, model, is_champion)
        checks = list(_run_checks(CHECKS, found))
        if again:
            checks += _generate_and_compare(
                found, checks, Path(folder) / "again.parquet", allowed_code
            )
    return version, checks


def _run_checks(
    checks: Mapping[str, Callable[[RegisteredVersion], str]], found: RegisteredVersion
) -> Iterator[Check]:
    for name, check in checks.items():
        try:
            yield Check(name, "ok", check(found))
        except _NotStored as reason:
            yield Check(name, "not stored", str(reason))
        except _CheckFailed as reason:
            yield Check(name, "FAILED", str(reason))
        except (
            Exception
        ) as error:  # files that somebody changed can fail anywhere, and that is what is looked for
            yield Check(name, "FAILED", sanitize_text(f"{type(error).__name__}: {error}", 300))


def _check_policy(found: RegisteredVersion) -> str:
    folder = found.data / "policy"
    digest = verify_folder(folder)
    metadata = read_policy_metadata(folder)
    if (base := found.tags.get(BASE_DIGEST)) and metadata.base_digest != base:
        raise _CheckFailed(
            f"policy.json names the base model {_shorten_digest(metadata.base_digest)}, the"
            f" version's tag {_shorten_digest(base)}"
        )
    if POLICY_DIGEST not in found.tags and not found.has_evidence:
        raise _NotStored(
            f"the files match their own manifest, but the version has no digest of it: {OLDER}"
        )
    return _check_digest(digest, found.require_tag(POLICY_DIGEST))


def _check_model_files(found: RegisteredVersion) -> str:
    return _check_digest(
        compute_model_files_digest(found.model), found.require_tag(MODEL_FILES_DIGEST)
    )


def _check_base(found: RegisteredVersion) -> str:
    folder = found.data / "base"
    if not folder.is_dir():
        if found.tags.get(BASE_STORED) == "true":
            raise _CheckFailed("it was stored with the version and is missing")
        raise _NotStored(
            "the version references its base model, which was too large to be stored with it"
        )
    return _check_digest(verify_folder(folder), found.require_tag(BASE_DIGEST))


def _build_file_check(name: str) -> Callable[[RegisteredVersion], str]:
    def check_file(found: RegisteredVersion) -> str:
        return _check_digest(
            sha256_of_file(found.find_file(name)), found.require_tag(stored.TAGS[name])
        )

    return check_file


def _check_rewards(found: RegisteredVersion) -> str:
    found.find_file(stored.RECIPE)
    detail = _check_digest(
        stored.compute_rewards_digest(found.read_json(stored.RECIPE)),
        found.require_tag(stored.REWARDS_DIGEST),
    )
    for side in stored.SIDES:
        table = found.read_scores(side)
        # Not evaluated_rewards: to learn whether a reward compares, that would import the code
        # which the version names.
        rewards = [config for config in found.recipe.rewards if config.column in table.column_names]
        total = np.sum([_compute_weighted_scores(table, config) for config in rewards], axis=0)
        if wrong := int(
            (
                ~np.isclose(
                    total, _read_column(table, "reward"), ROUNDING, ROUNDING, equal_nan=True
                )
            ).sum()
        ):
            raise _CheckFailed(
                f"{wrong} rewards of the {side} are not the weighted sum of their scores"
            )
    return detail


def _compute_weighted_scores(table: pa.Table, config: RewardConfig) -> np.ndarray:
    """The weighted scores of a trained reward; 0 for prompts that it does not score."""
    scores = config.weight * _read_column(table, config.column)
    if not config.prompts:
        return scores
    return np.where([config.applies_to(name) for name in table["source"].to_pylist()], scores, 0.0)


def _check_prompts(found: RegisteredVersion) -> str:
    detail = _build_file_check(stored.PROMPT_TABLE)(found)
    prompts = {
        prompt.prompt_id: prompt
        for prompt in read_prompts(found.find_file(stored.PROMPT_TABLE), "held_out")
    }
    for side in stored.SIDES:
        table = found.read_scores(side)
        rows = table.select(
            [
                name
                for name in ("prompt_id", "prompt", "target", "source")
                if name in table.column_names
            ]
        ).to_pylist()
        if {row["prompt_id"] for row in rows} != prompts.keys():
            raise _CheckFailed(f"the {side} was scored on other prompts")
        if wrong := [
            row["prompt_id"]
            for row in rows
            if not _row_matches_prompt(row, prompts[row["prompt_id"]])
        ]:
            raise _CheckFailed(
                f"the {side} was scored on another text or prompt set for prompt {wrong[0]}"
            )
    return f"{detail}, {len(prompts)} held out"


def _row_matches_prompt(row: Mapping[str, Any], prompt: Prompt) -> bool:
    return (row["prompt"], row["target"], row.get("source") or prompt.source) == (
        prompt.prompt,
        prompt.target,
        prompt.source,
    )


def _check_code(found: RegisteredVersion) -> str:
    detail = _build_file_check(stored.CODE)(found)
    then = found.read_json(stored.CODE)
    now = json.loads(list_code(LIBRARY))
    files = {name for name, _ in _find_different_entries(then["sources"][0], now["sources"][0])}
    packages = {
        name
        for name, _ in _find_different_entries(then["versions"].items(), now["versions"].items())
    }
    if not files and not packages:
        return f"{detail}, as installed here"
    return (
        f"{detail}; installed here are {len(files)} other files of Ebbflow and other versions of"
        f" {len(packages)} packages"
    )


def _find_different_entries(then: Any, now: Any) -> set[tuple[str, str]]:
    return set(map(tuple, then)) ^ set(map(tuple, now))


def _build_scores_check(side: str) -> Callable[[RegisteredVersion], str]:
    def check_scores(found: RegisteredVersion) -> str:
        detail = _build_file_check(stored.SCORES[side])(found)
        table = found.read_scores(side)
        evaluation = found.read_evaluation(side)
        for name, mean in evaluation.held_out.items():
            stored_mean = float(
                np.mean(
                    average_per_prompt(table["prompt_id"].to_numpy(), _read_column(table, name))
                )
            )
            if not math.isclose(stored_mean, mean, rel_tol=ROUNDING, abs_tol=ROUNDING):
                raise _CheckFailed(
                    f"the mean of {name} is {stored_mean:.6f}, the evaluation says {mean:.6f}"
                )
        return f"{detail}, {table.num_rows} samples"

    return check_scores


def _check_gate(found: RegisteredVersion) -> str:
    detail = _build_file_check(stored.GATE)(found)
    decision = found.decision
    sides = {side: found.read_evaluation(side) for side in stored.SIDES}
    if found.require_tag(DECISION) != format_decision_tag(decision):
        raise _CheckFailed(f"the tag {DECISION} is not the stored decision")
    compared = found.require_tag(COMPARED_WITH)
    if compared != NO_CHAMPION and decision.champion != f"champion v{compared}":
        raise _CheckFailed(
            f"the decision is about {decision.champion!r}, the tag {COMPARED_WITH} says"
            f" {compared!r}"
        )
    made = decide_by_gate(
        found.recipe,
        sides["candidate"],
        sides["champion"],
        found.read_scores("candidate"),
        found.read_scores("champion"),
    )
    if differ := _find_differing_values(decision.model_dump(), made.model_dump()):
        raise _CheckFailed(
            f"decided again from the stored scores, {', '.join(differ[:3])} differ: promote ="
            f" {made.promote}"
        )
    return (
        f"{detail}: {'promote' if made.promote else 'do not promote'}, as decided again from the"
        " stored scores"
    )


def _find_differing_values(was: Any, now: Any) -> list[str]:
    """Dotted names of the values that differ by more than rounding."""
    before, after = (
        {".".join(map(str, path)): value for path, value in iter_leaves(part)}
        for part in (was, now)
    )
    leaves = {
        name
        for name in before.keys() | after.keys()
        if not isinstance(before.get(name), (dict, list))
    }
    return sorted(name for name in leaves if not _are_equal(before.get(name), after.get(name)))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING) or (
            math.isnan(one) and math.isnan(other)
        )
    return bool(one == other)


def _check_alias(found: RegisteredVersion) -> str:
    """The champion must be a version that the gate let through and that a promotion or a rollback
    moved the alias to.
    """
    if not found.champion:
        return f"the version is not {CHAMPION}"
    text = found.require_tag(DECISION)
    if not text.startswith('{"promote":true,'):
        raise _CheckFailed(f"the alias {CHAMPION} points to this version, which the gate refused")
    if REPLACES not in found.tags:
        raise _CheckFailed(
            f"neither a promotion nor a rollback moved the alias {CHAMPION} to this version"
        )
    return f"{CHAMPION}, and the gate let it through"


CHECKS: dict[str, Callable[[RegisteredVersion], str]] = {
    "model files": _check_model_files,
    "policy": _check_policy,
    "base model": _check_base,
    "recipe": _build_file_check(stored.RECIPE),
    "rewards": _check_rewards,
    "prompts": _check_prompts,
    "code": _check_code,
    "candidate scores": _build_scores_check("candidate"),
    "champion scores": _build_scores_check("champion"),
    "gate": _check_gate,
    "alias": _check_alias,
}
"""What is checked without generating anything: each gives the detail of its line, or raises."""


def _generate_and_compare(
    found: RegisteredVersion, checks: list[Check], path: Path, allowed_code: Collection[str]
) -> Iterator[Check]:
    """Checks of the held-out samples, generated again with the stored policy. What did not verify
    is not loaded.
    """
    inputs = ("model files", "policy", "base model", "recipe", "rewards", "prompts")
    if failed := [
        check.name for check in checks if check.name in inputs and check.status == "FAILED"
    ]:
        yield Check("samples again", "FAILED", f"not generated, because of {', '.join(failed)}")
        return

    def generate_samples(found: RegisteredVersion) -> str:
        from ebbflow.evaluation.evaluate import evaluate_folder

        if foreign := list_disallowed_paths(found.named_code, allowed_code):
            raise _CheckFailed(
                f"the version names code to run, {foreign[0]}; if you trust it, give --allow-code"
                f" {foreign[0]}"
            )
        prompts = found.find_file(stored.PROMPT_TABLE)
        evaluation = evaluate_folder(
            found.evaluated_recipe,
            find_base_folder(found.data),
            found.data / "policy",
            prompts,
            "again",
            path,
        )
        return f"generated and scored in {sum(evaluation.seconds.values()):.1f} s"

    compared = {
        "pictures again": lambda found: _compare_pictures(found, path),
        "scores again": lambda f: _compare_scores(f, path),
    }
    (generated,) = _run_checks({"samples again": generate_samples}, found)
    yield generated
    if generated.status == "ok":
        yield from _run_checks(compared, found)


def _compare_pictures(found: RegisteredVersion, path: Path) -> str:
    rows = stored.select_held_out(read_table(path))
    was = stored.index_by_key(found.read_scores("candidate"), stored.PICTURE_DIGEST)
    now = dict(
        zip(stored.index_by_key(rows, "image"), stored.compute_picture_digests(rows), strict=True)
    )
    differ = [key for key in now if now[key] != was.get(key)]
    if not differ:
        return f"all {len(now)} have the same bytes"
    raise _CheckFailed(
        f"{len(differ)} of {len(now)} differ{_measure_picture_difference(found, rows, differ)}"
    )


def _measure_picture_difference(
    found: RegisteredVersion, rows: pa.Table, differ: list[tuple[int, int]]
) -> str:
    if stored.TAGS[stored.PICTURES] not in found.tags:
        return "; by how much is not known: the stored pictures were too large to be kept"
    detail = _build_file_check(stored.PICTURES)(found)
    assert detail
    tables = (read_table(found.find_file(stored.PICTURES), stored.PICTURE_TABLE), rows)
    was, now = (stored.index_by_key(table, "image") for table in tables)
    pairs = [decode_pngs([was[key], now[key]]).astype(int) for key in differ]
    distances = np.array([np.abs(before - after).mean() for before, after in pairs])
    largest = max(int(np.abs(before - after).max()) for before, after in pairs)
    return f": by up to {largest} of 255 in a pixel, by {distances.mean():.3g} on average"


def _compare_scores(found: RegisteredVersion, path: Path) -> str:
    in_order = [(name, "ascending") for name in KEY]
    was = found.read_scores("candidate").sort_by(in_order)
    now = stored.select_held_out(read_table(path)).sort_by(in_order)
    names = [field.name for field in was.schema if pa.types.is_floating(field.type)]
    if absent := [name for name in names if name not in now.column_names]:
        raise _CheckFailed(f"{', '.join(absent)} cannot be measured here")
    before, after = (
        np.stack([_read_column(table, name) for name in names]) for table in (was, now)
    )
    equal = (before == after) | (np.isnan(before) & np.isnan(after))
    if equal.all():
        return f"all {equal.size} are equal"
    raise _CheckFailed(
        f"{(~equal).sum()} of {equal.size} differ, by up to {np.nanmax(np.abs(before - after)):.3g}"
    )


def _read_column(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64; NaN where there is no value."""
    if name not in table.column_names:
        raise _CheckFailed(f"the table of scores has no column {name!r}")
    return np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)


def _check_digest(found: str, expected: str) -> str:
    if found != expected:
        raise _CheckFailed(
            f"sha256 {_shorten_digest(found)}, registered was {_shorten_digest(expected)}"
        )
    return _shorten_digest(found)


def _shorten_digest(digest: str) -> str:
    return sanitize_text(digest[:12], 40)
