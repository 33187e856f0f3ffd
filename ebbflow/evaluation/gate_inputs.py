"""Whether the tables that the gate reads are what their evaluations say: files that were mixed up
or changed decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import Evaluation
from ebbflow.data.schema import KEY
from ebbflow.recipe import Recipe
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import read_table, read_table_metadata


class GateInputError(Exception):
    """The gate was given another table than its evaluation names: says which, and the fix."""


def list_evaluated_prompts(prompts: Path) -> list[Prompt]:
    """List the prompts that every policy of a run is evaluated on: all but the training split."""
    return [prompt for prompt in read_prompts(prompts) if prompt.split != "train"]


def list_repeats(recipe: Recipe, prompts: Sequence[Prompt]) -> list[tuple[Prompt, int]]:
    """List the further samples of an evaluation, each as its prompt and its number from one."""
    held_out = [prompt for prompt in prompts if prompt.split == "held_out"]
    repeated = held_out[: recipe.count_repeated(len(held_out))]
    return [
        (prompt, sample) for prompt in repeated for sample in range(1, recipe.evaluation.samples)
    ]


def read_evaluated_samples(
    recipe: Recipe, evaluation: Evaluation, path: Path, prompts: Path
) -> pa.Table:
    """Read the samples behind an evaluation (``build_evaluation_schema``).

    Args:
        path: the table of samples.
        prompts: the prompt table of the run.

    Raises:
        GateInputError: the table is not the one that the evaluation was computed from, or is of
            another recipe, or of other prompts than the run's.
        TableError: it is damaged.
    """
    metadata = read_table_metadata(path)
    named = {
        "label": (metadata.get("label"), evaluation.label),
        "recipe digest": (metadata.get("recipe_digest"), recipe.digest),
        "sha256": (sha256_of_file(path), evaluation.samples_digest),
    }
    for name, (value, expected) in named.items():
        if value != expected:
            raise GateInputError(
                f"{path} has the {name} {value!r}, and the evaluation {evaluation.label!r} is of"
                f" {expected!r}; give the gate the table that belongs to its evaluation, or run the"
                " evaluation again"
            )
    table = read_table(path)
    _check_keys(recipe, evaluation, table, list_evaluated_prompts(prompts))
    return table


def _check_keys(
    recipe: Recipe, evaluation: Evaluation, table: pa.Table, prompts: list[Prompt]
) -> None:
    """Check that a table has exactly the samples of the run's prompts, each once and with its own
    text.
    """
    expected = {(prompt.prompt_id, 0): prompt for prompt in prompts}
    expected |= {
        (prompt.prompt_id, sample): prompt for prompt, sample in list_repeats(recipe, prompts)
    }
    columns = [*KEY, "split", "source", "prompt", "target"]
    rows = table.select(columns).to_pylist()
    keys = [(row["prompt_id"], row["sample"]) for row in rows]
    if sorted(keys) != sorted(expected):
        missing = sorted(expected.keys() - set(keys))
        extra = sorted(set(keys) - expected.keys())
        raise GateInputError(
            f"the evaluation {evaluation.label!r} has {len(keys)} samples of {len(set(keys))}"
            f" different (prompt_id, sample), and the run's prompts have {len(expected)} (missing:"
            f" {missing[:3]}, unknown: {extra[:3]}); evaluate it on the prompts of this run"
        )
    for key, row in zip(keys, rows, strict=True):
        prompt = expected[key]
        evaluated = row["split"], row["source"], row["prompt"], row["target"]
        if evaluated != (prompt.split, prompt.source, prompt.prompt, prompt.target):
            raise GateInputError(
                f"the evaluation {evaluation.label!r} drew another prompt than the run's for"
                f" (prompt_id, sample) = {key}; evaluate it on the prompts of this run"
            )
