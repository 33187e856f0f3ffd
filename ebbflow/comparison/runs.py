"""Read two runs from their folders, to compare what they asked for and what they did."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from ebbflow.data.schema import name_statistic_column
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.report.pictures import HELD_OUT
from ebbflow.run_list import RESOLVED_RECIPE
from ebbflow.run_summary import SUMMARY, SummaryError, read_summary
from ebbflow.tracking.delivery import flatten_settings

EVALUATION = "-evaluation"
"""How the folders of evaluations end, among the nodes of a run."""
SAMPLES_FILES = f"nodes/*{EVALUATION}/samples.parquet"
METRICS_FILES = "nodes/*/metrics.json"
"""Files in the folder of a run."""
START = "before"
"""The label of the evaluation before training."""


class RunFolderError(Exception):
    """A folder that does not hold a run that can be compared: says what is missing."""


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote into its folder.

    Attributes:
        recipe: every key with its value as text (``flatten_settings``).
        summary: of ``summary.json``; empty where the run has not finished.
        stages: the metrics of each step, by the label of the stage, such as ``1.1 online``.
        evaluations: the samples of each evaluation, by its label, in the order of the run.
        held_out: means over the held-out prompts, by the label of the evaluation and by metric.
    """

    name: str
    path: Path
    recipe: Mapping[str, str]
    summary: Mapping[str, Any]
    stages: Mapping[str, Sequence[Mapping[str, float]]]
    evaluations: Mapping[str, Path]
    held_out: Mapping[str, Mapping[str, float]]

    @property
    def shown_evaluation(self) -> str:
        """The label of the evaluation whose pictures are shown: that of the candidate, or the last
        one where the run has chosen none.
        """
        candidate = str(self.summary.get("candidate"))
        return candidate if candidate in self.evaluations else list(self.evaluations)[-1]


def open_run_folder(named: str, scratch: Path) -> RunFolder:
    """Read a run from its folder, or from a copy of its folder at a URI, of which only the files
    that a comparison needs are downloaded.

    Args:
        scratch: an empty folder for these files; the caller keeps it as long as the run.

    Raises:
        RunFolderError: as ``read_run_folder``, or the URI cannot be read.
    """
    if "://" not in named:
        return read_run_folder(Path(named).resolve())
    shown_uri = redact_secrets(named)
    folder = scratch / posixpath.basename(named.rstrip("/"))
    try:
        store, root = fsspec.core.url_to_fs(named.rstrip("/"))
        for pattern in (RESOLVED_RECIPE, SUMMARY, METRICS_FILES, SAMPLES_FILES):
            for file in store.glob(f"{root}/{pattern}"):
                target = folder / posixpath.relpath(file, root)
                target.parent.mkdir(parents=True, exist_ok=True)
                store.get_file(file, str(target))
    except Exception as error:  # every store has errors of its own
        reason = sanitize_text(redact_secrets(f"{type(error).__name__}: {error}"), 300)
        raise RunFolderError(
            f"{shown_uri} cannot be downloaded ({reason}); install the package of its store, such"
            " as s3fs"
        ) from error
    if not (folder / RESOLVED_RECIPE).is_file():
        raise RunFolderError(
            f"{shown_uri} has no {RESOLVED_RECIPE}; name a copy of the folder of a local run"
        )
    return read_run_folder(folder)


def read_run_folder(path: Path) -> RunFolder:
    """Read a run.

    Raises:
        RunFolderError: it is not the folder of a local run, was damaged, or has no evaluation yet.
    """
    if not (path / RESOLVED_RECIPE).is_file():
        raise RunFolderError(
            f"{path} is not the folder of a run, which has a {RESOLVED_RECIPE}; `ebbflow runs`"
            " lists them. MLflow compares runs whose output is behind a URI"
        )
    try:
        recipe = flatten_settings(yaml.safe_load((path / RESOLVED_RECIPE).read_text()))
        summary = read_summary(path / SUMMARY) if (path / SUMMARY).is_file() else {}
        stages = {
            _read_label(file.parent.name): json.loads(file.read_text())
            for file in sorted(path.glob(METRICS_FILES))
        }
        files = list(path.glob(SAMPLES_FILES))
        # The evaluation before training is the first; labels count rounds and stages.
        files.sort(key=lambda file: _order_label(file.parent.name.removesuffix(EVALUATION)))
        evaluations = {
            _read_label(file.parent.name.removesuffix(EVALUATION)): file for file in files
        }
        held_out = {label: _average_held_out(file) for label, file in evaluations.items()}
    except (OSError, ValueError, SummaryError, yaml.YAMLError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    if not evaluations:
        raise RunFolderError(f"{path} has no evaluation yet; compare it once it has one")
    return RunFolder(path.name, path, recipe, summary, stages, evaluations, held_out)


def _read_label(folder: str) -> str:
    """``1.1-online`` is the folder of "1.1 online"."""
    return folder.replace("-", " ", 1)


def _order_label(name: str) -> tuple[bool, list[int], str]:
    number = name.partition("-")[0]
    parts = number.split(".")
    counts = [int(part) for part in parts] if all(part.isdigit() for part in parts) else []
    return name != START, counts, name


def _average_held_out(samples: Path) -> dict[str, float]:
    """Average the scores of the held-out samples, each prompt with the same weight; a metric that
    nothing was scored by is left out.
    """
    columns = list_score_columns(samples)
    table = pq.read_table(samples, columns=["prompt_id", *columns], filters=[HELD_OUT])
    means = {}
    for column in columns:
        scored = table.filter(pc.is_finite(pc.fill_null(table[column], float("nan"))))
        if scored.num_rows:
            by_prompt = scored.group_by("prompt_id").aggregate([(column, "mean")])
            means[column] = pc.mean(by_prompt[f"{column}_mean"]).as_py()
    return means


def list_score_columns(samples: Path) -> list[str]:
    """List the reward, the scores and the guardrails that a table of samples has, the reward
    first.
    """
    schema = pq.read_schema(samples)
    statistics = name_statistic_column("")
    scores = [
        field.name
        for field in schema
        if pa.types.is_floating(field.type) and not field.name.startswith(statistics)
    ]
    return sorted(scores, key=lambda name: name != "reward")


def find_recipe_differences(first: RunFolder, second: RunFolder) -> list[tuple[str, str, str]]:
    """Find the keys whose values differ, as (key, value of the first, value of the second); a dash
    stands for a key that one recipe does not have.
    """
    keys = dict.fromkeys([*first.recipe, *second.recipe])
    rows = [(key, first.recipe.get(key, "–"), second.recipe.get(key, "–")) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def find_common_prompts(first: RunFolder, second: RunFolder) -> set[int]:
    """Find the ids of the held-out prompts that both runs show: an id counts the prompts of a file,
    and means another prompt in a run of another file.
    """
    sides = []
    for run in (first, second):
        columns = ["prompt_id", "prompt", "target"]
        samples = run.evaluations[run.shown_evaluation]
        rows = pq.read_table(samples, columns=columns, filters=[HELD_OUT]).to_pylist()
        sides.append({(row["prompt_id"], row["prompt"], row["target"]) for row in rows})
    return {prompt_id for prompt_id, _, _ in sides[0] & sides[1]}
