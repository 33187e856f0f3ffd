"""``make setup`` takes torch from where the machine needs it, and says so."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "containers" / "environment" / "choose_torch.py"


@pytest.fixture(scope="module")
def choose() -> Any:
    return runpy.run_path(str(SCRIPT))["choose_options"]


def test_a_machine_that_reaches_the_index_gets_its_own_build(choose: Any, tmp_path: Path) -> None:
    # A folder of wheels may exist and be empty, or have wheels of other packages.
    (tmp_path / "torchvision-0.1-py3-none-any.whl").touch()
    links = ["--find-links", str(tmp_path)]
    options, sentence = choose("auto", [str(tmp_path)], lambda: True)
    assert options == [*links, "--torch-backend", "auto"]
    assert sentence == "torch for this machine, from PyTorch's index"


def test_a_wheel_that_pip_is_configured_with_is_taken(choose: Any, tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    for link in (str(tmp_path), tmp_path.as_uri()):
        options, sentence = choose("auto", [link], pytest.fail)
        assert options == ["--find-links", link]
        assert sentence == f"torch from {link}, which pip is configured with"


def test_pypi_is_taken_with_a_word_where_the_index_does_not_answer(choose: Any) -> None:
    options, sentence = choose("auto", [], lambda: False)
    assert options == []
    assert "torch from PyPI, for CUDA" in sentence
    assert "does not answer" in sentence


@pytest.mark.parametrize(
    ("backend", "options"), [("cpu", ["--torch-backend", "cpu"]), ("pypi", [])]
)
def test_the_variable_decides_without_asking_anybody(
    choose: Any, backend: str, options: list[str]
) -> None:
    assert choose(backend, [], pytest.fail)[0] == options


def test_a_page_that_does_not_answer_offers_nothing() -> None:
    # Nothing listens at port 1 of this machine.
    assert runpy.run_path(str(SCRIPT))["read_page"]("http://127.0.0.1:1/wheels") is None
