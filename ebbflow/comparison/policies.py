"""Compare two policies by the rules of the gate, on the held-out prompts of a recipe."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ebbflow.data.local_prompts import prepare_local_prompts
from ebbflow.data.prompts import write_prompts
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.evaluation.evaluate import EvaluationError, describe_image_size, evaluate_folder
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.evaluation.gate_scores import refuse_unequal_scores, score_tables_together
from ebbflow.recipe import Recipe
from ebbflow.registry.model_folders import ModelFolders, open_model_folders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import sha256_of_file, write_text
from ebbflow.storage.tables import read_table
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy

BASE = "base"
"""What names the base model of the other policy."""
LOOK = 2**20
"""Whose noise the held-out samples have: no model is looked at so often, so the policies are not
judged by the noise that they were chosen by.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyComparison:
    """Two policies that were evaluated and compared.

    Attributes:
        recipe: whose prompts, rewards and rules were used.
        decision: by the rules of the gate, with the asked policy as the candidate.
        candidate, champion: the evaluation of each side, with its samples (Parquet,
            ``build_evaluation_schema``).
        folder: of this pair, where the samples with their new scores are.
    """

    recipe: Recipe
    decision: GateDecision
    candidate: tuple[Evaluation, Path]
    champion: tuple[Evaluation, Path]
    folder: Path


def compare_policies(
    recipe: Recipe,
    tracking_uri: str,
    policy: str,
    against: str,
    folder: Path,
    base: Path | None = None,
) -> PolicyComparison:
    """Evaluate two policies on the held-out prompts of a recipe and compare them as the gate does.

    An evaluation whose samples are in ``folder`` already is not repeated, so a command that was
    stopped goes on with the second policy.

    Args:
        policy, against: a policy folder, a registered model (``open_model_folders``), or ``base``,
            the base model of the other one.
        folder: where prompts and samples go, and a folder of the pair.
        base: folder of the base model, where it is neither in the registry nor in the run.

    Raises:
        EvaluationError: the policies generate images of different sizes, both are ``base``, or too
            few prompts have a reward.
        PromptError: the prompts cannot be used.
        ArtifactError, PolicyError, TrackingError, RewardError: as ``open_model_folders``,
            ``evaluate_folder`` and ``score_tables_together``.
    """
    prompts = folder / "prompts.parquet"
    write_prompts(prepare_local_prompts(recipe), prompts)
    evaluations = {}
    samples = {}
    with ExitStack() as stack:
        opened = _open_sides(stack, recipe, tracking_uri, policy, against, base)
        _require_equal_sizes(recipe, opened)
        for side, folders in opened.items():
            label = _label_side(side, opened)
            logger.info("%s is %s", "policy" if side == "candidate" else "against", label)
            evaluations[side], samples[side] = _evaluate_once(
                recipe, folders, label, prompts, folder
            )
    pair = folder / _name_pair(evaluations)
    targets = {side: pair / f"{side}.parquet" for side in samples}
    scored = score_tables_together(recipe, prompts, evaluations, samples, targets)
    tables = [read_table(targets[side]) for side in ("candidate", "champion")]
    try:
        decision = decide_by_gate(recipe, scored["candidate"], scored["champion"], *tables)
    except ValueError as error:
        raise EvaluationError(f"the two policies cannot be compared: {error}") from error
    return PolicyComparison(
        recipe,
        refuse_unequal_scores(decision, *tables),
        (scored["candidate"], targets["candidate"]),
        (scored["champion"], targets["champion"]),
        pair,
    )


def _name_pair(evaluations: Mapping[str, Evaluation]) -> str:
    """Return the name of the folder of a pair."""
    labels = [evaluations[side].label for side in ("candidate", "champion")]
    return "-against-".join(re.sub(r"[^\w.]+", "-", label).strip("-") for label in labels)


def _open_sides(
    stack: ExitStack,
    recipe: Recipe,
    tracking_uri: str,
    policy: str,
    against: str,
    base: Path | None,
) -> dict[str, ModelFolders]:
    """Open both policies until the stack is closed; by side."""
    named = {"candidate": policy, "champion": against}
    opened = {
        side: stack.enter_context(open_model_folders(tracking_uri, name, base))
        for side, name in named.items()
        if name != BASE
    }
    if not opened:
        raise EvaluationError(
            "both policies are the base model; name a policy folder or a registered version"
        )
    if len(opened) < len(named):
        other = next(iter(opened.values()))
        metadata = read_policy_metadata(other.policy)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ebbflow-base-"))
        untouched = Path(scratch) / "policy"
        # As large as the other policy is served: otherwise the two could not be compared.
        write_base_policy(
            untouched,
            verify_folder(other.base),
            recipe.digest,
            metadata.config,
            metadata.served_model,
            recipe.evaluation,
        )
        side = next(side for side in named if side not in opened)
        opened[side] = ModelFolders(other.base, untouched, "the base model")
    return {side: opened[side] for side in named}


def _label_side(side: str, opened: Mapping[str, ModelFolders]) -> str:
    """Return the name of a side; that of a folder of a run is short, as it stands under pictures.

    Example:
        ``runs/tiny-1a2b3c4d/nodes/1.1-online/policy`` is "tiny-1a2b3c4d 1.1-online".
    """
    label = opened[side].name
    parts = Path(label).absolute().parts
    if parts[-3:-2] == ("nodes",):
        label = f"{parts[-4]} {parts[-2]}"
    # A policy against itself shows what a difference of nothing looks like.
    is_repeated = side == "champion" and opened[side].name == opened["candidate"].name
    return f"{label} again" if is_repeated else label


def _require_equal_sizes(recipe: Recipe, opened: Mapping[str, ModelFolders]) -> None:
    sizes = {
        folders.name: describe_image_size(
            recipe.evaluation.evaluated_model(read_policy_metadata(folders.policy).served_model)
        )
        for folders in opened.values()
    }
    if len(set(sizes.values())) > 1:
        listed = " and ".join(f"{name} generates {size}" for name, size in sizes.items())
        raise EvaluationError(
            f"{listed}: scores are not comparable; set evaluation.height and evaluation.width in"
            " the recipe"
        )


def _evaluate_once(
    recipe: Recipe, folders: ModelFolders, label: str, prompts: Path, folder: Path
) -> tuple[Evaluation, Path]:
    """Evaluate a policy, unless ``folder`` has its samples on these prompts from an earlier
    command.
    """
    key = [label, recipe.digest, verify_folder(folders.policy), sha256_of_file(prompts)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    samples = folder / "samples" / f"{name}.parquet"
    record = samples.with_suffix(".json")
    if record.is_file() and samples.is_file():
        evaluation = Evaluation.model_validate_json(record.read_bytes())
        if evaluation.samples_digest == sha256_of_file(samples):
            logger.info("%s has been evaluated: %s", label, samples)
            return evaluation, samples
    samples.parent.mkdir(parents=True, exist_ok=True)
    evaluation = evaluate_folder(
        recipe, folders.base, folders.policy, prompts, label, samples, LOOK
    )
    # After the samples: a record says that they are whole.
    write_text(record, evaluation.model_dump_json())
    return evaluation, samples
