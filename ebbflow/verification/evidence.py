"""What the gate decided from, stored with a registered version, so that anybody can decide again
(``verification``).

A version's folder ``evidence`` holds one file per item, and a tag of the version holds the sha256
of each file. Without the tables of scores and pictures it has some kilobytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.prompts import write_prompts
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import KEY, PROMPTS, SAMPLE_KEY
from ebbflow.evaluation.gate_scores import PICTURE_DIGEST, compute_picture_digests
from ebbflow.recipe import Recipe
from ebbflow.registry.trained_prompts import TRAINING_STORED, TRAINING_TABLE
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import read_table, write_table

SIDES = ("candidate", "champion")
RECIPE = "recipe.json"
CODE = "code.json"
PROMPT_TABLE = "prompts.parquet"
GATE = "gate.json"
PICTURES = "pictures.parquet"
SCORES = {side: f"{side}.parquet" for side in SIDES}
ANCHOR = "anchor.parquet"
"""Scores of the anchor, where the candidate was compared with one."""
TAGS = {
    RECIPE: "ebbflow.recipe_file_digest",
    CODE: "ebbflow.code_digest",
    PROMPT_TABLE: "ebbflow.prompts_digest",
    TRAINING_TABLE: "ebbflow.training_prompts_digest",
    SCORES["candidate"]: "ebbflow.candidate_scores_digest",
    SCORES["champion"]: "ebbflow.champion_scores_digest",
    ANCHOR: "ebbflow.anchor_scores_digest",
    GATE: "ebbflow.gate_digest",
    PICTURES: "ebbflow.pictures_digest",
}
"""The tag with the sha256 of each file."""
REWARDS_DIGEST = "ebbflow.rewards_digest"
REWARD_KEYS = ("rewards", "guardrails", "max_failed_share")
"""Sections of the recipe that say how samples are scored; they have a digest of their own."""
PICTURE_TABLE = pa.schema([*SAMPLE_KEY, pa.field("image", pa.binary(), nullable=False)])
REWARD_WEIGHTS_DIGEST = "ebbflow.reward_weights_digest"
MAX_STORED_PROMPTS = 2**26
"""Bytes up to which the table of training prompts is stored; of more, only its sha256 is."""
MAX_STORED_PICTURES = 2**26
"""Bytes up to which the candidate's held-out pictures are stored; of more, only their sha256 is."""


@dataclass(frozen=True)
class GateInputs:
    """What a decision of the gate depends on.

    Example::

        GateInputs(
            recipe=recipe,
            decision=decision,
            evaluations={"candidate": after, "champion": before},
            samples={"candidate": Path("after.parquet"), "champion": Path("before.parquet")},
            prompts=Path("prompts.parquet"),
            code=list_code(library),
        )

    Attributes:
        evaluations, samples: of the candidate and of the champion that it was compared with, by
            ``SIDES``.
        prompts: the prompt table of the run.
        code: the code that decided (``ebbflow.storage.identity.list_code``).
        anchor: the samples of the anchor; None where there was none besides the champion.
    """

    recipe: Recipe
    decision: GateDecision
    evaluations: Mapping[str, Evaluation]
    samples: Mapping[str, Path]
    prompts: Path
    code: str
    anchor: Path | None = None


def write_evidence(folder: Path, inputs: GateInputs) -> dict[str, str]:
    """Write the files of the evidence into a new folder; returns the tags of the version that
    belong to them.
    """
    # Canonical JSON and sorted keys: the same decision has the same digests on a retry.
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(inputs.recipe.canonical_json)
    (folder / CODE).write_text(inputs.code)
    prompts = read_table(inputs.prompts, PROMPTS)
    is_training = pc.equal(prompts["split"], "train")
    write_prompts(prompts.filter(pc.invert(is_training)), folder / PROMPT_TABLE)
    write_prompts(prompts.filter(is_training), folder / TRAINING_TABLE)
    for side, path in inputs.samples.items():
        _write_scores(folder / SCORES[side], read_table(path))
    if inputs.anchor:
        _write_scores(folder / ANCHOR, read_table(inputs.anchor))
    _write_pictures(folder / PICTURES, read_table(inputs.samples["candidate"]))
    records = {side: evaluation.model_dump() for side, evaluation in inputs.evaluations.items()}
    gate = records | {"decision": inputs.decision.model_dump()}
    (folder / GATE).write_text(json.dumps(gate, sort_keys=True))
    tags = {
        tag: sha256_of_file(folder / file) for file, tag in TAGS.items() if (folder / file).exists()
    }
    # The gate decides from held-out prompts alone. Those of training can be millions, with images.
    is_stored = (folder / TRAINING_TABLE).stat().st_size <= MAX_STORED_PROMPTS
    if not is_stored:
        (folder / TRAINING_TABLE).unlink()
    return tags | {
        TRAINING_STORED: str(is_stored).lower(),
        REWARDS_DIGEST: compute_rewards_digest(json.loads(inputs.recipe.canonical_json)),
        REWARD_WEIGHTS_DIGEST: compute_weights_digest(inputs.evaluations["candidate"]),
    }


def compute_rewards_digest(recipe: Mapping[str, Any]) -> str:
    """Compute the sha256 of how a resolved recipe scores samples."""
    config = {key: recipe[key] for key in REWARD_KEYS}
    return hashlib.sha256(
        json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def compute_weights_digest(evaluation: Evaluation) -> str:
    """Compute the sha256 of what the rewards of an evaluation were loaded from."""
    text = json.dumps(evaluation.reward_weights, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def select_held_out(samples: pa.Table) -> pa.Table:
    """Select the rows of an evaluation that the gate decides from."""
    return samples.filter(pc.equal(samples["split"], "held_out"))


def index_by_key(samples: pa.Table, column: str) -> dict[tuple[int, int], Any]:
    """Index the values of a column by (prompt id, sample)."""
    keys = zip(*(samples[name].to_pylist() for name in KEY), strict=True)
    return dict(zip(keys, samples[column].to_pylist(), strict=True))


def _write_scores(path: Path, samples: pa.Table) -> None:
    rows = select_held_out(samples)
    # A digest stands for each picture: tables of scores stay small, and pictures can be compared.
    scores = rows.drop_columns(["image"]).append_column(
        PICTURE_DIGEST, pa.array(compute_picture_digests(rows), pa.string())
    )
    scores = scores.replace_schema_metadata(None)  # of the file that the rows come from
    write_table(path, scores.schema, scores.to_batches(), {})


def _write_pictures(path: Path, samples: pa.Table) -> None:
    pictures = select_held_out(samples).select(PICTURE_TABLE.names).cast(PICTURE_TABLE)
    if pc.sum(pc.binary_length(pictures["image"])).as_py() <= MAX_STORED_PICTURES:
        write_table(path, PICTURE_TABLE, pictures.to_batches(), {})
