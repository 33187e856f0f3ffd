"""Find what went wrong in a turn: the prompts of the next one.

Held-out prompts never become training prompts: regressions and failures are looked for on the
validation prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.labels import Labels
from ebbflow.data.prompt_files import find_quoted_text
from ebbflow.reward_training.measure import compute_margins
from ebbflow.rewards.reward_networks import RewardNetwork
from ebbflow.storage.disk import write_text

BAD_CASES = "prompts.jsonl"


class BadCase(NamedTuple):
    """A prompt, why it is a bad case, and how bad it is: the larger, the worse within its kind."""

    prompt: str
    reason: str
    size: float


def find_disagreements(network: RewardNetwork, labels: Labels, count: int) -> list[BadCase]:
    """Find the prompts of the answers that the reward model contradicts most, by its margin; each
    prompt once.
    """
    # A tie says nothing that a margin could contradict.
    judgements = [one for one in labels.judgements if one.preference != 0.5]
    margins = compute_margins(network, labels, judgements)
    against: dict[str, float] = {}
    for judgement, margin in zip(judgements, margins, strict=True):
        size = -float(margin) * (1 if judgement.preference > 0.5 else -1)
        prompt = labels.prompts[judgement.first]
        # The worst answer of a prompt stands for it: the next turn takes prompts, not answers.
        against[prompt] = max(size, against.get(prompt, size))
    return _take_worst(against, "the reward model contradicts an answer", count)


def find_regressions(candidate: pa.Table, before: pa.Table, count: int) -> list[BadCase]:
    """Find the validation prompts whose reward fell most between two evaluations."""
    rewards = [_average_validation_rewards(table) for table in (before, candidate)]
    falls = {
        prompt: rewards[0][prompt] - rewards[1][prompt]
        for prompt in rewards[0].keys() & rewards[1].keys()
    }
    return _take_worst(falls, "the reward fell", count)


def find_rejected_prompts(candidate: pa.Table, count: int) -> list[BadCase]:
    """Find the validation prompts with a picture that could not be scored."""
    validation = candidate.filter(pc.equal(candidate["split"], "validation"))
    # A failed picture has a reason in this column, and no reward.
    rejected = validation.filter(pc.is_valid(validation["failure"]))
    return _take_worst(
        dict.fromkeys(rejected["prompt"].to_pylist(), 1.0), "a picture was not scored", count
    )


def _average_validation_rewards(table: pa.Table) -> dict[str, float]:
    validation = table.filter(pc.equal(table["split"], "validation"))
    values: dict[str, list[float]] = {}
    for prompt, reward in zip(
        validation["prompt"].to_pylist(), validation["reward"].to_pylist(), strict=True
    ):
        if reward is not None:
            values.setdefault(prompt, []).append(reward)
    return {prompt: float(np.mean(rewards)) for prompt, rewards in values.items()}


def _take_worst(sizes: dict[str, float], reason: str, count: int) -> list[BadCase]:
    # By text among equals: the order of sets differs between processes.
    worst = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [BadCase(prompt, reason, size) for prompt, size in worst if size > 0]


def write_bad_cases(path: Path, cases: Sequence[BadCase]) -> None:
    """Write bad cases as a prompt file, each prompt once, with its first reason."""
    # A prompt may be bad for two reasons; the first one, which is a person's, is kept.
    lines: dict[str, dict[str, object]] = {}
    for case in cases:
        record = {"prompt": case.prompt, "reason": case.reason, "size": round(case.size, 6)}
        target = find_quoted_text(case.prompt)
        lines.setdefault(case.prompt, record | ({"target": target} if target else {}))
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines.values()))
