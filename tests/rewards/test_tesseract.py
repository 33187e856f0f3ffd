import shutil
import subprocess

import numpy as np
import pytest
from reward_cases import as_prompt

from ebbflow.rewards.built_in import tesseract

needs_tesseract = pytest.mark.skipif(
    shutil.which("tesseract") is None, reason="tesseract is not installed"
)


@needs_tesseract
def test_tesseract_reads_clean_renderings(clean):
    result = tesseract.Tesseract()(*clean)
    assert result.values.mean() >= 0.9
    assert result.metrics["tesseract_exact"].mean() >= 0.75
    assert not result.failures


@needs_tesseract
def test_finds_nothing_where_nothing_is(empty):
    result = tesseract.Tesseract()(empty, [as_prompt(index, "WXYZ") for index in range(len(empty))])
    assert np.all(result.values[:3] == 0)
    assert result.values.mean() <= 0.1


@needs_tesseract
def test_scores_do_not_depend_on_the_neighbours(clean, empty):
    mixed = np.concatenate([clean[0][:4], empty[:2], clean[0][4:6]])
    together, _ = tesseract.read_lines_of_text(mixed)
    assert together == [
        tesseract.read_lines_of_text(mixed[index : index + 1])[0][0] for index in range(len(mixed))
    ]
    assert tesseract.read_lines_of_text(mixed[::-1])[0] == together[::-1]


@needs_tesseract
def test_more_images_than_fit_a_process(clean, monkeypatch):
    images, prompts = clean
    whole = tesseract.Tesseract()(images[:7], prompts[:7]).values
    monkeypatch.setattr(tesseract, "PAGES", 3)
    assert np.array_equal(tesseract.Tesseract()(images[:7], prompts[:7]).values, whole)


def test_words_go_to_their_pages_and_a_page_that_is_missing_is_no_reading():
    table = [
        "level\tpage_num\tblock_num\tpar_num\tline_num\tword_num\tleft\ttop\twidth\theight\tconf\ttext",
        "1\t1\t0\t0\t0\t0\t0\t0\t168\t104\t-1\t",
        "5\t1\t1\t1\t1\t1\t28\t32\t50\t36\t96.5\tWX",
        '5\t1\t1\t1\t1\t2\t90\t32\t50\t36\t91.0\t"YZ',
        "1\t2\t0\t0\t0\t0\t0\t0\t168\t104\t-1\t",
        "5\t2\t1\t1\t1\t1\t0\t0\t165\t104\t0.000000\ta",
    ]
    assert tesseract.join_words_of_pages("\n".join(table), 3) == ['WX "YZ', "", None]
    assert tesseract.join_words_of_pages("", 2) == [None, None]


def timed_out(*args, **kwargs):
    raise subprocess.TimeoutExpired("tesseract", 1)


def not_started(*args, **kwargs):
    raise OSError("no such thing")


def crashed(*args, **kwargs):
    return subprocess.CompletedProcess(args, 1, b"", b"out of memory")


@pytest.mark.parametrize(
    ("accident", "reason"),
    [
        (timed_out, "more than 60 s"),
        (not_started, "no such thing"),
        (crashed, "ended with 1: out of memory"),
    ],
)
def test_an_accident_is_nan_with_a_reason_and_never_zero(clean, monkeypatch, accident, reason):
    monkeypatch.setattr(tesseract.subprocess, "run", accident)
    monkeypatch.setattr(tesseract, "PAGES", 2)
    images, prompts = clean
    result = tesseract.Tesseract()(images[:3], prompts[:3])
    assert np.isnan(result.values).all()
    assert np.isnan(result.metrics["tesseract_exact"]).all()
    assert set(result.failures) == {0, 1, 2}
    assert all(reason in text for text in result.failures.values())


def test_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(tesseract.shutil, "which", lambda name: None)
    assert "apt-get install tesseract-ocr" in tesseract._explain_unavailable.__wrapped__()


def test_says_when_it_has_no_english(monkeypatch):
    monkeypatch.setattr(tesseract.shutil, "which", lambda name: "/bin/tesseract")
    listed = subprocess.CompletedProcess([], 0, "List of available languages (1):\nosd\n", "")
    monkeypatch.setattr(tesseract.subprocess, "run", lambda *args, **kwargs: listed)
    assert "tesseract-ocr-eng" in tesseract._explain_unavailable.__wrapped__()
