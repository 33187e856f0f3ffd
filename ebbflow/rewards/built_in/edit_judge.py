"""``edit_judge``: a vision-language model behind an OpenAI-compatible server compares an edited
image with its source.

    score = sqrt(min(prompt following, consistency) min(naturalness, freedom from artefacts))
    (VIEScore, 2312.14867)

The first two are asked about source and edited image with the instruction, the other two about the
edited image alone. This is the metric of GEdit-Bench (2504.17761); EditScore (2509.23909) and
UnifiedReward-Edit are trained to answer it on a scale of 25.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.rewards.chat import ChatServerConfig, ImageChatReward, ask_about_images, parse_answer
from ebbflow.rewards.http import NoAnswer
from ebbflow.rewards.templates import fill_template

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward

MAX_TOKENS = 1024
SCALES = {"viescore": 10, "editscore": 25, "unified_reward_edit": 25}
SCORE = re.compile(r"\"score\"\s*:\s*\[\s*([0-9]+(?:\.[0-9]+)?)\s*,\s*([0-9]+(?:\.[0-9]+)?)\s*\]")
NO_SOURCE = "the prompt has no image to edit; give a column 'image', or use vision_judge"
METRICS = ("prompt_following", "consistency", "quality")


class EditJudgeConfig(ChatServerConfig):
    """How well an instruction was carried out on the source image, 0 to 10 (VIEScore, 2312.14867),
    by a model behind a server.
    """

    known_lowest: ClassVar[float | None] = 0.0
    name: Literal["edit_judge"] = "edit_judge"
    template: Literal["viescore", "editscore", "unified_reward_edit"] = "viescore"
    """Published question and form of the answer. ``viescore``: those of GEdit-Bench, for any model.
    ``editscore`` and ``unified_reward_edit``: those that the models of these names are trained on.
    """

    def explain_unscorable(self, prompt: Prompt) -> str | None:
        return NO_SOURCE if prompt.image is None else super().explain_unscorable(prompt)

    def build(self) -> Reward:
        return EditJudge(self)


class EditJudge(ImageChatReward):
    """The geometric mean of consistency and quality, each the lesser of two scores; NaN with a
    reason for another answer.
    """

    config: EditJudgeConfig

    def list_metric_names(self) -> Sequence[str]:
        return METRICS

    def judge_image(self, image: np.ndarray, prompt: Prompt) -> list[float]:
        if prompt.image is None:
            raise NoAnswer(NO_SOURCE)
        following, consistency = self._ask_for_scores(
            "consistency", [decode_source_image(prompt.image), image], prompt
        )
        # The quality is that of the edited image by itself: a flaw of the source counts, too.
        quality = min(self._ask_for_scores("quality", [image], prompt))
        return [math.sqrt(min(following, consistency) * quality), following, consistency, quality]

    def _ask_for_scores(
        self, part: str, images: list[np.ndarray], prompt: Prompt
    ) -> tuple[float, float]:
        scale = SCALES[self.config.template]
        question = fill_template(f"{self.config.template}_{part}", prompt.prompt)
        choice = ask_about_images(self.config, images, question, MAX_TOKENS, sleep=self.sleep)
        wanted = f'it must have one "score": [a, b] with numbers from 0 to {scale}'
        first, second = parse_answer(
            self.config, choice, partial(parse_score_pair, scale=scale), wanted
        )
        # On one scale for all templates, that of VIEScore, so that scores of two models compare.
        return 10 * first / scale, 10 * second / scale


def parse_score_pair(text: str, scale: float) -> tuple[float, float] | None:
    """Return the two numbers of the one list of scores in an answer; None where there is no such
    list, or one is beyond the scale.

    Example:
        '{"reasoning": "...", "score": [7, 9]}' gives (7.0, 9.0).
    """
    matches = SCORE.findall(text)
    # Two lists are two answers, and nothing says which one counts.
    if len(matches) != 1:
        return None
    first, second = map(float, matches[0])
    return None if max(first, second) > scale else (first, second)


def decode_source_image(png: bytes) -> np.ndarray:
    """Decode the image to edit, of several the first, to uint8 RGB [height, width, 3]."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
