"""Whether a registered version is what the gate decided on: every digest, and the decision made
again from the stored scores.

Digests are tags of the version; the files are artifacts of it. A person who can change both
consistently is not detected, unless versions are signed.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion

from ebbflow.data.prompts import read_prompts
from ebbflow.evaluation.distribution import average_per_prompt
from ebbflow.evaluation.gate import Anchor, decide_by_gate
from ebbflow.evaluation.gate_scores import combine_rewards, refuse_unequal_scores
from ebbflow.evaluation.pinned_policy import hold_to_gate_policy
from ebbflow.recipe.base import iter_leaves, sanitize_text
from ebbflow.recipe.plugins import list_disallowed_paths
from ebbflow.registry.download import download_version
from ebbflow.registry.lock import CHAMPION, find_version_by_alias
from ebbflow.registry.lookup import find_named_version
from ebbflow.registry.model_version import (
    BASE_DIGEST,
    BASE_STORED,
    MODEL_FILES_DIGEST,
    POLICY_DIGEST,
    compute_model_files_digest,
    list_bytecode,
)
from ebbflow.registry.promotion import (
    COMPARED_WITH,
    DECISION,
    NO_CHAMPION,
    REPLACES,
    ROLLED_BACK,
    describe_promotion,
    says_decision,
)
from ebbflow.registry.signing import (
    PROMOTION,
    VERIFY_KEYS,
    SignatureError,
    require_signature,
)
from ebbflow.registry.trained_prompts import TRAINING_STORED, TRAINING_TABLE
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.identity import list_code
from ebbflow.storage.tables import count_rows, read_table
from ebbflow.tracking.store import RUN, connect_to_store
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.verification import evidence as stored
from ebbflow.verification.adoption import ADOPTED_CHECKS, find_adoption
from ebbflow.verification.compared import find_compared_policy
from ebbflow.verification.comparison import compare_pictures, compare_scores
from ebbflow.verification.version import (
    OLDER,
    ChangedFileError,
    Check,
    CheckFailedError,
    NotStoredError,
    RegisteredVersion,
    check_file,
    compare_digests,
    read_column,
    shorten_digest,
)

LIBRARY = Path(__file__).parents[1]
ROUNDING = 1e-9
"""Relative difference that sums of the same scores may have on another machine."""


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
        registered = RegisteredVersion(version, model, is_champion)
        checks = mark_adopted_checks(version, _run_checks(CHECKS, registered))
        if again:
            scratch = Path(folder) / "again"
            scratch.mkdir()
            checks += _generate_and_compare(registered, tracking_uri, checks, scratch, allowed_code)
    return version, checks


def _run_checks(
    checks: Mapping[str, Callable[[RegisteredVersion], str]], registered: RegisteredVersion
) -> Iterator[Check]:
    for name, check in checks.items():
        try:
            yield Check(name, "ok", check(registered))
        except NotStoredError as reason:
            yield Check(name, "not stored", str(reason))
        except CheckFailedError as reason:
            yield Check(name, "FAILED", str(reason), isinstance(reason, ChangedFileError))
        # Files that somebody changed can fail anywhere, and that is what is looked for. The text
        # may quote such a file, so it is cut and freed of control characters.
        except Exception as error:
            yield Check(name, "FAILED", sanitize_text(f"{type(error).__name__}: {error}", 300))


def mark_adopted_checks(version: ModelVersion, checks: Iterable[Check]) -> list[Check]:
    """Mark the failed checks of rules and records that a person has adopted with the version."""
    adoption = find_adoption(version)
    if adoption is None:
        return list(checks)
    by = sanitize_text(f"{adoption.who} adopted it on {adoption.when}: {adoption.why}", 300)
    return [
        check._replace(status="adopted", detail=f"{by} (here: {check.detail})")
        if check.status == "FAILED"
        and not check.is_changed
        and check.name in ADOPTED_CHECKS
        and check.name in adoption.failed
        else check
        for check in checks
    ]


def _check_policy(registered: RegisteredVersion) -> str:
    folder = registered.data / "policy"
    digest = verify_folder(folder)
    metadata = read_policy_metadata(folder)
    base = registered.tags.get(BASE_DIGEST)
    if base and metadata.base_digest != base:
        raise CheckFailedError(
            f"policy.json names the base model {shorten_digest(metadata.base_digest)}, the"
            f" version's tag {shorten_digest(base)}"
        )
    # A manifest alone proves little: who replaces a file can write a manifest that fits.
    if POLICY_DIGEST not in registered.tags and not registered.has_evidence:
        raise NotStoredError(
            f"the files match their own manifest, but the version has no digest of it: {OLDER}"
        )
    return compare_digests(digest, registered.require_tag(POLICY_DIGEST))


def _check_signature(registered: RegisteredVersion) -> str:
    try:
        key = require_signature(registered.version, registered.champion)
    except SignatureError as error:
        raise CheckFailedError(str(error)) from None
    if key is None:
        raise NotStoredError(f"no key is configured ({VERIFY_KEYS}), so nobody is asked for one")
    return f"by the key {key}"


def _check_model_files(registered: RegisteredVersion) -> str:
    bytecode = list_bytecode(registered.model)
    if bytecode:
        # Even where it is Python's own: what is in it cannot be told, and it would run.
        raise CheckFailedError(
            f"{len(bytecode)} files of bytecode, first {bytecode[0]}, which Python runs instead of"
            " the sources; delete them, and verify the version again"
        )
    return compare_digests(
        compute_model_files_digest(registered.model), registered.require_tag(MODEL_FILES_DIGEST)
    )


def _check_base(registered: RegisteredVersion) -> str:
    folder = registered.data / "base"
    if not folder.is_dir():
        if registered.tags.get(BASE_STORED) == "true":
            raise CheckFailedError("it was stored with the version and is missing")
        raise NotStoredError(
            "the version references its base model, which was too large to be stored with it"
        )
    return compare_digests(verify_folder(folder), registered.require_tag(BASE_DIGEST))


def _check_rewards(registered: RegisteredVersion) -> str:
    detail = compare_digests(
        stored.compute_rewards_digest(registered.read_json(stored.RECIPE)),
        registered.require_tag(stored.REWARDS_DIGEST),
    )
    for side in stored.SIDES:
        table = registered.read_scores(side)
        # Not evaluated_rewards: to learn whether a reward compares, that would import the code
        # which the version names.
        configs = [one for one in registered.recipe.rewards if one.column in table.column_names]
        columns = {config.column: read_column(table, config.column) for config in configs}
        total = combine_rewards(configs, columns, _read_sources(table))
        # A sample that was not scored has NaN in both.
        equal = np.isclose(total, read_column(table, "reward"), ROUNDING, ROUNDING, equal_nan=True)
        wrong = int((~equal).sum())
        if wrong:
            raise CheckFailedError(
                f"{wrong} rewards of the {side} are not the weighted sum of their scores"
            )
    weights = stored.compute_weights_digest(registered.read_evaluation("candidate"))
    if registered.require_tag(stored.REWARD_WEIGHTS_DIGEST) != weights:
        raise CheckFailedError("the gate's record names other weights of the rewards than the tag")
    return detail


def _read_sources(table: pa.Table) -> list[str]:
    """Return the prompt set of every sample; tables of older versions have none."""
    if "source" not in table.column_names:
        return [""] * table.num_rows
    sources: list[str] = table["source"].to_pylist()
    return sources


def _check_prompts(registered: RegisteredVersion) -> str:
    detail = check_file(registered, stored.PROMPT_TABLE)
    prompts = {
        prompt.prompt_id: prompt
        for prompt in read_prompts(registered.find_file(stored.PROMPT_TABLE), "held_out")
    }
    for side in stored.SIDES:
        table = registered.read_scores(side)
        # Tables of versions that were registered before there were prompt sets have no source.
        columns = [
            name
            for name in ("prompt_id", "prompt", "target", "source")
            if name in table.column_names
        ]
        rows = table.select(columns).to_pylist()
        if {row["prompt_id"] for row in rows} != prompts.keys():
            raise CheckFailedError(f"the {side} was scored on other prompts")
        for row in rows:
            prompt = prompts[row["prompt_id"]]
            source = row.get("source") or prompt.source
            scored_on = row["prompt"], row["target"], source
            if scored_on != (prompt.prompt, prompt.target, prompt.source):
                raise CheckFailedError(
                    f"the {side} was scored on another text or prompt set for prompt"
                    f" {prompt.prompt_id}"
                )
    return f"{detail}, {len(prompts)} held out"


def _check_training_prompts(registered: RegisteredVersion) -> str:
    # The tag stays with the version, so that a deleted table does not pass for a large one.
    if registered.require_tag(TRAINING_STORED) != "true":
        raise NotStoredError(
            "the table was too large to be stored; its digest is the tag"
            f" {stored.TAGS[TRAINING_TABLE]}"
        )
    detail = check_file(registered, TRAINING_TABLE)
    num_prompts = count_rows(registered.find_file(TRAINING_TABLE))
    return f"{detail}, {num_prompts} trained on"


def _check_code(registered: RegisteredVersion) -> str:
    detail = check_file(registered, stored.CODE)
    code_then = registered.read_json(stored.CODE)
    code_now = json.loads(list_code(LIBRARY))
    files = _find_differing_names(code_then["sources"][0], code_now["sources"][0])
    packages = _find_differing_names(code_then["versions"].items(), code_now["versions"].items())
    # Other code here is a remark, not a failure: a version is also verified after an update.
    if not files and not packages:
        return f"{detail}, as installed here"
    return (
        f"{detail}; installed here are {len(files)} other files of Ebbflow and other versions of"
        f" {len(packages)} packages"
    )


def _find_differing_names(then: Any, now: Any) -> set[str]:
    """Return the names of (name, digest or version) pairs that only one of two lists has."""
    return {name for name, _ in set(map(tuple, then)) ^ set(map(tuple, now))}


def _build_scores_check(side: str) -> Callable[[RegisteredVersion], str]:
    def check_scores(registered: RegisteredVersion) -> str:
        detail = check_file(registered, stored.SCORES[side])
        table = registered.read_scores(side)
        evaluation = registered.read_evaluation(side)
        for name, mean in evaluation.held_out.items():
            # Every prompt counts once, however many of its samples were scored.
            means = average_per_prompt(table["prompt_id"].to_numpy(), read_column(table, name))
            stored_mean = float(np.mean(means))
            if not math.isclose(stored_mean, mean, rel_tol=ROUNDING, abs_tol=ROUNDING):
                raise CheckFailedError(
                    f"the mean of {name} is {stored_mean:.6f}, the evaluation says {mean:.6f}"
                )
        return f"{detail}, {table.num_rows} samples"

    return check_scores


def _check_gate(registered: RegisteredVersion) -> str:
    detail = check_file(registered, stored.GATE)
    decision = registered.decision
    sides = {side: registered.read_evaluation(side) for side in stored.SIDES}
    # The tag is what a reader sees in MLflow's UI, so it must say what the stored decision says.
    if not says_decision(registered.require_tag(DECISION), decision):
        raise CheckFailedError(f"the tag {DECISION} is not the stored decision")
    # Against its own start a run decides without a champion, and then the label is the run's.
    compared = registered.require_tag(COMPARED_WITH)
    if compared != NO_CHAMPION and decision.champion != f"champion v{compared}":
        raise CheckFailedError(
            f"the decision is about {decision.champion!r}, the tag {COMPARED_WITH} says"
            f" {compared!r}"
        )
    anchor = None
    if decision.anchor:
        check_file(registered, stored.ANCHOR)
        anchor = Anchor(decision.anchor, read_table(registered.find_file(stored.ANCHOR)))
    scores = registered.read_scores("candidate"), registered.read_scores("champion")
    decided_again = decide_by_gate(
        registered.recipe,
        sides["candidate"],
        sides["champion"],
        *scores,
        look=decision.look,
        anchor=anchor,
        promoted_reward=decision.promoted_reward,
    )
    decided_again = refuse_unequal_scores(decided_again, *scores)
    decided_again = hold_to_gate_policy(registered.recipe, decided_again, decision.policy)
    # An earlier Ebbflow did not decide about fields that came later.
    fields = decision.model_fields_set
    differing = _find_differing_values(
        decision.model_dump(include=fields), decided_again.model_dump(include=fields)
    )
    if differing:
        # Such as a rule of a later Ebbflow, which names the number that it asks for.
        reasons = [reason for reason in decided_again.reasons if reason not in decision.reasons]
        raise CheckFailedError(
            f"decided again from the stored scores, {', '.join(differing[:3])} differ: promote ="
            f" {decided_again.promote}{'. ' if reasons else ''}{' '.join(reasons[:1])}"
        )
    verdict = "promote" if decided_again.promote else "do not promote"
    return f"{detail}: {verdict}, as decided again from the stored scores"


def _find_differing_values(then: Any, now: Any) -> list[str]:
    """Return the dotted names of the values that differ by more than rounding."""
    values_then = {".".join(map(str, path)): value for path, value in iter_leaves(then)}
    values_now = {".".join(map(str, path)): value for path, value in iter_leaves(now)}
    # An empty list is a leaf too; what fills it on the other side is reported by its own name.
    names = {
        name
        for name in values_then.keys() | values_now.keys()
        if not isinstance(values_then.get(name), (dict, list))
    }
    return sorted(
        name for name in names if not _are_equal(values_then.get(name), values_now.get(name))
    )


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # NaN is stored where a metric could not be measured, and equals itself here.
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(one == other)


def _check_alias(registered: RegisteredVersion) -> str:
    """Check that a version was not rolled back, and that a champion is one that the gate let
    through and that a promotion or a rollback moved the alias to it.
    """
    rolled_back = registered.tags.get(ROLLED_BACK)
    if rolled_back:
        raise CheckFailedError(
            f"the version was champion and has been rolled back ({sanitize_text(rolled_back, 80)})"
        )
    if not registered.champion:
        return f"the version is not {CHAMPION}"
    # A long decision is cut to the length of a tag and no longer whole JSON: read its beginning.
    text = registered.require_tag(DECISION)
    if not text.startswith('{"promote":true,'):
        raise CheckFailedError(
            f"the alias {CHAMPION} points to this version, which the gate refused"
        )
    # Anyone can move an alias in MLflow's UI; only Ebbflow's own moves leave these tags.
    if REPLACES not in registered.tags or PROMOTION not in registered.tags:
        raise CheckFailedError(
            f"neither a promotion nor a rollback moved the alias {CHAMPION} to this version"
        )
    version = str(registered.version.version)
    expected = describe_promotion(version, registered.tags[REPLACES], registered.tags)
    if registered.tags[PROMOTION] != expected:
        raise CheckFailedError(
            f"the tag {PROMOTION} is not the promotion of this version and its gate's record:"
            f" {sanitize_text(registered.tags[PROMOTION], 200)}"
        )
    if registered.version.run_id != registered.tags.get(RUN):
        raise CheckFailedError(
            f"the version was made by run {registered.version.run_id}, and its tag {RUN} names"
            f" {sanitize_text(registered.tags.get(RUN, 'none'), 40)}"
        )
    return f"{CHAMPION}, and the gate let it through"


CHECKS: dict[str, Callable[[RegisteredVersion], str]] = {
    "signature": _check_signature,
    "model files": _check_model_files,
    "policy": _check_policy,
    "base model": _check_base,
    "recipe": lambda version: check_file(version, stored.RECIPE),
    "rewards": _check_rewards,
    "prompts": _check_prompts,
    "training prompts": _check_training_prompts,
    "code": _check_code,
    "candidate scores": _build_scores_check("candidate"),
    "champion scores": _build_scores_check("champion"),
    "gate": _check_gate,
    "alias": _check_alias,
}
"""What is checked without generating anything: each gives the detail of its line, or raises."""


ESSENTIAL = ("policy", "gate")
"""The checks without which nothing is known of a version."""


def _generate_and_compare(
    registered: RegisteredVersion,
    tracking_uri: str,
    checks: list[Check],
    scratch: Path,
    allowed_code: Collection[str],
) -> Iterator[Check]:
    """Generate the held-out samples of both sides again, and compare them. What did not verify is
    not loaded.
    """
    inputs = ("signature", "model files", "policy", "base model", "recipe", "rewards", "prompts")
    failed = [check.name for check in checks if check.name in inputs and check.status == "FAILED"]
    if failed:
        yield Check("samples again", "FAILED", f"not generated, because of {', '.join(failed)}")
        return
    paths = {side: scratch / f"{side}.parquet" for side in stored.SIDES}

    def find_champion_again(registered: RegisteredVersion) -> str:
        return find_compared_policy(registered, tracking_uri, scratch)

    def generate_samples(registered: RegisteredVersion) -> str:
        from ebbflow.verification.generation import generate_sides  # imports torch

        # Before ``evaluated_recipe`` is read, which imports the code that the version names.
        foreign = list_disallowed_paths(registered.named_code, allowed_code)
        if foreign:
            raise CheckFailedError(
                f"the version names code to run, {foreign[0]}; if you trust it, give --allow-code"
                f" {foreign[0]}"
            )
        return generate_sides(registered, scratch, paths)

    comparisons: dict[str, Callable[[RegisteredVersion], str]] = {
        "pictures again": lambda version: compare_pictures(version, "candidate", paths),
        "scores again": lambda version: compare_scores(version, "candidate", paths),
        "champion pictures": lambda version: compare_pictures(version, "champion", paths),
        "champion scores again": lambda version: compare_scores(version, "champion", paths),
    }
    (champion,) = _run_checks({"champion again": find_champion_again}, registered)
    (generated,) = _run_checks({"samples again": generate_samples}, registered)
    # Without samples there is nothing to compare, and one line says why.
    yield from (champion, generated)
    if generated.status == "ok":
        drawn = {
            name: check
            for name, check in comparisons.items()
            if champion.status == "ok" or not name.startswith("champion")
        }
        yield from _run_checks(drawn, registered)
