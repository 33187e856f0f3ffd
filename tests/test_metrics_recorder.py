"""What a recorder makes for a metrics logger, and what it leaves alone without one."""

from __future__ import annotations

import pytest

from ebbflow.stage import MetricsRecorder


class FileLogger:
    """A metrics logger that keeps the files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def log_file(self, path: str, content: bytes) -> None:
        self.files[path] = content


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_file_is_made_where_somebody_logs_it(is_logged: bool) -> None:
    calls = []

    def draw() -> bytes:
        calls.append("drawn")
        return b"picture"

    logger = FileLogger()
    recorder = MetricsRecorder(logger if is_logged else None)  # type: ignore[arg-type]
    recorder.log_file("timeline.json", b"{}")
    recorder.log_file("timeline.png", draw)
    expected = {"timeline.json": b"{}", "timeline.png": b"picture"} if is_logged else {}
    assert logger.files == expected
    assert calls == ["drawn"] * is_logged
