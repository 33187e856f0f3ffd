import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from reward_cases import as_prompt

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.text import compute_text_similarity, is_exact_match, score_readings


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("WXYZ", "WXYZ", 1.0),
        ("w x\tyz", "WXYZ", 1.0),
        ("WXY", "WXYZ", 0.75),
        ("WAYZ", "WXYZ", 0.75),
        ("XWYZ", "WXYZ", 0.5),
        ("", "WXYZ", 0.0),
        ("WXYZ and much more", "WXYZ", 0.0),
    ],
)
def test_similarity_follows_the_convention(read, target, score):
    assert compute_text_similarity(read, target) == score
    assert is_exact_match(read, target) == float(score == 1.0)


@pytest.mark.parametrize(
    ("read", "target", "exact_score", "contained_score"),
    [
        ("OPEN DAILY", "OPEN", 0.0, 1.0),
        ("we are o p e n", "OPEN", 0.0, 1.0),
        ("OPEN", "OPEN", 1.0, 1.0),
        ("OPE", "OPEN", 0.75, 0.75),
        ("OPXEN DAILY", "OPEN", 0.0, 0.0),
        ("", "OPEN", 0.0, 0.0),
    ],
)
def test_contained_forgives_what_stands_around_the_target_and_nothing_else(
    read, target, exact_score, contained_score
):
    assert (
        compute_text_similarity(read, target)
        == compute_text_similarity(read, target, "exact")
        == exact_score
    )
    assert compute_text_similarity(read, target, "contained") == contained_score


@given(
    around=st.tuples(*[st.text("ab ", max_size=6)] * 2),
    read=st.text("ab", max_size=8),
    target=st.text("ab", min_size=1),
)
def test_the_two_matches_differ_only_where_the_target_is_inside_a_longer_reading(
    around, read, target
):
    before, after = around
    assert compute_text_similarity(before + target + after, target, "contained") == 1
    if target not in read or read == target:
        assert compute_text_similarity(read, target, "contained") == compute_text_similarity(
            read, target
        )


@given(read=st.text(max_size=12), target=st.text(min_size=1, max_size=12).filter(str.strip))
def test_similarity_is_a_share_and_one_only_for_equal_texts(read, target):
    score = compute_text_similarity(read, target)
    assert 0 <= score <= 1
    assert (score == 1) == bool(is_exact_match(read, target))


def test_case_matters_where_it_is_kept():
    assert (compute_text_similarity("OPeN", "open"), is_exact_match("OPeN", "open")) == (1.0, 1.0)
    assert (
        compute_text_similarity("OPeN", "open", case="kept"),
        is_exact_match("OPeN", "open", case="kept"),
    ) == (
        0.25,
        0.0,
    )
    kept = score_readings(["O pen"], [as_prompt(0, "open")], "same", case="kept")
    assert (kept.values[0], kept.metrics["same"][0]) == (0.75, 0.0)


def test_a_blank_target_is_an_error():
    with pytest.raises(ValueError, match="blank"):
        compute_text_similarity("A", " ")


def test_failed_readings_and_missing_targets_are_nan_with_a_reason():
    prompts = [as_prompt(0, "AB"), as_prompt(1, "AB"), as_prompt(2, None)]
    result = score_readings(["ab", None, "ab"], prompts, "hit", {1: "broken"})
    assert np.array_equal(result.values, [1, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(result.metrics["hit"], [1, np.nan, np.nan], equal_nan=True)
    assert result.failures[1] == "broken"
    assert "quote it" in result.failures[2]


def test_an_exact_match_stays_exact_whatever_scores_one():
    result = score_readings(["open daily"], [as_prompt(0, "OPEN")], "hit", match="contained")
    assert (result.values[0], result.metrics["hit"][0]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "reader"), [("ocr", "ppocr"), ("tesseract", "built_in.tesseract")]
)
def test_every_reward_that_reads_takes_the_match_of_its_configuration(monkeypatch, name, reader):
    reading = ["OPEN DAILY"] if name == "ocr" else (["OPEN DAILY"], "")
    monkeypatch.setattr(f"ebbflow.rewards.{reader}.read_lines_of_text", lambda images: reading)
    image = np.zeros((1, 8, 8, 3), np.uint8)
    prompts = [as_prompt(0, "OPEN")]
    scores = [
        configure_reward(name, **keys).build()(image, prompts).values[0]
        for keys in ({}, {"match": "exact"}, {"match": "contained"})
    ]
    assert scores == [0, 0, 1]


def test_the_page_layout_takes_it_too(monkeypatch):
    monkeypatch.setattr("ebbflow.rewards.ppocr.read_pages", lambda images: (["OPEN DAILY"], {}))
    config = configure_reward("ocr", layout="page", match="contained")
    assert config.build()(np.zeros((1, 8, 8, 3), np.uint8), [as_prompt(0, "OPEN")]).values[0] == 1


def test_another_match_is_rejected_with_the_choices():
    with pytest.raises(ValidationError, match="'exact' or 'contained'"):
        configure_reward("ocr", match="contains")
