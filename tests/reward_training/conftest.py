"""A reader of four letters that was trained for a quarter of its steps, in a cache of these tests'
own.
"""

from __future__ import annotations

import pytest

from ebbflow.models.glyph_training import recognizer

SIZE = (16, 32, 4)
"""Height, width, letters."""


@pytest.fixture(scope="session", autouse=True)
def reader_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        recognizer.open_recognizer.cache_clear()
        folder = recognizer.cache_folder() / recognizer._cache_key(*SIZE)
        recognizer.train_recognizer(*SIZE, folder, steps=100)
        yield
    recognizer.open_recognizer.cache_clear()
