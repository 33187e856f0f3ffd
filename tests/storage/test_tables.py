from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.data.schema import ADVANTAGES, build_score_schema
from ebbflow.storage import disk, tables
from ebbflow.storage.tables import (
    TableError,
    count_rows,
    open_table_writer,
    read_batches,
    read_column,
    read_row_groups,
    read_table,
    read_table_metadata,
    write_table,
)

SCHEMA = build_score_schema(["ocr"])
ints = st.integers(-(2**63), 2**63 - 1)
floats = st.one_of(st.none(), st.floats(allow_nan=False))
texts = st.one_of(
    st.none(), st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
)
rows = st.lists(st.tuples(ints, ints, floats, floats, texts), max_size=20)
about = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.integers(), st.text(max_size=5), st.lists(st.booleans(), max_size=2)),
)
in_place = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_table_survives_a_power_loss_before_it_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "scores.parquet"
    synced = []
    sync = disk.os.fsync

    def sync_and_remember(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(disk.os, "fsync", sync_and_remember)
    write_table(path, SCHEMA, [batch([(1, 0, 0.5, 0.5, None)])], {})
    # The whole file under another name, and then the folder that has the new one.
    assert synced[0] == (path.stat().st_ino, path.stat().st_size, False)
    assert synced[1][0] == tmp_path.stat().st_ino
    assert synced[1][2]


def batch(table_rows):
    columns = list(zip(*table_rows, strict=True)) or [()] * len(SCHEMA)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


@in_place
@given(st.lists(rows, max_size=3), about)
def test_what_is_written_is_read(tmp_path, parts, said):
    path = tmp_path / "table.parquet"
    write_table(path, SCHEMA, map(batch, parts), said)
    expected = pa.Table.from_batches([batch(part) for part in parts], SCHEMA)
    assert read_table(path, SCHEMA).equals(expected)
    assert read_table_metadata(path) == json.loads(json.dumps(said))
    assert count_rows(path) == len(expected)
    assert read_column(path, "failure").to_pylist() == expected["failure"].to_pylist()
    small = list(read_batches(path, rows=2))
    assert all(len(piece) <= 2 for piece in small)
    assert [row for piece in small for row in piece.to_pylist()] == expected.to_pylist()
    assert [file.name for file in tmp_path.iterdir()] == ["table.parquet"]


def test_about_may_be_filled_while_batches_are_drawn(tmp_path):
    said = {"seconds": 0}

    def batches():
        yield batch([(1, 2, 0.5, None, None)])
        said["seconds"] = 7

    write_table(tmp_path / "deep" / "table.parquet", SCHEMA, batches(), said)
    assert read_table_metadata(tmp_path / "deep" / "table.parquet") == {"seconds": 7}


def test_large_rows_are_in_small_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 1000)
    schema = pa.schema([pa.field("latent", pa.binary(400))])
    path = tmp_path / "table.parquet"
    rows = [bytes([number]) * 400 for number in range(5)]
    write_table(
        path, schema, [pa.record_batch([pa.array(rows, pa.binary(400))], schema=schema)], {}
    )
    row_groups = [
        (start, values.to_pylist())
        for start, values in read_row_groups(path, "latent", lambda start, end: end > 2)
    ]
    assert row_groups == [(2, rows[2:4]), (4, rows[4:])]


def test_several_tables_are_written_at_once_and_appear_together(tmp_path):
    one = tmp_path / "one.parquet"
    other = tmp_path / "other.parquet"
    with (
        open_table_writer(one, SCHEMA, {"is": 1}) as write_one,
        open_table_writer(other, SCHEMA, {"is": 2}) as write_other,
    ):
        for number in range(3):
            write_one(batch([(number, 0, 0.5, None, None)]))
            write_other(batch([(number, 1, 0.5, None, None)]))
        assert not one.exists()
        assert not other.exists()
    assert [read_table(path)["sample"].to_pylist() for path in (one, other)] == [[0] * 3, [1] * 3]
    assert [read_table_metadata(path)["is"] for path in (one, other)] == [1, 2]


def test_of_several_tables_none_appears_when_one_fails(tmp_path):
    def write():
        with (
            open_table_writer(tmp_path / "one.parquet", SCHEMA, {}) as write_one,
            open_table_writer(tmp_path / "other.parquet", SCHEMA, {}) as write_other,
        ):
            write_one(batch([(1, 2, 3.0, None, None)]))
            write_other(pa.record_batch([pa.array([1])], names=["x"]))

    with pytest.raises(ValueError, match="schema"):
        write()
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path):
    path = tmp_path / "table.parquet"
    write_table(path, SCHEMA, [batch([(i, 0, 0.5, None, "PAR1" * i) for i in range(5)])], {"a": 1})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(
            TableError, match=r"(?s)table\.parquet is no whole Parquet file .*make it again"
        ):
            read_table(path, SCHEMA)
    path.write_bytes(b"")
    for read in (
        read_table_metadata,
        count_rows,
        lambda p: list(read_batches(p)),
        lambda p: read_column(p, "reward"),
    ):
        with pytest.raises(TableError, match="no whole Parquet file"):
            read(path)


@pytest.mark.parametrize("there_before", [False, True])
def test_an_exception_while_writing_leaves_nothing(tmp_path, there_before):
    path = tmp_path / "table.parquet"
    if there_before:
        write_table(path, SCHEMA, [batch([(1, 2, 3.0, None, "before")])], {})

    def batches():
        yield batch([(4, 5, 6.0, None, "after")])
        raise RuntimeError("the generator died")

    with pytest.raises(RuntimeError, match="the generator died"):
        write_table(path, SCHEMA, batches(), {})
    assert [file.name for file in tmp_path.iterdir()] == (["table.parquet"] if there_before else [])
    if there_before:
        assert read_column(path, "failure").to_pylist() == ["before"]


def test_a_batch_of_other_columns_is_not_written(tmp_path):
    other = pa.record_batch([pa.array([1])], names=["x"])
    with pytest.raises(ValueError, match="schema"):
        write_table(tmp_path / "table.parquet", SCHEMA, [other], {})
    assert not list(tmp_path.iterdir())


def test_errors_name_the_file_and_the_fix(tmp_path):
    path = tmp_path / "table.parquet"
    with pytest.raises(TableError, match="no table at .*table.parquet"):
        read_table(path)
    write_table(path, SCHEMA, [], {})
    with pytest.raises(
        TableError, match="no column 'latent', only prompt_id, sample, reward, ocr, failure"
    ):
        read_column(path, "latent")
    with pytest.raises(TableError, match="(?s)has the columns.*but should have.*advantage"):
        read_table(path, ADVANTAGES)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(TableError, match="not written by Ebbflow"):
        read_table_metadata(path)
