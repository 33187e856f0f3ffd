"""What the docs say about the code is what the code says."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.doc_facts import DOCS, ROWS, SIZE, measure_sources, read_attributes, replace_rows


def test_the_fields_of_rows_are_those_of_the_types() -> None:
    text = (DOCS / "extending.md").read_text()
    assert replace_rows(text) == text, "run python -m benchmarks.doc_facts"


def test_every_field_of_rows_is_explained() -> None:
    for rows in ROWS:
        assert set(read_attributes(rows)) == {field.name for field in dataclasses.fields(rows)}


def test_the_size_of_a_versions_sources_is_that_of_the_package() -> None:
    match = SIZE.search((DOCS / "serving.md").read_text())
    assert match
    # Not to the last digit: a few lines of code would fail the tests.
    assert float(match[2]) == pytest.approx(measure_sources(), rel=0.1), (
        "run python -m benchmarks.doc_facts"
    )
