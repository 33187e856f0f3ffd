"""Rubrics that a language model writes: one question list for each prompt, stored beside it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptRow
from ebbflow.progress import show_progress
from ebbflow.rewards.built_in.rubric import COLUMN, RubricConfig
from ebbflow.rewards.chat import ask_about_images, parse_answer
from ebbflow.rewards.http import NoAnswer

REQUEST = (
    "Write {count} questions that check whether an image shows what this prompt asks for, each"
    " about one thing, so that yes is right for a perfect image. Prompt: {prompt}\nAnswer with a"
    ' JSON list of the questions alone, such as ["Is there a cat?", "Is the mat red?"].'
)
MAX_TOKENS = 1024
FENCE = re.compile(r"\s*(?:```(?:json)?)?\s*(\[.*\])\s*(?:```)?\s*", re.DOTALL)
"""A JSON list, which models often put between fences."""
logger = logging.getLogger(__name__)


def write_rubrics(source: Path, target: Path, config: RubricConfig, count: int) -> tuple[int, int]:
    """Write a prompt file whose prompts have rubrics, a JSON object per line; return how many
    prompts got one, and how many did not.

    Prompts that ``target`` has already are not asked about again, so that a stopped call goes on.

    Raises:
        PromptError: ``source`` is no prompt file.
    """
    rows, _ = read_prompt_file(source)
    written = _read_written_prompts(target)
    # A request may cost money: nothing is asked twice.
    missing = [row for row in rows if row.prompt not in written]
    failed = 0

    def ask_or_explain(row: PromptRow) -> list[str] | str:
        try:
            return ask_for_rubric(config, row.prompt, count)
        except NoAnswer as error:
            return str(error)

    with target.open("a", encoding="utf-8") as file, ThreadPoolExecutor(config.concurrency) as pool:
        answers = pool.map(ask_or_explain, missing)
        pairs = zip(missing, answers, strict=True)
        for row, questions in show_progress("writing rubrics", "prompt", pairs, len(missing)):
            if isinstance(questions, str):
                failed += 1
                logger.warning("no rubric for %r: %s", row.prompt, questions)
                continue
            record = json.loads(row.metadata) | {"prompt": row.prompt, COLUMN: questions}
            if row.target is not None:
                record["target"] = row.target
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            # On the disk before the next one, as a killed process loses the rest.
            os.fsync(file.fileno())
    return len(missing) - failed, failed


def ask_for_rubric(config: RubricConfig, prompt: str, count: int) -> list[str]:
    """Ask a language model for the questions about one prompt.

    Raises:
        NoAnswer: it gave none that can be used.
    """
    question = REQUEST.replace("{count}", str(count)).replace("{prompt}", prompt)
    choice = ask_about_images(config, [], question, MAX_TOKENS)
    return parse_answer(config, choice, parse_questions, "the answer must be a JSON list of texts")


def parse_questions(text: str) -> list[str] | None:
    """Return the questions of an answer; None where it is no list of texts."""
    match = FENCE.fullmatch(text)
    if match is None:
        return None
    try:
        questions = json.loads(match[1])
    except (ValueError, RecursionError):
        return None
    if not questions or not all(isinstance(one, str) and one.strip() for one in questions):
        return None
    return [one.strip() for one in questions]


def _read_written_prompts(target: Path) -> set[str]:
    """Read the prompts that an earlier call has written; a torn last line is removed."""
    if not target.is_file():
        return set()
    content = target.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(target, len(whole))
    lines: Sequence[str] = whole.decode().splitlines()
    return {str(json.loads(line)["prompt"]) for line in lines}
