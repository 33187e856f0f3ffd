"""Published questions to vision-language models, and how their answers become scores."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from reward_cases import as_prompt
from served_cases import Behaviour, answering, says

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.built_in.edit_judge import NO_SOURCE
from ebbflow.rewards.built_in.pairwise_judge import parse_score_shares, parse_verdict
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.groups import score_groups
from ebbflow.rewards.templates import FOLDER, fill_template, read_template

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
SOURCE = np.full((20, 30, 3), 7, np.uint8)
ACS = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"


def answer(text: str, finish: str = "stop") -> Behaviour:
    return says({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


def judged(name: str, prompts, *behaviours: Behaviour, **keys):
    """Result of as many images as prompts, and what the server was asked."""
    with answering(*behaviours) as server:
        made = load_reward(
            configure_reward(
                name, url=server.url, model="judge", timeout=5, concurrency=1, attempts=1, **keys
            )
        )
        return made(IMAGES[: len(prompts)], prompts), [asked.json for asked in server.asked]


def question(request) -> str:
    return request["messages"][0]["content"][-1]["text"]


def pictures(request) -> list[np.ndarray]:
    urls = [part["image_url"]["url"] for part in request["messages"][0]["content"][:-1]]
    return [
        np.asarray(
            Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        )
        for url in urls
    ]


def edit(
    instruction: str = "make it {red}", image: bytes | None = encode_pngs(SOURCE[None])[0]
) -> Prompt:
    return Prompt(0, instruction, "", None, "test", "train", "{}", image)


# --- UnifiedReward


def test_unified_reward_2_is_the_mean_of_three_scores():
    said = ACS.format(
        "2.694700002670288", "2.371500015258789", "2.802500009536743"
    )  # its published example
    result, (request,) = judged("unified_reward", [as_prompt(0, "A")], answer(said), label="ur")
    assert result.values[0] == pytest.approx((2.6947 + 2.3715 + 2.8025) / 3, abs=1e-6)
    assert {name: round(column[0], 4) for name, column in result.metrics.items()} == {
        "ur_alignment": 2.6947,
        "ur_coherence": 2.3715,
        "ur_style": 2.8025,
    }
    assert question(request).endswith('Text Caption: ["A"]')
    assert (request["temperature"], request["max_tokens"], len(pictures(request))) == (0, 4096, 1)


def test_unified_reward_is_its_final_score():
    result, (request,) = judged(
        "unified_reward",
        [as_prompt(0, "A")],
        answer("cat (animal): 1\nFinal Score: **3.5**"),
        template="unified_reward",
    )
    assert (result.values[0], dict(result.metrics)) == (3.5, {})
    assert "after 'Final Score:'" in question(request)


@pytest.mark.parametrize(
    "said",
    [
        answer(ACS.format(1, 2, 5.1)),
        answer(ACS.format(1, 0.9, 5)),
        answer("Alignment Score (1-5): 3\nStyle Score (1-5): 3"),
        answer(ACS.format(1, 2, 3) + "\n" + ACS.format(1, 2, 3)),
        answer(ACS.format(1, 2, 3), finish="length"),
        answer(ACS.format("X", "Y", "Z")),
        answer(ACS.format("1e3", 2, 3)),
    ],
)
def test_another_answer_of_unified_reward_is_a_failure(said):
    result, _ = judged("unified_reward", [as_prompt(0, "A")], said)
    assert np.isnan(result.values[0])
    assert np.isnan(result.metrics["unified_reward_style"][0])
    assert (
        "it must have one number from 1 to 5 after Alignment Score (1-5): and Coherence"
        in result.failures[0]
    )


# --- pairs


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("Image 1 is sharp, but Image 2 is better.", 0.0),
        ("Image 1 is better than expected; still, Image 2 is better!", 0.0),
        ("**Image 1 is better**", 1.0),
        ("Image 1 is better than expected.", None),
        ("First I thought Image 2 is better. Image 1 is better.", 1.0),
        ("Both images are equally good.", 0.5),
        ("Image 3 is better", None),
    ],
)
def test_a_verdict_is_the_last_one(said, share):
    assert parse_verdict(said) == share


def scores(*firsts: float, total: float = 1.0) -> str:
    names = ("Alignment", "Coherence", "Style")
    return "\n\n".join(
        f"{name} Score:\n Image 1: {x}\n Image 2: {total - x}"
        for name, x in zip(names, firsts, strict=False)
    )


def test_score_shares_of_a_judge_are_averaged():
    assert parse_score_shares(scores(0.4357, 0.418, 0.4079)) == pytest.approx(
        (0.4357 + 0.418 + 0.4079) / 3
    )
    assert parse_score_shares(scores(0.4, 0.4)) is None
    assert parse_score_shares(scores(0.4, 0.4, 0.4, total=1.2)) is None
    assert parse_score_shares(scores(0.4, 0.4, 1.4)) is None


def test_pairs_are_asked_about_with_the_published_question():
    with answering(answer(scores(0.8, 0.7, 0.6))) as server:
        config = configure_reward(
            "pairwise_judge",
            url=server.url,
            model="judge",
            template="unified_reward_2",
            attempts=1,
            concurrency=1,
        )
        result = score_groups(load_reward(config), IMAGES[:2], [as_prompt(0, "A")] * 2)
    assert result.values.tolist() == pytest.approx([0.7, 0.3])
    (asked,) = server.asked
    assert question(asked.json) == fill_template("unified_reward_2_pair", '"A"')


@pytest.mark.parametrize("keys", [{"question": "Which?"}, {"answer": "choice"}])
def test_a_template_has_its_own_question(keys):
    with pytest.raises(ValidationError, match="has its own question and answer; leave"):
        configure_reward(
            "pairwise_judge",
            url="http://127.0.0.1:1",
            model="judge",
            template="unified_reward",
            **keys,
        )


# --- edits


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (
            "viescore",
            '{"score" : [8, 6], "reasoning" : "."}',
            '```json\n{\n"score": [9, 4.5]}\n```',
        ),
        ("editscore", '{"reasoning" : ".", "score" : [20, 15]}', '{"score" : [22.5, 11.25]}'),
        (
            "unified_reward_edit",
            '{\n\n"reasoning" : "?",\n"score" : [20, 15],\n}',
            '{"score" : [22.5, 11.25],}',
        ),
    ],
)
def test_an_edit_is_the_geometric_mean_of_the_lesser_scores(template, first, second):
    result, requests = judged(
        "edit_judge", [edit()], answer(first), answer(second), template=template
    )
    assert result.values[0] == pytest.approx(math.sqrt(6 * 4.5))
    assert {name: column[0] for name, column in result.metrics.items()} == {
        "edit_judge_prompt_following": 8,
        "edit_judge_consistency": 6,
        "edit_judge_quality": 4.5,
    }
    source, edited = pictures(requests[0])
    assert np.array_equal(source, SOURCE)
    assert np.array_equal(edited, IMAGES[0])
    (alone,) = pictures(requests[1])
    assert np.array_equal(alone, IMAGES[0])
    assert "make it {red}" in question(requests[0])
    assert "make it" not in question(requests[1])


def test_an_edit_without_its_source_fails_alone():
    said = answer('{"score": [5, 5]}')
    result, requests = judged("edit_judge", [edit(image=None), edit()], said)
    assert np.array_equal(result.values, [np.nan, 5], equal_nan=True)
    assert (result.failures, len(requests)) == ({0: NO_SOURCE}, 2)


@pytest.mark.parametrize(
    "said", ['"score": [11, 5]', '"score": [5]', "8 and 6", '"score": [5, 5] or "score": [6, 6]']
)
def test_another_answer_about_an_edit_is_a_failure(said):
    result, _ = judged("edit_judge", [edit()], answer(said))
    assert 'it must have one "score": [a, b] with numbers from 0 to 10' in result.failures[0]


# --- templates


PUBLISHED = {
    "editscore_consistency": "80bac216c8f7b47e",
    "editscore_quality": "8249deba103d112d",
    "hpsv3": "e61d58f3c7d3be65",
    "unified_reward_2_pair": "828e9ab2f81c3b6d",
    "unified_reward_2_point": "75d52d3ae771f89b",
    "unified_reward_edit_consistency": "b9c27cd063664e5f",
    "unified_reward_edit_quality": "ddb40baa511dbf2f",
    "unified_reward_pair": "0fd2f5c43a065165",
    "unified_reward_point": "f56f919ce3bc6aab",
    "videoalign": "fd7862ecb43bbe39",
    "viescore_consistency": "a2c59043a584fe35",
    "viescore_quality": "2473ff2c7406e065",
}
"""The first 16 digits of each text's sha256, as it was compared with the repository that NOTICE
names.
"""


def test_templates_are_as_published_and_named_in_the_notice():
    assert {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in FOLDER.iterdir()
    } == PUBLISHED
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in notice] == []


def test_every_template_has_the_place_of_the_prompt_unless_it_asks_about_quality_alone():
    names = sorted(path.stem for path in FOLDER.iterdir())
    assert len(names) >= 11
    assert [name for name in names if read_template(name).count("{prompt}") != 1] == [
        "editscore_quality",
        "unified_reward_edit_quality",
        "viescore_quality",
    ]
    assert fill_template("unified_reward_point", "{x}").endswith("Text Caption: [{x}]")
    assert "From scale 0 to 25: " in read_template("editscore_consistency")
    assert "10" not in read_template("editscore_quality")
