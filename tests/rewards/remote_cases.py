"""Images to send to a server of rewards, and its answers."""

from __future__ import annotations

import numpy as np
from reward_cases import as_prompt

TOKEN = "s3cret-Token.of~46+characters/that/nobody-sees=="
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3), dtype=np.uint8)
PROMPTS = [as_prompt(index, "AB") for index in range(7)]
TWO = IMAGES[:2]
TWO_PROMPTS = PROMPTS[:2]
GOOD = {"scores": [0.25, 0.5]}


HEAD = b"HTTP/1.1 200 OK\r\n"
