"""Commands import without looking for garbage, and end without it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from ebbflow.commands.loading import import_libraries

ENDING = """
import atexit, gc
# Functions run in the reverse order, so this one runs last.
atexit.register(lambda: print(gc.get_freeze_count() > 0, len(gc.get_objects()) < 100))
from ebbflow.commands.loading import reduce_garbage_collection
reduce_garbage_collection()
reduce_garbage_collection()
print(gc.get_freeze_count(), gc.isenabled())
"""


def test_a_command_ends_with_nothing_to_search() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "True", "True", "True"]


def test_imports_are_not_searched_for_garbage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with pytest.raises(ModuleNotFoundError), import_libraries("loading"):
        assert not gc.isenabled()
        import none_of_this_name  # noqa: F401
    assert gc.isenabled()
    assert caplog.messages == ["loading"]


def test_a_program_that_has_switched_garbage_collection_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with import_libraries():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
