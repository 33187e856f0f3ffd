"""Raters that are programs: they prefer the picture that a reward scores higher, and err at a
stated rate.

For tests and trials of what people would otherwise take days to answer. What they prefer is known,
so that a reward model that learns from them can be compared with the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ebbflow.data.images import decode_pngs
from ebbflow.data.prompt_files import find_quoted_text
from ebbflow.data.prompts import Prompt
from ebbflow.labeling.session import Session
from ebbflow.labeling.sources import LabelError, LabelPair
from ebbflow.rewards.base import Reward
from ebbflow.seeding import derive_seed

Answered = Literal["left", "right", "tie"]
BATCH = 256
"""Pictures scored at a time."""


def answer_as_stand_in(session: Session, reward: Reward, raters: int, error_rate: float) -> int:
    """Answer all pairs that are open, as raters ``stand-in 1``, ``stand-in 2`` ...; return the
    number of answers.

    A rater prefers the picture with the higher score, and the other one in a share ``error_rate``
    of the pairs; equal scores are a tie. Answers depend on the session's seed, the rater and the
    pair alone, so that a stopped call goes on where it was.

    Raises:
        LabelError: a picture could not be scored.
    """
    pairs = [*session.pairs.values()]
    # Before the first answer: a reward that fails must leave no half of a session.
    scores = _score_pairs(pairs, reward)
    answers = 0
    for number in range(1, raters + 1):
        rater = f"stand-in {number}"
        for pair in session.list_upcoming_pairs(rater):
            first, second = scores[pair.key]
            preferred = int(second > first)
            # By rater and pair, so that two stand-ins err on different pairs.
            chance = derive_seed(session.settings.seed, "error", rater, pair.key) / 2**63
            if chance < error_rate:
                preferred = 1 - preferred
            left = session.picture_on_left(rater, pair.key)
            side: Answered = "left" if preferred == left else "right"
            session.record_answer(rater, pair.key, "tie" if first == second else side)
            answers += 1
    return answers


def _score_pairs(pairs: Sequence[LabelPair], reward: Reward) -> dict[str, tuple[float, float]]:
    scores: list[float] = []
    prompts = [
        Prompt(index, pair.prompt, "", find_quoted_text(pair.prompt), "labels", "train", "{}")
        for index, pair in enumerate(pairs)
        for _ in pair.pictures
    ]
    pictures = [picture.png for pair in pairs for picture in pair.pictures]
    for start in range(0, len(pictures), BATCH):
        part = slice(start, start + BATCH)
        result = reward(decode_pngs(pictures[part]), prompts[part])
        if result.failures:
            index, reason = next(iter(result.failures.items()))
            raise LabelError(
                f"the stand-in's reward {reward.name!r} has no score for"
                f" {prompts[start + index].prompt}: {reason}"
            )
        scores += np.asarray(result.values, np.float64).tolist()
    return {
        pair.key: (scores[2 * index], scores[2 * index + 1]) for index, pair in enumerate(pairs)
    }
