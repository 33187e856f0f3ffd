"""docs/metrics.md explains every metric that the code names, and none that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from ebbflow.algorithms.base import SurrogateRows
from ebbflow.algorithms.built_in.tdm_r1 import TDMR1Config, compute_surrogate_loss
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.tracking import curves
from ebbflow.training.kinds.matching import MATCHING
from tests.metrics_page import explained, fits, unexplained

LIBRARY = Path(__file__).parents[1] / "ebbflow"
ROOMS = ("algorithms", "evaluation", "offline", "online", "training", "rollouts")
TENSORS = LIBRARY / "online" / "in_flight.py"
"""Names tensors in a file like metrics."""
SOURCES = [
    *(path for room in ROOMS for path in (LIBRARY / room).rglob("*.py") if path != TENSORS),
    *(LIBRARY / "tracking" / name for name in ("nodes.py", "curves.py")),
]


def as_name(node: ast.expr | None) -> str | None:
    """The text of a string, with ``<>`` for what an f-string fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(as_name(part) or "<>" for part in node.values)
    return None


def keys_of(node: ast.AST) -> list[ast.expr | None]:
    match node:
        case ast.Dict(keys=keys):
            return list(keys)
        case ast.DictComp(key=key):
            return [key]
        case ast.Subscript(slice=key, ctx=ast.Store()):
            return [key]
    return []


def named(path: Path) -> Iterator[str]:
    """The keys of dictionaries that look like metrics: of several parts, as no other keys of these
    rooms are.
    """
    for key in chain.from_iterable(map(keys_of, ast.walk(ast.parse(path.read_text())))):
        name = as_name(key)
        if (
            name and "/" in name and " " not in name and not name.startswith("<>")
        ):  # that fits everything
            yield name


def of_trained_copies() -> set[str]:
    """What is logged under the name of a copy: its loss and its gradient norm, and the metrics of
    the surrogate's rows.
    """
    copies = MATCHING.list_trained_copies(TDMR1Config(), OptimizerConfig())
    latents = [torch.ones(2, 1)] * 4  # velocity, target, teacher, old
    rows = SurrogateRows(*latents, torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.int64))
    _, metrics = compute_surrogate_loss(rows, TDMR1Config())
    return {f"{copy}/{name}" for copy in copies for name in ("loss", "grad_norm")} | {
        f"surrogate/{name}" for name in metrics
    }


def in_code() -> set[str]:
    return {
        *(name for path in SOURCES for name in named(path)),
        *of_trained_copies(),
        curves.TRAINING_REWARD,
        curves.ALARMS,
    }


def test_every_metric_of_the_code_is_explained() -> None:
    names = in_code()
    assert {
        "reward/mean",
        "clip/up",
        "score/<>",
        "held_out_<>/<>",
        "parity/log_prob_max",
        "seconds/<>",
        "fake/loss",
        "surrogate/stopped",
    } <= names
    assert unexplained(names) == []


def test_what_is_not_explained_is_found() -> None:
    assert unexplained({"reward/mean", "reward/median", "1.1 online/loss"}) == [
        "1.1 online/loss",
        "reward/median",
    ]


def test_every_metric_on_the_page_is_in_the_code() -> None:
    names = in_code()
    rooms = (LIBRARY, LIBRARY.parent / "tasks")
    text = "".join(path.read_text() for room in rooms for path in room.rglob("*.py"))
    rows = [
        row
        for row in explained()
        if not row.startswith("system/") and row != "stage <stage>/<metric>"
    ]  # MLflow's; any
    left = [row for row in rows if not any(fits(row, name) or fits(name, row) for name in names)]
    words = {
        row.removeprefix("<metric>/") for row in left
    }  # as a key, or as a field of the gate's comparison
    assert [
        word
        for word in words
        if not re.search(rf'"{re.escape(word)}"|^    {re.escape(word)}: float', text, re.MULTILINE)
    ] == []


def test_no_metric_is_explained_twice() -> None:
    rows = explained()
    assert [row for row in rows if rows.count(row) > 1] == []
