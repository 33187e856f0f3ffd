"""Tables to pairs of pictures: which are compared, and what cannot be."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pytest
from label_cases import grey, level, make_comparison, write_evaluation, write_rollouts

from ebbflow.labeling.sources import (
    LabelError,
    find_comparison,
    load_comparison,
    load_label_task,
    load_rollouts,
)
from ebbflow.run_summary import write_summary_file
from ebbflow.storage.tables import TableError, write_table


def test_a_comparison_has_the_champions_picture_first(tmp_path):
    task = make_comparison(tmp_path, [True, False, True])
    assert (task.kind, task.names, [pair.key for pair in task.pairs]) == (
        "comparison",
        ("before", "1.1 online"),
        ["0-0", "1-0", "2-0"],
    )
    assert [[level(picture.png) for picture in pair.pictures] for pair in task.pairs] == [
        [120, 200],
        [121, 60],
        [122, 200],
    ]
    assert [pair.prompt for pair in task.pairs] == ["prompt 0", "prompt 1", "prompt 2"]
    assert task.pairs[0].pictures[0].latent is None
    assert set(task.file_digests) == {"champion", "candidate"}


def test_pairs_with_the_same_picture_and_samples_of_one_side_are_counted(tmp_path):
    champion = write_evaluation(tmp_path / "a.parquet", "a", [10, 20, 30, 40])
    candidate = write_evaluation(tmp_path / "b.parquet", "b", [11, 20, 31])
    task = load_comparison(champion, candidate, max_pairs=100, seed=0)
    assert ([pair.key for pair in task.pairs], task.identical, task.missing) == (
        ["0-0", "2-0"],
        1,
        1,
    )


def test_only_held_out_samples_are_compared(tmp_path):
    paths = [
        write_evaluation(tmp_path / f"{name}.parquet", name, [1, 2], split="validation")
        for name in "ab"
    ]
    with pytest.raises(LabelError, match="no held-out sample in common"):
        load_comparison(*paths, max_pairs=100, seed=0)


def test_more_pairs_than_wanted_are_drawn_by_the_seed(tmp_path):
    paths = [
        write_evaluation(tmp_path / f"{name}.parquet", name, range(start, start + 40))
        for name, start in (("a", 0), ("b", 50))
    ]
    drawn = [
        [pair.key for pair in load_comparison(*paths, max_pairs=8, seed=seed).pairs]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(set(keys)) for keys in drawn] == [8, 8, 8]


def test_what_cannot_be_compared_says_why(tmp_path):
    champion = write_evaluation(tmp_path / "a.parquet", "a", [1, 2])
    other = write_evaluation(tmp_path / "b.parquet", "b", [3, 4], prompts=["prompt 0", "<b>"])
    with pytest.raises(LabelError, match="prompt_id 1 is another prompt"):
        load_comparison(champion, other, 100, 0)
    larger = write_evaluation(tmp_path / "c.parquet", "c", [3, 4], width=64)
    with pytest.raises(
        LabelError, match=r"\(32, 16\) and \(64, 16\) pixels would show whose they are"
    ):
        load_comparison(champion, larger, 100, 0)
    with pytest.raises(LabelError, match="all 2 pairs have the same picture"):
        load_comparison(champion, champion, 100, 0)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(TableError, match=r"d\.parquet is no whole Parquet file"):
        load_comparison(champion, tmp_path / "d.parquet", 100, 0)
    schema = pa.schema([("prompt_id", pa.int64())])
    write_table(tmp_path / "e.parquet", schema, [], {})
    with pytest.raises(TableError, match="no column 'image'"):
        load_comparison(champion, tmp_path / "e.parquet", 100, 0)


def test_a_picture_that_is_no_png_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "label_cases.grey", lambda value, **size: b"GIF89a" if value == 7 else grey(value, **size)
    )
    paths = [
        write_evaluation(tmp_path / f"{name}.parquet", name, [value])
        for name, value in (("a", 1), ("b", 7))
    ]
    with pytest.raises(LabelError, match="pair 0-0 has a picture that is no PNG"):
        load_comparison(*paths, max_pairs=100, seed=0)


def test_rollouts_are_paired_within_their_prompt_and_each_sample_is_shown_once(tmp_path):
    shards, prompts = write_rollouts(tmp_path, groups=6, group_size=5)
    task = load_rollouts(shards, prompts, max_pairs=100, seed=0)
    assert (task.kind, task.names, len(task.pairs)) == ("pairs", ("1.2 offline",), 12)
    shown = []
    for pair in task.pairs:
        prompt, *samples = map(int, pair.key.split("-"))
        assert pair.prompt == f'"WO{prompt}"'
        for sample, picture in zip(samples, pair.pictures, strict=True):
            assert level(picture.png) == 20 + 7 * prompt + 3 * sample
            assert np.allclose(picture.latent, level(picture.png) / 127.5 - 1)
            shown.append((prompt, sample))
    assert len(set(shown)) == len(shown)
    other = load_rollouts(shards, prompts, max_pairs=100, seed=1)
    assert [pair.key for pair in other.pairs] != [pair.key for pair in task.pairs]
    assert len(load_rollouts(shards, prompts, max_pairs=3, seed=0).pairs) == 3


def test_rollouts_need_their_own_prompts_and_two_samples(tmp_path):
    shards, _ = write_rollouts(tmp_path / "many", groups=6, group_size=1)
    _, few = write_rollouts(tmp_path / "few", groups=2, group_size=2)
    with pytest.raises(LabelError, match="no prompt has two samples"):
        load_rollouts(shards, tmp_path / "many" / "prompts.parquet", 100, 0)
    with pytest.raises(LabelError, match="has no prompt_id"):
        load_rollouts(shards, few, 100, 0)


@pytest.fixture
def run(tmp_path):
    """The folder of a run as a local execution leaves it; the candidate was evaluated twice,
    because its task was killed.
    """
    nodes = tmp_path / "run" / "nodes"
    write_evaluation(nodes / "ebbflow-1" / "samples.parquet", "before", [1, 2, 3])
    stale = write_evaluation(nodes / "ebbflow-2" / "samples.parquet", "1.1 online", [4, 5, 6])
    write_evaluation(nodes / "ebbflow-3" / "samples.parquet", "1.1 online", [7, 8, 9])
    write_evaluation(nodes / "ebbflow-4" / "samples.parquet", "1.2 offline", [10, 11, 12])
    os.utime(stale, (1, 1))
    (nodes / "ebbflow-5").mkdir()
    write_rollouts(nodes / "ebbflow-5", groups=4, group_size=2)
    summary = {"champion": "before", "candidate": "1.1 online", "promoted": True}
    write_summary_file(tmp_path / "run" / "summary.json", summary)
    return tmp_path / "run"


def test_a_run_is_compared_as_its_gate_did(run):
    task = load_label_task([run], None, None, 100, 0)
    assert task.names == ("before", "1.1 online")
    assert [level(picture.png) for picture in task.pairs[0].pictures] == [1, 7]


def test_a_stage_of_a_run_is_compared_with_itself(run):
    task = load_label_task([run], "1.2 offline", None, 100, 0)
    assert (task.kind, len(task.pairs)) == ("pairs", 4)
    with pytest.raises(
        LabelError, match=r"no rollouts of a stage '2\.2 offline' .*: '1\.2 offline'"
    ):
        load_label_task([run], "2.2 offline", None, 100, 0)


def test_a_run_without_a_summary_or_samples_says_so(run):
    named = {"champion": "champion v3", "candidate": "1.1 online"}
    write_summary_file(run / "summary.json", named)
    with pytest.raises(
        LabelError, match="no samples of 'champion v3' below nodes, only of .*before"
    ):
        find_comparison(run)
    for broken in ("{}", "[]", "{", json.dumps(named)):
        (run / "summary.json").write_text(broken)
        # Without a digest it is not read, and the message says why.
        with pytest.raises(LabelError, match=r"summary\.json .*name the samples\.parquet of two"):
            find_comparison(run)


@pytest.mark.parametrize(
    ("count", "stage", "reason"),
    [(1, None, "1 sources"), (3, None, "3 sources"), (2, "1.1", "--stage '1.1'")],
)
def test_the_sources_are_a_run_or_two_evaluations(tmp_path, count, stage, reason):
    paths = [
        write_evaluation(tmp_path / f"{index}.parquet", "a", [index]) for index in range(count)
    ]
    with pytest.raises(LabelError, match=reason):
        load_label_task(paths, stage, None, 100, 0)


def test_named_rollouts_need_the_option_prompts(tmp_path):
    shards, prompts = write_rollouts(tmp_path, groups=4, group_size=2)
    assert len(load_label_task(shards, None, prompts, 100, 0).pairs) == 4
