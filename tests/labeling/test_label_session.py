"""Answers are on the disk at once; order and sides depend on the seed and the rater alone; the test
decides when to stop.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from label_cases import brighter, make_comparison, opened, rate, write_rollouts

from ebbflow.labeling import answers
from ebbflow.labeling.session import OutOfTurnError, normalize_rater_name
from ebbflow.labeling.sources import LabelError, load_rollouts
from ebbflow.storage.disk import DiskFullError
from ebbflow.storage.locks import FolderInUseError

HALF = [True, False] * 10


def kept(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_order_and_sides_depend_on_the_seed_and_the_rater_alone(tmp_path):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        seen = {
            rater: [
                (key, session.picture_on_left(rater, key)) for key in session.order_of_pairs(rater)
            ]
            for rater in ("anna", "ben")
        }
        rate(session, "anna", 7)
        assert [pair.key for pair in session.list_upcoming_pairs("anna")] == [
            key for key, _ in seen["anna"][7:]
        ]
    with opened(task, tmp_path / "a") as session:
        assert [pair.key for pair in session.list_upcoming_pairs("anna")] == [
            key for key, _ in seen["anna"][7:]
        ]
        assert [
            (key, session.picture_on_left("ben", key)) for key in session.order_of_pairs("ben")
        ] == seen["ben"]
    with opened(task, tmp_path / "b", seed=1) as session:
        assert session.order_of_pairs("anna") != [key for key, _ in seen["anna"]]
    assert [key for key, _ in seen["anna"]] != [key for key, _ in seen["ben"]]
    assert {key for key, _ in seen["anna"]} == {pair.key for pair in task.pairs}


def test_the_candidate_is_on_each_side_about_as_often(tmp_path):
    task = make_comparison(tmp_path, [True] * 100)
    with opened(task, tmp_path / "a") as session:
        sides = Counter(
            session.picture_on_left(rater, key)
            for rater in ("anna", "ben", "cleo", "dan")
            for key in session.order_of_pairs(rater)
        )
    assert 160 < sides[1] < 240


def test_every_answer_says_what_was_shown_and_what_was_preferred(tmp_path):
    wins = [True, False, True, False, True]
    task = make_comparison(tmp_path, wins)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna")
        preferred = {answer.pair: answer.preferred_picture for answer in session.answers.standing}
    assert preferred == {f"{index}-0": int(won) for index, won in enumerate(wins)}
    assert [set(line) for line in kept(tmp_path / "a")] == [
        {"at", "rater", "pair", "answer", "left", "browser"}
    ] * 5


def test_an_answer_is_on_the_disk_before_it_is_acknowledged(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        answers.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    )
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        for count in range(1, 4):
            rate(session, "anna", 1)
            assert len(kept(tmp_path / "a")) == count
            assert synced[-1] == (tmp_path / "a" / "answers.jsonl").stat().st_size


def test_undo_takes_back_one_answer_after_the_other(tmp_path):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        order = session.order_of_pairs("anna")
        rate(session, "anna", 3)
        rate(session, "ben", 2)
        session.undo_last_answer("anna")
        session.undo_last_answer("anna")
        assert [pair.key for pair in session.list_upcoming_pairs("anna")] == order[1:]
        session.record_answer("anna", order[1], "tie")
        assert [
            session.answers.answers_of_rater("anna")[key].preferred_picture for key in order[1:2]
        ] == [None]
        assert len(session.answers.answers_of_rater("ben")) == 2
    with opened(task, tmp_path / "a") as session:
        assert list(session.answers.answers_of_rater("anna")) == order[:2]
        session.undo_last_answer("anna")
        session.undo_last_answer("anna")
        with pytest.raises(OutOfTurnError, match="anna has no answer to take back"):
            session.undo_last_answer("anna")
    assert [line["answer"] for line in kept(tmp_path / "a")].count("undo") == 4


def test_only_the_pair_that_is_shown_can_be_answered(tmp_path):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        first, second = session.order_of_pairs("anna")[:2]
        for pair in (second, "99-0"):
            with pytest.raises(OutOfTurnError):
                session.record_answer("anna", pair, "left")
        session.record_answer("anna", first, "left")
        with pytest.raises(OutOfTurnError):
            session.record_answer("anna", first, "right")
        assert len(kept(tmp_path / "a")) == 1


@pytest.mark.parametrize("torn", [b'{"at": "2026', b'{"at"', b"\xff"])
def test_a_line_that_a_killed_process_left_is_removed(tmp_path, torn):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna", 2)
    file = tmp_path / "a" / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    with opened(task, tmp_path / "a") as session:
        assert file.read_bytes() == whole
        rate(session, "anna", 1)
    assert len(kept(tmp_path / "a")) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("anna", 'an"na', 1),
        lambda text: text.replace('"left":', '"lft":'),
        lambda text: "\n" + text,
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(tmp_path, damage):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna", 2)
    file = tmp_path / "a" / "answers.jsonl"
    file.write_text(damage(file.read_text()))
    with (
        pytest.raises(LabelError, match=r"answers\.jsonl, line 1: .* is no answer"),
        opened(task, tmp_path / "a"),
    ):
        pass


def test_an_answer_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna", 2)
        before = (tmp_path / "a" / "answers.jsonl").read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(answers.os, "fsync", full)
        with pytest.raises(DiskFullError):
            rate(session, "anna", 1)
        assert (tmp_path / "a" / "answers.jsonl").read_bytes() == before
        assert len(session.answers.standing) == 2


def test_a_folder_is_used_by_one_process(tmp_path):
    task = make_comparison(tmp_path, HALF)
    with (
        opened(task, tmp_path / "a"),
        pytest.raises(FolderInUseError),
        opened(task, tmp_path / "a"),
    ):
        pass


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    task = make_comparison(tmp_path / "tables", HALF)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(LabelError, match="has other files in it"), opened(task, tmp_path / "mine"):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with (
        pytest.raises(LabelError, match="is a file"),
        opened(task, tmp_path / "mine" / "thesis.txt"),
    ):
        pass


def test_a_folder_keeps_to_its_task(tmp_path):
    task = make_comparison(tmp_path / "tables", HALF)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna", 2)
    with (
        pytest.raises(LabelError, match=r"answers to something else \(seed = 0\)"),
        opened(task, tmp_path / "a", seed=1),
    ):
        pass
    with (
        pytest.raises(LabelError, match=r"\(error_rate = 0\.05\)"),
        opened(task, tmp_path / "a", error_rate=0.1),
    ):
        pass
    other = make_comparison(tmp_path / "others", [True] * 20)
    with pytest.raises(LabelError, match=r"\(other pictures\)"), opened(other, tmp_path / "a"):
        pass
    for damaged in ("{", "[]", "null", "[" * 100_000):
        (tmp_path / "a" / "task.json").write_text(damaged)
        with (
            pytest.raises(LabelError, match=r"task\.json is damaged"),
            opened(task, tmp_path / "a"),
        ):
            raise AssertionError("it is not opened")


def test_the_test_stops_everybody_when_it_has_decided(tmp_path):
    task = make_comparison(tmp_path, [True] * 40)
    with opened(task, tmp_path / "a") as session:
        assert rate(session, "anna", 7) == 7
        assert not session.is_decided()
        assert (
            rate(session, "ben") == 1
        )  # M = 2^8 / 9 > 20, if it was a pair that anna had not answered
        assert session.is_decided()
        assert session.list_upcoming_pairs("anna") == session.list_upcoming_pairs("cleo") == []
        with pytest.raises(OutOfTurnError):
            session.record_answer("anna", session.order_of_pairs("anna")[7], "left")
        with pytest.raises(OutOfTurnError, match="the test has decided"):
            session.undo_last_answer("anna")
        assert (session.run_test().preferred, session.run_test().decided_after) == ("candidate", 8)


def test_a_second_answer_on_a_pair_is_no_further_evidence(tmp_path):
    task = make_comparison(tmp_path, [True] * 7)
    with opened(task, tmp_path / "a") as session:
        for rater in ("anna", "ben", "cleo"):
            assert rate(session, rater) == 7
        assert len(session.answers.standing) == 21
        assert (session.run_test().candidate, session.is_decided()) == (7, False)


def test_all_pairs_can_be_asked_for_although_the_test_has_decided(tmp_path):
    task = make_comparison(tmp_path, [True] * 30)
    with opened(task, tmp_path / "a", all_pairs=True) as session:
        assert rate(session, "anna") == 30
        assert session.run_test().decided_after == 8


def test_pairs_of_one_policy_have_no_test(tmp_path):
    task = load_rollouts(*write_rollouts(tmp_path, groups=8, group_size=4), max_pairs=100, seed=0)
    with opened(task, tmp_path / "a") as session:
        assert rate(session, "anna") == 16
        assert session.run_test() is None


def test_agreement_compares_what_was_preferred_and_not_which_side(tmp_path):
    task = make_comparison(tmp_path, HALF)
    with opened(task, tmp_path / "a", all_pairs=True) as session:
        assert session.measure_agreement() is None
        for rater in ("anna", "ben"):
            rate(session, rater)
        sides = Counter(answer.answer for answer in session.answers.standing)
        assert min(sides["left"], sides["right"]) > 5
        assert session.measure_agreement() == 1
        for key in session.order_of_pairs("contrary"):
            session.record_answer(
                "contrary",
                key,
                "left" if brighter(session, "contrary", key) == "right" else "right",
            )
        assert session.measure_agreement() == pytest.approx(0, abs=0.5)
        assert session.measure_agreement() < 0


@pytest.mark.parametrize(
    ("given", "name"),
    [(" Anna  B. ", "Anna B."), ("Zoe\u0301", "Zoé"), ("李雷", "李雷"), ("a@b.c", "a@b.c")],
)
def test_a_name_has_one_spelling(given, name):
    assert normalize_rater_name(given) == name


@pytest.mark.parametrize(
    "given", ["", " ", ".", "../x", "<b>", "a/b", "a\0b", "a|b", "x" * 41, "\u202eanna", "-rf"]
)
def test_what_is_no_name_is_refused(given):
    with pytest.raises(ValueError, match="a name has 1 to 40"):
        normalize_rater_name(given)
