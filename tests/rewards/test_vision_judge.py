"""The vision judge against a server that answers as OpenAI's and vLLM's do."""

from __future__ import annotations

import base64
import io
import json
import math
import threading

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from reward_cases import as_prompt
from served_cases import answering, hangs, says

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import http
from ebbflow.rewards.built_in.vision_judge import VisionJudge
from ebbflow.rewards.chat import build_base_url
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.text import NO_TARGET

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 24, 3), dtype=np.uint8)
ONE = IMAGES[:1]
TOKEN = "sk-nobody-should-ever-read-this-1234"


def judge(url, **keys):
    config = configure_reward("vision_judge", url=url, model="eyes-7b", **{"timeout": 5, **keys})
    return VisionJudge(config, sleep=lambda seconds: None)


def completion(text, log_probs=None, **choice):
    """What ``/chat/completions`` answers, with keys that nobody here reads; ``log_probs`` of the
    first token by its spelling.
    """
    top = (
        None
        if log_probs is None
        else [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in log_probs]
    )
    first = (
        None if top is None else {"content": [{"token": text, "logprob": 0.0, "top_logprobs": top}]}
    )
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": message, "logprobs": first, "finish_reason": "stop", **choice}
        ],
        "usage": {"prompt_tokens": 300, "completion_tokens": 1},
    }


def judged(said, **keys):
    """The one score, or why there is none."""
    with answering(says(said)) as server:
        result = judge(server.url, **keys)(ONE, [as_prompt(0, "A")])
    return result.failures.get(0, result.values[0])


def logs(**shares):
    return [(token, math.log(share)) for token, share in shares.items()]


@pytest.mark.parametrize(
    ("log_probs", "score"),
    [
        (logs(yes=0.6, no=0.2), 0.75),
        (logs(Yes=0.3, yes=0.1, YES=0.1, No=0.3, no=0.1, NO=0.1), 0.5),
        (
            [
                (" yes", math.log(0.5)),
                ("\nYes", math.log(0.25)),
                (" no ", math.log(0.25)),
                ("maybe", -9.0),
            ],
            0.75,
        ),
        (logs(Yes=0.9, The=0.05), 1.0),
        (logs(No=0.9, The=0.05), 0.0),
        ([("The", -0.1), ("Yes", -9998.0), ("No", -9999.0)], 1 / (1 + math.exp(-1))),
        (logs(yes=0.4, yesterday=0.5, nothing=0.09, no=0.01), 0.4 / 0.41),
        ([("Yes", 1e-7), ("No", -16.0)], 1 / (1 + math.exp(-16 - 1e-7))),
    ],
)
def test_probability_is_that_of_yes_among_yes_and_no_in_all_spellings(log_probs, score):
    assert judged(completion("Yes", log_probs)) == pytest.approx(score, rel=1e-12)


@pytest.mark.parametrize(
    "answer",
    [
        completion("It", logs(It=0.9, This=0.1)),
        completion("Yes", None),
        completion("Yes", []),
        completion("Yes", logprobs={"content": None}),
        completion("Yes", logprobs={"content": []}),
    ],
)
def test_neither_yes_nor_no_is_a_failure(answer):
    assert "neither yes nor no is among the log-probs" in judged(answer)


@pytest.mark.parametrize("log_prob", [0.5, 1e300, "-0.1", None])
def test_a_log_prob_that_is_none_is_a_failure(log_prob):
    assert "no Completion" in judged(completion("Yes", [("Yes", log_prob), ("No", -1.0)]))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("yes", 1),
        ("Yes.", 1),
        (' "YES!"\n', 1),
        ("**No**", 0),
        ("no", 0),
        ("- No, ", 0),
        ("\tno\u3002", 0),
    ],
)
def test_yes_or_no_in_one_word(text, score):
    assert judged(completion(text), answer="yes_no") == score


@pytest.mark.parametrize(
    "text",
    ["", "yes and no", "Yes, it does", "not", "nope", "I think yes", "yesno", "maybe", "1", None],
)
def test_every_other_answer_than_yes_or_no_is_a_failure(text):
    assert "the whole answer must be yes or no" in judged(completion(text), answer="yes_no")


@pytest.mark.parametrize(
    ("text", "score"), [("7", 0.7), (" 7.5\n", 0.75), ("0", 0), ("10", 1), ("10.0", 1), ("+3", 0.3)]
)
def test_a_number_on_the_scale(text, score):
    assert judged(completion(text), answer="number") == pytest.approx(score)
    assert judged(completion(text), answer="number", scale=20) == pytest.approx(score / 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "11",
        "-1",
        "8/10",
        "7 out of 10",
        "7.",
        "nan",
        "inf",
        "1e1",
        "ten",
        "7 8",
        "٧",
        "0x7",
        None,
    ],
)
def test_every_other_answer_than_a_number_on_the_scale_is_a_failure(text):
    assert "one number from 0 to scale" in judged(completion(text), answer="number")


@pytest.mark.parametrize("answer", ["yes_no", "number"])
def test_an_answer_that_was_cut_off_is_a_failure(answer):
    text = {"yes_no": "Yes", "number": "1"}[answer]
    assert isinstance(judged(completion(text, finish_reason="length"), answer=answer), str)
    assert judged(completion(text, finish_reason=None), answer=answer) > 0


@pytest.mark.parametrize(
    "answer",
    ["<html>", {"choices": []}, {"error": {"message": "no such model"}}, [], {"choices": [{}]}],
)
def test_what_is_no_completion_is_a_failure_that_shows_it(answer):
    reason = judged(answer)
    assert "no Completion" in reason
    assert (answer if isinstance(answer, str) else json.dumps(answer)) in reason


def test_the_request_holds_one_image_and_its_question():
    prompts = [
        Prompt(0, "a sign", "", "STOP", "", "", "{}"),
        Prompt(1, "a shop", "", "OPEN", "", "", "{}"),
    ]
    with answering(says(completion("Yes", logs(Yes=1.0)))) as server:
        judge(server.url, question="Does it say {target}, as in {prompt}?", concurrency=1)(
            IMAGES[:2], prompts
        )
    assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}
    questions = ["Does it say STOP, as in a sign?", "Does it say OPEN, as in a shop?"]
    for asked, image, question in zip(server.asked, IMAGES[:2], questions, strict=True):
        sent = asked.json
        picture, text = sent.pop("messages")[0]["content"]
        assert sent == {
            "model": "eyes-7b",
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 20,
        }
        assert text == {"type": "text", "text": question}
        kind, _, data = picture["image_url"]["url"].partition(",")
        assert (picture["type"], kind) == ("image_url", "data:image/png;base64")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), image)


@pytest.mark.parametrize(("answer", "text"), [("yes_no", "yes"), ("number", "3")])
def test_log_probs_are_asked_for_where_they_are_used(answer, text):
    with answering(says(completion(text))) as server:
        judge(server.url, answer=answer)(ONE, [as_prompt(0, "A")])
    sent = server.asked[0].json
    assert not {"logprobs", "top_logprobs"} & sent.keys()
    assert 2 < sent["max_tokens"] <= 16


@pytest.mark.parametrize(
    "prompt", ["{prompt} {target} {0} {", "}{prompt.__class__}", "100 % \\1 \\g<0> {{x}}"]
)
def test_braces_in_a_prompt_are_text(prompt):
    with answering(says(completion("Yes", logs(Yes=1.0)))) as server:
        judge(server.url, question="Is [{prompt}] in it, and [{target}]?")(
            ONE, [Prompt(0, prompt, "", prompt, "", "", "{}")]
        )
    assert (
        server.asked[0].json["messages"][0]["content"][1]["text"]
        == f"Is [{prompt}] in it, and [{prompt}]?"
    )


@pytest.mark.parametrize(
    "question",
    [
        "{prompt.__class__}",
        "{prompt!r}",
        "{prompt:>9}",
        "{}",
        "{0}",
        "{metadata}",
        "{{prompt}}",
        "a {",
        "}",
    ],
)
def test_a_question_with_other_braces_is_refused_when_the_recipe_is_read(question):
    with pytest.raises(ValidationError, match="all that may stand in braces"):
        configure_reward("vision_judge", url="http://localhost", model="m", question=question)


def test_a_prompt_without_a_target_is_a_failure_where_the_question_names_it():
    prompts = [as_prompt(0, None), as_prompt(1, "A")]
    with answering(says(completion("Yes", logs(Yes=1.0)))) as server:
        reads = judge(server.url, question="Does it say {target}?")
        looks = judge(server.url)
        assert reads.config.reads
        assert not looks.config.reads
        result = reads(IMAGES[:2], prompts)
        assert result.failures == {0: NO_TARGET}
        assert np.array_equal(result.values, [np.nan, 1], equal_nan=True)
        assert len(server.asked) == 1
        assert not looks(IMAGES[:2], prompts).failures


def test_scores_are_in_the_order_of_the_images_whichever_answer_comes_first():
    # Whoever is asked before the last image waits until that one is answered.
    last = threading.Event()

    def behave(handler):
        number = handler.asked.json["messages"][0]["content"][1]["text"]
        if number == "5":
            says(completion("5"))(handler)
            last.set()
        else:
            assert last.wait(10)
            says(completion(number))(handler)

    prompts = [Prompt(index, str(index), "", None, "", "", "{}") for index in range(6)]
    with answering(behave) as server:
        result = judge(server.url, question="{prompt}", answer="number", concurrency=6)(
            IMAGES, prompts
        )
    assert result.values * 10 == pytest.approx(range(6))
    assert not result.failures


def test_a_failure_is_that_of_its_image_alone_and_what_passes_is_asked_again():
    bad = completion("Yes, but")
    good = completion("Yes")
    with answering(
        says(good), says("busy", 503), says(good), says(bad), says("no", 400), says(good)
    ) as server:
        result = judge(server.url, answer="yes_no", concurrency=1)(
            IMAGES[:5], [as_prompt(index, "A") for index in range(5)]
        )
    assert np.array_equal(result.values, [1, 1, np.nan, np.nan, 1], equal_nan=True)
    assert set(result.failures) == {2, 3}
    assert len(server.asked) == 6


def test_no_images_are_no_request():
    with answering(hangs) as server:
        assert judge(server.url)(IMAGES[:0], []).values.shape == (0,)
    assert server.asked == []


def test_hosts_and_tokens_are_those_of_every_served_reward(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    outside = judge("https://api.example.org/v1", token_variable="JUDGE_TOKEN")
    assert http.HOSTS in outside.explain_unavailable()
    assert http.HOSTS in outside(ONE, [as_prompt(0, "A")]).failures[0]
    with answering(says({"error": f"Incorrect API key provided: {TOKEN}"}, 401)) as server:
        inside = judge(server.url, token_variable="JUDGE_TOKEN")
        reasons = [inside(ONE, [as_prompt(0, "A")]).failures[0], inside.explain_unavailable()]
    assert {asked.headers["Authorization"] for asked in server.asked} == {f"Bearer {TOKEN}"}
    assert all(
        "check the token in JUDGE_TOKEN" in reason and TOKEN not in reason for reason in reasons
    )
    with answering(says(completion(f"I know {TOKEN}"))) as server:
        assert (
            TOKEN
            not in judge(server.url, answer="yes_no", token_variable="JUDGE_TOKEN")(
                ONE, [as_prompt(0, "A")]
            ).failures[0]
        )


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://example.org/v1beta/openai", "https://example.org/v1beta/openai"),
    ],
)
def test_the_url_is_that_of_the_host_or_of_the_api(url, base):
    assert build_base_url(judge(url).config.url) == base


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says({"object": "list", "data": [{"id": "eyes-7b", "object": "model"}]}), None),
        (
            says({"data": [{"id": "ears-7b"}, {"id": "nose-1b"}]}),
            "no model 'eyes-7b'; it has ears-7b, nose-1b",
        ),
        (says({"data": []}), "it has none"),
        (says("<html>"), "no Models"),
        (says("gone", 404), "answered 404"),
    ],
)
def test_unavailable_asks_for_the_model(answer, reason):
    with answering(answer) as server:
        found = judge(server.url).explain_unavailable()
    assert server.asked[0].path == "/v1/models"
    assert found is None if reason is None else reason in found


def test_is_what_a_recipe_names():
    config = configure_reward(
        "vision_judge", url="http://localhost:8000", model="m", label="poster"
    )
    assert load_reward(config).name == "poster"
