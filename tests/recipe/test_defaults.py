"""Defaults are the published values, or say why not; the page about them is the code's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.recipe import defaults
from ebbflow.recipe.algorithms import EmaScheduleConfig, PublishedSetting, SigmaConfig
from ebbflow.recipe.defaults import (
    PAGE,
    list_default_values,
    list_published_defaults,
    write_defaults_page,
    write_defaults_table,
)
from ebbflow.recipe.optimizer_config import LearningRateScheduleConfig
from ebbflow.recipe.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
TABLES = list_published_defaults()
NAMES = [name for name in TABLES if name in ALGORITHMS]
KEYS = [(name, key) for name, table in TABLES.items() for key in table.published]
WITHOUT_A_SOURCE = {"distillation"}
"""Algorithms that no code has with settings of its own."""
NO_SETTINGS = {"name", "teacher", "teachers"}
"""Hyper-parameters without a row: what an algorithm is called and learns from."""
UNTOUCHED = {
    f"algorithm.sigma.{key}": field.default for key, field in SigmaConfig.model_fields.items()
}
UNTOUCHED |= {"algorithm.old.min_decay": EmaScheduleConfig().min_decay}
UNTOUCHED |= {
    f"optimizer.schedule.{key}": field.default
    for key, field in LearningRateScheduleConfig.model_fields.items()
}
UNTOUCHED |= {
    "optimizer.name": "adamw",
    "optimizer.momentum": 0.95,
    "optimizer.lr_factors": [],
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
}  # those of torch
"""Keys that need a row only where an algorithm sets another value than this."""


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_default_is_the_published_value_or_the_deviation_has_a_reason(name, key):
    row = TABLES[name].published[key]
    assert row.source
    if row.ours:
        assert row.deviation
        assert row.ours != row.value
    else:
        assert (TABLES[name].list_values()[key] == row.value) == (not row.deviation)


@pytest.mark.parametrize("name", NAMES)
def test_every_default_that_an_algorithm_sets_has_a_source(name):
    config = ALGORITHMS[name]
    values = list_default_values(ALGORITHMS[name])
    touched = {key for key in values if key not in UNTOUCHED or values[key] != UNTOUCHED[key]}
    hyper = {
        key
        for key in touched
        if key.startswith("algorithm.") and key.split(".")[1] not in NO_SETTINGS
    }
    declared = {
        f"{block}.{key}" if isinstance(value, dict) else block
        for block, value in config.stage_defaults.items()
        for key in (value if isinstance(value, dict) else [None])
    }
    optimizer = {key for key in touched if key.startswith("optimizer.")}
    assert hyper | declared | optimizer <= config.published.keys()


def test_the_committed_page_is_the_codes_own():
    printed = CliRunner().invoke(main, ["defaults"]).output
    assert printed == write_defaults_page() == (ROOT / PAGE).read_text(), (
        f"run: ebbflow defaults > {PAGE}"
    )


@pytest.mark.parametrize("name", TABLES)
def test_the_command_prints_one_table(name):
    printed = CliRunner().invoke(main, ["defaults", name]).output
    assert printed == write_defaults_table(name)
    assert printed in write_defaults_page()
    assert printed.startswith(f"## {name}\n")


def test_the_command_names_the_algorithms_when_there_is_no_such_one():
    result = CliRunner().invoke(main, ["defaults", "flow_gpro"])
    assert result.exit_code == 2
    assert "'flow_gpro' is not one of" in result.output
    assert "'flow_grpo'" in result.output


def test_a_row_shows_ours_beside_the_published_value(monkeypatch):
    monkeypatch.setattr(
        ALGORITHMS["flow_grpo"],
        "published",
        {
            "window.tail": PublishedSetting(
                0.4, "a/b c.sh", "off in d.sh", deviation="it is slower"
            ),
            "a habit": PublishedSetting("theirs", "a/b", deviation="no key has it", ours="ours"),
            "algorithm.clip_range": PublishedSetting(1e-4, "a/b e.py"),
        },
    )
    assert defaults.write_defaults_table("flow_grpo").splitlines()[4:] == [
        "| setting | default | published | remarks | source |",
        "|---|---|---|---|---|",
        "| `algorithm.clip_range` | 0.0001 | 0.0001 | | a/b e.py |",
        "| `window.tail` | none | 0.4 | **deviates**: it is slower; off in d.sh | a/b c.sh |",
        "| a habit | ours | theirs | **deviates**: no key has it | a/b |",
    ]
