"""Clean renderings with their prompts, as every reader gets them, and a client of servers."""

import numpy as np
import pytest
from reward_cases import as_prompt, as_rgb

from ebbflow.data.prompts import Prompt, make_glyph_prompts
from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.built_in.remote import Remote


@pytest.fixture(scope="session")
def clean() -> tuple[np.ndarray, list[Prompt]]:
    """40 random strings of four letters in images of 16x32 pixels."""
    targets = [row.target for row in make_glyph_prompts(40, 4, seed=11)]
    images = as_rgb(np.stack([render_text(target, 16, 32) for target in targets]))
    return images, [as_prompt(index, target) for index, target in enumerate(targets)]


@pytest.fixture(scope="session")
def empty() -> np.ndarray:
    """White, black, grey and eight kinds of noise: nothing that a reader should read."""
    flat = [np.full((16, 32), level) for level in (255, 0, 128)]
    noise = np.random.default_rng(0).integers(0, 256, (8, 16, 32))
    return as_rgb(np.stack([*flat, *noise]))


@pytest.fixture
def waits():
    """The seconds that a reward would have waited."""
    return []


@pytest.fixture
def client(waits):
    """``client(url, timeout=0.2)``: a remote reward that does not wait between its attempts."""

    def make(url, **keys):
        return Remote(
            configure_reward("remote", url=url, **{"timeout": 5, **keys}), sleep=waits.append
        )

    return make
