"""A training group that gets SIGTERM passes it on."""

from __future__ import annotations

import signal
from unittest.mock import MagicMock

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from tasks.train_offline import train_offline


def test_its_processes_are_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    ranks = [MagicMock(), MagicMock()]
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", lambda: ranks)
    train_offline._pass_on(signal.SIGTERM, None)
    assert [rank.terminate.call_count for rank in ranks] == [1, 1]


def test_without_processes_nobody_would_save_and_flyte_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_offline, "terminated", False)
    monkeypatch.setattr("tasks.elastic.multiprocessing.active_children", list)
    with pytest.raises(FlyteRecoverableException, match="train_offline was terminated before it had processes"):
        train_offline._pass_on(signal.SIGTERM, None)
