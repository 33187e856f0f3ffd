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

from ebbflow.data.images import decode_png
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import KEY
from ebbflow.evaluation.distribution import mean_over_prompts
from ebbflow.evaluation.gate import decide
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import iter_leaves, sanitize
from ebbflow.recipe.plugins import not_allowed
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.storage.artifacts import verify
from ebbflow.storage.disk import sha256_of
from ebbflow.storage.identity import code_listing
from ebbflow.storage.tables import read_table
from ebbflow.tracking import evidence as stored
from ebbflow.tracking.model_version import (
    BASE_STORED,
    EVIDENCE,
    MODEL_FILES_DIGEST,
    POLICY_DIGEST,
    model_files_digest,
)
from ebbflow.tracking.registry import (
    BASE_DIGEST,
    COMPARED_WITH,
    DECISION,
    NO_CHAMPION,
    REPLACES,
    data_folder,
    decision_tag,
    download_version,
    named_version,
)
from ebbflow.tracking.registry_lock import CHAMPION, version_by_alias
from ebbflow.tracking.serving import base_folder
from ebbflow.tracking.store import connect
from ebbflow.training.policy_metadata import named_code, read_policy_metadata

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


class _Failed(Exception):
    """A check failed: says what differs."""


class _NotStored(Exception):
    """What a check needs was not stored with the version: says why."""


@dataclass(frozen=True)
class Registered:
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
        return data_folder(self.model)

    @property
    def has_evidence(self) -> bool:
        """Whether it was registered with evidence. Then nothing of it may be missing."""
        own = [tag for file, tag in stored.TAGS.items() if file != stored.RECIPE]
        return self.evidence.exists() or any(tag in self.tags for tag in own)

    def file(self, name: str) -> Path:
        """A file of the evidence."""
        path = self.evidence / name
        if path.is_file() and not path.is_symlink():
            return path
        raise _Failed(f"{EVIDENCE}/{name} is missing") if self.has_evidence else _NotStored(OLDER)

    def tag(self, name: str) -> str:
        """A tag that was set when the version was registered with evidence."""
        if value := self.tags.get(name):
            return value
        raise _Failed(f"the tag {name} is missing") if self.has_evidence else _NotStored(OLDER)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the evidence."""
        values = json.loads(self.file(name).read_bytes())
        if not isinstance(values, dict):
            raise _Failed(f"{EVIDENCE}/{name} is no JSON object")
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
            *self.recipe.own_paths,
            *named_code(self.recipe.model, self._settings["evaluation"].get("sampler", "ode")),
        ]

    @property
    def _settings(self) -> dict[str, Any]:
        settings = {
            key: value
            for key, value in self.json(stored.RECIPE).items()
            if key not in ("stages", "branches")
        }
        return {"evaluation": {}, **settings}

    def scores(self, side: str) -> pa.Table:
        return read_table(self.file(stored.SCORES[side]))

    def evaluation(self, side: str) -> Evaluation:
        return Evaluation.model_validate(self.json(stored.GATE)[side])

    @property
    def decision(self) -> GateDecision:
        return GateDecision.model_validate(self.json(stored.GATE)["decision"])


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
    version = named_version(tracking_uri, named)
    champion = version_by_alias(connect(tracking_uri), version.name, CHAMPION)
    is_champion = champion is not None and str(champion.version) == str(version.version)
    with tempfile.TemporaryDirectory(prefix="ebbflow-verify-") as folder:
        model = download_version(tracking_uri, version.name, str(version.version), Path(folder))
        found = Registered(version, model, is_champion)
        checks = list(_run(CHECKS, found))
        if again:
            checks += _again(found, checks, Path(folder) / "again.parquet", allowed_code)
    return version, checks


def _run(checks: Mapping[str, Callable[[Registered], str]], found: Registered) -> Iterator[Check]:
    for name, check in checks.items():
        try:
            yield Check(name, "ok", check(found))
        except _NotStored as reason:
            yield Check(name, "not stored", str(reason))
        except _Failed as reason:
            yield Check(name, "FAILED", str(reason))
        except (
            Exception
        ) as error:  # files that somebody changed can fail anywhere, and that is what is looked for
            yield Check(name, "FAILED", sanitize(f"{type(error).__name__}: {error}", 300))


def _policy(found: Registered) -> str:
    folder = found.data / "policy"
    digest = verify(folder)
    metadata = read_policy_metadata(folder)
    if (base := found.tags.get(BASE_DIGEST)) and metadata.base_digest != base:
        raise _Failed(
            f"policy.json names the base model {_short(metadata.base_digest)}, the version's tag"
            f" {_short(base)}"
        )
    if POLICY_DIGEST not in found.tags and not found.has_evidence:
        raise _NotStored(
            f"the files match their own manifest, but the version has no digest of it: {OLDER}"
        )
    return _same(digest, found.tag(POLICY_DIGEST))


def _model_files(found: Registered) -> str:
    return _same(model_files_digest(found.model), found.tag(MODEL_FILES_DIGEST))


def _base(found: Registered) -> str:
    folder = found.data / "base"
    if not folder.is_dir():
        if found.tags.get(BASE_STORED) == "true":
            raise _Failed("it was stored with the version and is missing")
        raise _NotStored(
            "the version references its base model, which was too large to be stored with it"
        )
    return _same(verify(folder), found.tag(BASE_DIGEST))


def _file(name: str) -> Callable[[Registered], str]:
    def check(found: Registered) -> str:
        return _same(sha256_of(found.file(name)), found.tag(stored.TAGS[name]))

    return check


def _rewards(found: Registered) -> str:
    found.file(stored.RECIPE)
    detail = _same(
        stored.rewards_digest(found.json(stored.RECIPE)), found.tag(stored.REWARDS_DIGEST)
    )
    for side in stored.SIDES:
        table = found.scores(side)
        # Not evaluated_rewards: to learn whether a reward compares, that would import the code
        # which the version names.
        rewards = [config for config in found.recipe.rewards if config.column in table.column_names]
        total = np.sum([_weighted(table, config) for config in rewards], axis=0)
        if wrong := int(
            (~np.isclose(total, _values(table, "reward"), ROUNDING, ROUNDING, equal_nan=True)).sum()
        ):
            raise _Failed(f"{wrong} rewards of the {side} are not the weighted sum of their scores")
    return detail


def _weighted(table: pa.Table, config: RewardConfig) -> np.ndarray:
    """The weighted scores of a trained reward; 0 for prompts that it does not score."""
    scores = config.weight * _values(table, config.column)
    if not config.prompts:
        return scores
    return np.where([config.applies_to(name) for name in table["source"].to_pylist()], scores, 0.0)


def _prompts(found: Registered) -> str:
    detail = _file(stored.PROMPT_TABLE)(found)
    prompts = {
        prompt.prompt_id: prompt
        for prompt in read_prompts(found.file(stored.PROMPT_TABLE), "held_out")
    }
    for side in stored.SIDES:
        table = found.scores(side)
        rows = table.select(
            [
                name
                for name in ("prompt_id", "prompt", "target", "source")
                if name in table.column_names
            ]
        ).to_pylist()
        if {row["prompt_id"] for row in rows} != prompts.keys():
            raise _Failed(f"the {side} was scored on other prompts")
        if wrong := [
            row["prompt_id"] for row in rows if not _is_of(row, prompts[row["prompt_id"]])
        ]:
            raise _Failed(
                f"the {side} was scored on another text or prompt set for prompt {wrong[0]}"
            )
    return f"{detail}, {len(prompts)} held out"


def _is_of(row: Mapping[str, Any], prompt: Prompt) -> bool:
    return (row["prompt"], row["target"], row.get("source") or prompt.source) == (
        prompt.prompt,
        prompt.target,
        prompt.source,
    )


def _code(found: Registered) -> str:
    detail = _file(stored.CODE)(found)
    then = found.json(stored.CODE)
    now = json.loads(code_listing(LIBRARY))
    files = {name for name, _ in _difference(then["sources"][0], now["sources"][0])}
    packages = {name for name, _ in _difference(then["versions"].items(), now["versions"].items())}
    if not files and not packages:
        return f"{detail}, as installed here"
    return (
        f"{detail}; installed here are {len(files)} other files of Ebbflow and other versions of"
        f" {len(packages)} packages"
    )


def _difference(then: Any, now: Any) -> set[tuple[str, str]]:
    return set(map(tuple, then)) ^ set(map(tuple, now))


def _scores(side: str) -> Callable[[Registered], str]:
    def check(found: Registered) -> str:
        detail = _file(stored.SCORES[side])(found)
        table = found.scores(side)
        evaluation = found.evaluation(side)
        for name, mean in evaluation.held_out.items():
            stored_mean = float(
                np.mean(mean_over_prompts(table["prompt_id"].to_numpy(), _values(table, name)))
            )
            if not math.isclose(stored_mean, mean, rel_tol=ROUNDING, abs_tol=ROUNDING):
                raise _Failed(
                    f"the mean of {name} is {stored_mean:.6f}, the evaluation says {mean:.6f}"
                )
        return f"{detail}, {table.num_rows} samples"

    return check


def _gate(found: Registered) -> str:
    detail = _file(stored.GATE)(found)
    decision = found.decision
    sides = {side: found.evaluation(side) for side in stored.SIDES}
    if found.tag(DECISION) != decision_tag(decision):
        raise _Failed(f"the tag {DECISION} is not the stored decision")
    compared = found.tag(COMPARED_WITH)
    if compared != NO_CHAMPION and decision.champion != f"champion v{compared}":
        raise _Failed(
            f"the decision is about {decision.champion!r}, the tag {COMPARED_WITH} says"
            f" {compared!r}"
        )
    made = decide(
        found.recipe,
        sides["candidate"],
        sides["champion"],
        found.scores("candidate"),
        found.scores("champion"),
    )
    if differ := _differ(decision.model_dump(), made.model_dump()):
        raise _Failed(
            f"decided again from the stored scores, {', '.join(differ[:3])} differ: promote ="
            f" {made.promote}"
        )
    return (
        f"{detail}: {'promote' if made.promote else 'do not promote'}, as decided again from the"
        " stored scores"
    )


def _differ(was: Any, now: Any) -> list[str]:
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
    return sorted(name for name in leaves if not _equal(before.get(name), after.get(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING) or (
            math.isnan(one) and math.isnan(other)
        )
    return bool(one == other)


def _alias(found: Registered) -> str:
    """The champion must be a version that the gate let through and that a promotion or a rollback
    moved the alias to.
    """
    if not found.champion:
        return f"the version is not {CHAMPION}"
    text = found.tag(DECISION)
    if not text.startswith('{"promote":true,'):
        raise _Failed(f"the alias {CHAMPION} points to this version, which the gate refused")
    if REPLACES not in found.tags:
        raise _Failed(
            f"neither a promotion nor a rollback moved the alias {CHAMPION} to this version"
        )
    return f"{CHAMPION}, and the gate let it through"


CHECKS: dict[str, Callable[[Registered], str]] = {
    "model files": _model_files,
    "policy": _policy,
    "base model": _base,
    "recipe": _file(stored.RECIPE),
    "rewards": _rewards,
    "prompts": _prompts,
    "code": _code,
    "candidate scores": _scores("candidate"),
    "champion scores": _scores("champion"),
    "gate": _gate,
    "alias": _alias,
}
"""What is checked without generating anything: each gives the detail of its line, or raises."""


def _again(
    found: Registered, checks: list[Check], path: Path, allowed_code: Collection[str]
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

    def generate(found: Registered) -> str:
        from ebbflow.evaluation.evaluate import evaluate_folder

        if foreign := not_allowed(found.named_code, allowed_code):
            raise _Failed(
                f"the version names code to run, {foreign[0]}; if you trust it, give --allow-code"
                f" {foreign[0]}"
            )
        prompts = found.file(stored.PROMPT_TABLE)
        evaluation = evaluate_folder(
            found.evaluated_recipe,
            base_folder(found.data),
            found.data / "policy",
            prompts,
            "again",
            path,
        )
        return f"generated and scored in {sum(evaluation.seconds.values()):.1f} s"

    compared = {
        "pictures again": lambda found: _pictures_again(found, path),
        "scores again": lambda f: _scores_again(f, path),
    }
    (generated,) = _run({"samples again": generate}, found)
    yield generated
    if generated.status == "ok":
        yield from _run(compared, found)


def _pictures_again(found: Registered, path: Path) -> str:
    rows = stored.held_out(read_table(path))
    was = stored.by_key(found.scores("candidate"), stored.PICTURE_DIGEST)
    now = dict(zip(stored.by_key(rows, "image"), stored.picture_digests(rows), strict=True))
    differ = [key for key in now if now[key] != was.get(key)]
    if not differ:
        return f"all {len(now)} have the same bytes"
    raise _Failed(f"{len(differ)} of {len(now)} differ{_by_how_much(found, rows, differ)}")


def _by_how_much(found: Registered, rows: pa.Table, differ: list[tuple[int, int]]) -> str:
    if stored.TAGS[stored.PICTURES] not in found.tags:
        return "; by how much is not known: the stored pictures were too large to be kept"
    detail = _file(stored.PICTURES)(found)
    assert detail
    tables = (read_table(found.file(stored.PICTURES), stored.PICTURE_TABLE), rows)
    was, now = (stored.by_key(table, "image") for table in tables)
    pairs = [decode_png([was[key], now[key]]).astype(int) for key in differ]
    distances = np.array([np.abs(before - after).mean() for before, after in pairs])
    largest = max(int(np.abs(before - after).max()) for before, after in pairs)
    return f": by up to {largest} of 255 in a pixel, by {distances.mean():.3g} on average"


def _scores_again(found: Registered, path: Path) -> str:
    in_order = [(name, "ascending") for name in KEY]
    was = found.scores("candidate").sort_by(in_order)
    now = stored.held_out(read_table(path)).sort_by(in_order)
    names = [field.name for field in was.schema if pa.types.is_floating(field.type)]
    if absent := [name for name in names if name not in now.column_names]:
        raise _Failed(f"{', '.join(absent)} cannot be measured here")
    before, after = (np.stack([_values(table, name) for name in names]) for table in (was, now))
    equal = (before == after) | (np.isnan(before) & np.isnan(after))
    if equal.all():
        return f"all {equal.size} are equal"
    raise _Failed(
        f"{(~equal).sum()} of {equal.size} differ, by up to {np.nanmax(np.abs(before - after)):.3g}"
    )


def _values(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64; NaN where there is no value."""
    if name not in table.column_names:
        raise _Failed(f"the table of scores has no column {name!r}")
    return np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)


def _same(found: str, expected: str) -> str:
    if found != expected:
        raise _Failed(f"sha256 {_short(found)}, registered was {_short(expected)}")
    return _short(found)


def _short(digest: str) -> str:
    return sanitize(digest[:12], 40)
