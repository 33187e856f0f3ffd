"""The defaults of each algorithm, and of training on data, next to the published values: ``ebbflow
defaults``, and the page ``docs/defaults.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ebbflow.recipe.algorithms import AlgorithmConfig, PublishedSetting
from ebbflow.recipe.data import AnchorConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.recipe.stages import OfflineStageConfig, OnlineStageConfig

PAGE = "docs/defaults.md"
HEADER = f"""# Defaults and published values

`ebbflow defaults` prints this page from the code, and `ebbflow defaults ALGORITHM` prints one of
its tables. A test compares {PAGE} with the code. The column *default* shows the settings of an
online stage that sets only the algorithm's name; offline stages have the same, without
`updates_per_step`. The last two tables are of captioned data ([data.md](data.md)): `sft_on_data`
of an offline stage that sets `algorithm: sft` and `data`, `anchor` of a stage's `anchor`. Where a
default differs from the published value, the remarks begin with **deviates** and give the reason.
Published values are for models with 65,536 latent elements and more, and most of them are for LoRA
adapters; recipes for the glyph model state what they change.

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


class PublishedDefaults(NamedTuple):
    """A table of the page.

    Attributes:
        paper: arXiv id, empty without one.
        published: the values of the source, by dotted key.
        list_values: returns dotted key to default.
    """

    paper: str
    published: Mapping[str, PublishedSetting]
    list_values: Callable[[], dict[str, Any]]


def list_published_defaults() -> dict[str, PublishedDefaults]:
    """Return the tables of the page by name: the algorithms with published values, then those of
    training on data.
    """

    def of_algorithm(config: type[AlgorithmConfig]) -> PublishedDefaults:
        return PublishedDefaults(
            config.paper, config.published, lambda: list_default_values(config)
        )

    algorithms = {name: config for name, config in ALGORITHMS.items() if config.published}
    return {
        **{name: of_algorithm(config) for name, config in algorithms.items()},
        "sft_on_data": PublishedDefaults("", ALGORITHMS["sft"].data_published, _list_data_values),
        "anchor": PublishedDefaults(
            AnchorConfig.paper, AnchorConfig.published, _list_anchor_values
        ),
    }


def write_defaults_page() -> str:
    """Return all tables as Markdown."""
    return HEADER + "".join(f"\n{write_defaults_table(name)}" for name in list_published_defaults())


def write_defaults_table(name: str) -> str:
    """Return one table as Markdown: setting, default, published value, remarks and source."""
    table = list_published_defaults()[name]
    lines = [f"## {name}", "", *([f"arXiv {table.paper}", ""] if table.paper else [])]
    lines += ["| setting | default | published | remarks | source |", "|---|---|---|---|---|"]
    values = table.list_values()
    lines += [
        _format_row(key, values, table.published[key])
        # Sorting is stable: the rows of a section stay in the order of the class.
        for key in sorted(table.published, key=_sort_key)
    ]
    return "\n".join(lines) + "\n"


def _list_data_values() -> dict[str, Any]:
    """Return dotted key to value of an offline stage of ``sft`` that names its data alone."""
    stage = OfflineStageConfig.model_validate(
        {"kind": "offline", "algorithm": {"name": "sft"}, "data": {"path": "elsewhere"}}
    )
    return dict(_iterate_leaves(stage.model_dump(), ""))


def _list_anchor_values() -> dict[str, Any]:
    """Return dotted key to value of an anchor that names its data alone."""
    anchor = AnchorConfig.model_validate({"data": {"path": "elsewhere"}})
    return dict(_iterate_leaves({"anchor": anchor.model_dump()}, ""))


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
