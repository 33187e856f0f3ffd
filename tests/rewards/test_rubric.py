"""Rubrics: weighted questions of each prompt, answered by a judge, and written by a language
model.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from served_cases import answering, says

from ebbflow.cli import main
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.built_in.rubric import (
    NO_RUBRIC,
    Criterion,
    compute_rubric_score,
    read_rubric,
)
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.http import NoAnswer
from ebbflow.rewards.rubric_files import parse_questions

IMAGE = np.random.default_rng(0).integers(0, 256, (1, 8, 12, 3), dtype=np.uint8)
RUBRIC = [{"question": "Is there a cat?", "weight": 2}, "Is there a mat?", "Is it red?"]


def as_prompt(rubric) -> Prompt:
    return Prompt(0, "A cat", "", None, "test", "held_out", json.dumps({"rubric": rubric}))


def answer(text: str):
    return says({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def judge(*texts: str, **keys):
    keys = {"model": "judge", "timeout": 5, "concurrency": 1, "attempts": 1} | keys
    with answering(*map(answer, texts)) as server:
        reward = load_reward(configure_reward("rubric", url=server.url, answer="yes_no", **keys))
        result = reward(IMAGE, [as_prompt(RUBRIC)])
        return result, [asked.json for asked in server.asked]


def test_the_score_is_the_weighted_share_of_yes():
    result, requests = judge("yes", "No", "yes.")
    assert result.values.tolist() == [0.75]
    assert result.metrics["rubric_unreadable"].tolist() == [0]
    texts = [request["messages"][0]["content"][-1]["text"] for request in requests]
    assert texts[0] == 'Is there a cat? Answer "yes" or "no".'
    assert len(texts) == 3


def test_unreadable_answers_are_left_out_and_counted():
    result, _ = judge("yes", "perhaps", "no")
    assert result.values == pytest.approx([2 / 3])
    assert result.metrics["rubric_unreadable"].tolist() == [0.25]
    result, _ = judge("perhaps", "well", "no")
    assert np.isnan(result.values[0])
    assert "75% of the rubric has no readable answer" in result.failures[0]
    assert "well" in result.failures[0]


def test_the_closed_form_of_scores_and_unreadable_shares():
    rubric = [Criterion("a", 2), Criterion("b"), Criterion("c")]
    assert compute_rubric_score(rubric, [(2, 1.0), (1, 0.0)]) == (pytest.approx(2 / 3), 0.25)
    assert compute_rubric_score(rubric, [(2, 0.5), (1, 1.0), (1, 1.0)]) == (0.75, 0)
    assert compute_rubric_score(rubric, [(1, 1.0)]) == (None, 0.75)
    assert compute_rubric_score(rubric, [(2, 1.0)]) == (1, 0.5)


def test_rubrics_are_texts_or_objects_and_may_come_from_csv():
    expected = [
        Criterion("Is there a cat?", 2),
        Criterion("Is there a mat?"),
        Criterion("Is it red?"),
    ]
    assert read_rubric(json.dumps({"rubric": RUBRIC})) == expected
    assert read_rubric(json.dumps({"rubric": json.dumps(RUBRIC)})) == expected


@pytest.mark.parametrize(
    "rubric",
    [None, [], "yes?", [3], [""], [{"question": "a", "weight": 0}], [{"weight": 1}], {"a": 1}],
)
def test_a_prompt_without_a_rubric_is_explained(rubric):
    with pytest.raises(NoAnswer, match="write-rubrics"):
        read_rubric(json.dumps({"rubric": rubric}))
    config = configure_reward("rubric", url="http://127.0.0.1:1", model="judge")
    assert config.explain_unscorable(as_prompt(rubric)) == NO_RUBRIC


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ('["Is it red?", " Is it a cat? "]', ["Is it red?", "Is it a cat?"]),
        ('```json\n["Is it red?"]\n```', ["Is it red?"]),
        ("Sure: [1]", None),
        ("[1]", None),
        ("[]", None),
        ("[broken", None),
    ],
)
def test_questions_are_read_from_lists_alone(text, questions):
    assert parse_questions(text) == questions


def test_the_command_writes_rubrics_and_goes_on_where_it_stopped(tmp_path):
    source = tmp_path / "prompts.txt"
    source.write_text('a cat\na sign "OPEN"\na dog\n')
    target = tmp_path / "rubrics.jsonl"
    behaviours = [answer('["Is there a cat?"]'), answer("no idea"), answer('["Is it a dog?"]')]
    with answering(*behaviours, answer('["Does it say OPEN?"]')) as server:
        arguments = ["write-rubrics", str(source), str(target), "--url", server.url]
        arguments += ["--model", "writer", "--concurrency", "1"]
        first = CliRunner().invoke(main, arguments)
        assert first.exit_code == 1
        assert "2 prompts" in first.output
        with target.open("a") as file:
            file.write('{"prompt": "torn')
        second = CliRunner().invoke(main, arguments)
        assert second.exit_code == 0, second.output
        assert len(server.asked) == 4
    rows, _ = read_prompt_file(target)
    rubrics = {row.prompt: read_rubric(row.metadata) for row in rows}
    assert rubrics['a sign "OPEN"'] == [Criterion("Does it say OPEN?")]
    assert {row.prompt: row.target for row in rows}['a sign "OPEN"'] == "OPEN"
    assert set(rubrics) == {"a cat", 'a sign "OPEN"', "a dog"}
