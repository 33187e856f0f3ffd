"""A training group that is told to end passes the word on."""

from __future__ import annotations

import signal
from unittest.mock import MagicMock

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from tasks.train_offline import train_offline


def test_its_processes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "told", False)
    ranks = [MagicMock(), MagicMock()]
    monkeypatch.setattr("tasks.preemption.multiprocessing.active_children", lambda: ranks)
    train_offline._pass_on(signal.SIGTERM, None)
    assert [rank.terminate.call_count for rank in ranks] == [1, 1]


def test_without_processes_nobody_would_save_and_flyte_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "told", False)
    monkeypatch.setattr("tasks.preemption.multiprocessing.active_children", list)
    with pytest.raises(FlyteRecoverableException, match="train_offline was told to end while it had no processes"):
        train_offline._pass_on(signal.SIGTERM, None)
