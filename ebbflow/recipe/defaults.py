"""The defaults of each algorithm next to the published values: ``ebbflow defaults``, and the page
``docs/defaults.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbflow.recipe.algorithms import AlgorithmConfig, PublishedSetting
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.recipe.stages import OnlineStageConfig

PAGE = "docs/defaults.md"
HEADER = f"""# Defaults and published values

`ebbflow defaults` prints this page from the code, and `ebbflow defaults ALGORITHM` prints one of
its tables. A test compares {PAGE} with the code. The column *default* shows the settings of an
online stage that sets only the algorithm's name; offline stages have the same, without
`updates_per_step`. Where a default differs from the published value, the remarks begin with
**deviates** and give the reason. Published values are for models with 65,536 latent elements and
more, and most of them are for LoRA adapters; recipes for the glyph model state what they change.

A source is a repository on GitHub, a file, and an entry in that file. `python -m
benchmarks.published` reads the sources and compares
([results](../benchmarks/results/published.md)).
"""

ORDER = (
    "algorithm",
    "sampler",
    "window",
    "advantages",
    "reference",
    "optimizer",
    "updates_per_step",
    "group_size",
)


def write_defaults_page() -> str:
    """Return the tables of all algorithms as Markdown."""
    return HEADER + "".join(
        f"\n{write_defaults_table(name)}" for name, config in ALGORITHMS.items() if config.published
    )


def write_defaults_table(name: str) -> str:
    """Return the table of one algorithm as Markdown: setting, default, published value, remarks
    and source.
    """
    config = ALGORITHMS[name]
    lines = [f"## {name}", "", *([f"arXiv {config.paper}", ""] if config.paper else [])]
    lines += ["| setting | default | published | remarks | source |", "|---|---|---|---|---|"]
    values = list_default_values(config)
    lines += [
        _format_row(key, values, config.published[key])
        # Sorting is stable: the rows of a section stay in the order of the class.
        for key in sorted(config.published, key=_sort_key)
    ]
    return "\n".join(lines) + "\n"


def list_default_values(config: type[AlgorithmConfig]) -> dict[str, Any]:
    """Return dotted key to value of an online stage that sets nothing but its algorithm."""
    # Distillation is no algorithm without a teacher; the path is never read.
    teacher = {"teacher": "elsewhere"} if "teacher" in config.model_fields else {}
    algorithm = {"name": config.model_fields["name"].default, **teacher}
    stage = OnlineStageConfig.model_validate({"algorithm": algorithm}).model_dump()
    return dict(_iterate_leaves(stage, ""))


def _iterate_leaves(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            leaves += _iterate_leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _sort_key(key: str) -> int:
    """Return the rank of a row: the order of a stage's sections; what no key sets comes last."""
    block = key.partition(".")[0]
    return ORDER.index(block) if block in ORDER else len(ORDER)


def _format_row(key: str, values: Mapping[str, Any], row: PublishedSetting) -> str:
    # A row with ``ours`` has no key in a recipe: both cells are words.
    setting, default = (key, row.ours) if row.ours else (f"`{key}`", _format_value(values[key]))
    remarks = "; ".join(
        filter(None, [row.deviation and f"**deviates**: {row.deviation}", row.note])
    )
    cells = [setting, default, _format_value(row.value), remarks, row.source]
    # An empty cell would leave two spaces.
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    # As YAML writes it: true, false.
    return str(value).lower() if isinstance(value, bool) else str(value)
