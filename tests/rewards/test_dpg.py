"""DPG-Bench's score in closed form, and the questions that a server is asked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from served_cases import Behaviour, answering, says

from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.built_in.dpg import NO_QUESTIONS, Question, compute_dpg_score, read_questions
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.http import NoAnswer

CSV = """item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,\
question_natural_language
p1,"A cat on a red mat",,1,0,entity,whole,entity - whole (cat),Is there a cat?
p1,"A cat on a red mat",,2,0,entity,whole,entity - whole (mat),Is there a mat?
p1,"A cat on a red mat",,3,2,attribute,color,"attribute - color (mat, red)",Is the mat red?
p1,"A cat on a red mat",,4,"1, 2",relation,spatial,\
"relation - spatial (cat, mat, on)",Is the cat on the mat?
"""
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> Prompt:
    path = tmp_path_factory.mktemp("dpg") / "dpg_bench.csv"
    path.write_text(CSV)
    (row,), _ = read_prompt_file(path)
    return of(json.loads(row.metadata))


def of(metadata: dict) -> Prompt:
    return Prompt(0, "A cat on a red mat", "", None, "test", "held_out", json.dumps(metadata))


def answer(text: str, finish: str = "stop") -> Behaviour:
    return says({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


def judged(prompts, *behaviours: Behaviour):
    with answering(*behaviours) as server:
        made = load_reward(
            configure_reward(
                "dpg", url=server.url, model="judge", timeout=5, concurrency=1, attempts=1
            )
        )
        return made(IMAGES[: len(prompts)], prompts), [asked.json for asked in server.asked]


def test_questions_come_from_the_published_columns(prompt):
    assert read_questions(prompt.metadata) == [
        Question(1, (), "Is there a cat?"),
        Question(2, (), "Is there a mat?"),
        Question(3, (2,), "Is the mat red?"),
        Question(4, (1, 2), "Is the cat on the mat?"),
    ]


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ((1, 1, 1, 1), 1),
        ((1, 1, 0, 1), 0.75),
        ((1, 0, 1, 1), 0.25),
        ((0, 1, 1, 1), 0.5),
        ((0, 0, 1, 1), 0),
        ((0, 0, 0, 0), 0),
    ],
)
def test_a_question_counts_only_if_those_that_it_depends_on_do(prompt, answers, score):
    assert (
        compute_dpg_score(read_questions(prompt.metadata), dict(enumerate(answers, start=1)))
        == score
    )


def test_a_no_goes_on_to_what_depends_on_what_depends_on_it():
    chain = [Question(1, (), "a"), Question(2, (1,), "b"), Question(3, (2,), "c")]
    assert compute_dpg_score(chain, {1: 0.0, 2: 1.0, 3: 1.0}) == 0


def test_every_question_is_asked_about_the_image(prompt):
    result, requests = judged([prompt], answer("Yes."), answer("yes"), answer("No"), answer("YES"))
    assert result.values.tolist() == [0.75]
    texts = [request["messages"][0]["content"][-1]["text"] for request in requests]
    assert texts[0] == 'Is there a cat? Answer "yes" or "no".'
    assert [text.partition("?")[0] for text in texts[1:]] == [
        "Is there a mat",
        "Is the mat red",
        "Is the cat on the mat",
    ]
    assert all(len(request["messages"][0]["content"]) == 2 for request in requests)


def test_another_answer_is_a_failure_and_never_a_no(prompt):
    result, _ = judged([prompt, prompt], answer("Maybe"), answer("yes"))
    assert np.isnan(result.values).tolist() == [True, False]
    assert "the whole answer must be yes or no" in result.failures[0]


ROW = {"proposition_id": "1", "dependency": "0", "question_natural_language": "Is there a cat?"}


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, NO_QUESTIONS),
        ({"questions": []}, NO_QUESTIONS),
        ({"questions": "Is there a cat?"}, NO_QUESTIONS),
        ({"questions": [{"proposition_id": "1"}]}, NO_QUESTIONS),
        ({"questions": [ROW | {"dependency": "x"}]}, NO_QUESTIONS),
        ({"questions": [ROW | {"dependency": "2"}]}, "depends on question 2, which is not there"),
        ({"questions": [ROW, ROW]}, "the same proposition_id"),
    ],
)
def test_a_prompt_without_usable_questions_fails(metadata, why):
    with pytest.raises(NoAnswer, match=why):
        read_questions(json.dumps(metadata))
