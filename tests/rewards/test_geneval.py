"""The published protocol in closed form, and the detector and CLIP in front of it as tiny random
networks.
"""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from network_cases import make_reward, some_images, write_detector
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from ebbflow.data.prompts import Prompt
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.rewards.built_in import geneval
from ebbflow.rewards.built_in.geneval import (
    ColorNamer,
    InputSize,
    extract_detections,
    find_input_size,
    prepare_images,
)
from ebbflow.rewards.combine import RewardError, load_reward, load_scorer
from ebbflow.rewards.geneval_rules import (
    CLASSES,
    COLORS,
    Detection,
    find_relations,
    group_by_class,
    judge_objects,
    read_rules,
)

SQUARE = (40, 40, 60, 60)
LEFT = (0, 40, 20, 60)
RIGHT = (80, 40, 100, 60)
ABOVE = (40, 0, 60, 20)
BELOW = (40, 80, 60, 100)


def thing(
    name: str, color: str = "", box=SQUARE, confidence: float = 0.95
) -> tuple[Detection, str]:
    return Detection(name, confidence, box), color


def judged(
    metadata: dict, *things: tuple[Detection, str], threshold: float = 0.3
) -> tuple[float, float, float]:
    """(correct, strict, soft)"""
    colors = {id(one): color for one, color in things}
    objects = group_by_class([one for one, _ in things], threshold)
    found = judge_objects(objects, read_rules(json.dumps(metadata)), lambda one: colors[id(one)])
    return found.correct, found.strict, found.soft


def include(*rules: dict, **keys: object) -> dict:
    return {"include": [{"count": 1} | rule for rule in rules]} | keys


DOG = {"class": "dog"}
CAT = {"class": "cat"}


def test_a_single_object_is_there_or_not():
    assert judged(include(DOG), thing("dog")) == (1, 1, 1)
    assert judged(include(DOG), thing("cat")) == (0, 0, 0)
    # One more is as good for GenEval, and costs with Flow-GRPO.
    assert judged(include(DOG), thing("dog"), thing("dog")) == (1, 0, 0)
    assert judged(include(DOG), *[thing("dog")] * 4) == (1, 0, -2)


def test_two_objects_are_both_there():
    both = include(DOG, CAT)
    assert judged(both, thing("dog"), thing("cat")) == (1, 1, 1)
    assert judged(both, thing("dog")) == (0, 0, 0.5)
    assert judged(both) == (0, 0, 0)


def test_a_count_is_met_and_not_exceeded():
    three = include(
        {"class": "dog", "count": 3}, tag="counting", exclude=[{"class": "dog", "count": 4}]
    )
    dogs = [thing("dog") for _ in range(5)]
    assert judged(three, *dogs[:3]) == (1, 1, 1)
    assert judged(three, *dogs[:2]) == pytest.approx((0, 0, 2 / 3))
    assert judged(three, *dogs[:4]) == pytest.approx((0, 0, 2 / 3))
    assert judged(three, *dogs[:5]) == pytest.approx((0, 0, 1 / 3))


def test_what_is_excluded_may_be_of_another_class():
    alone = include(DOG, exclude=[{"class": "cat", "count": 1}])
    assert judged(alone, thing("dog")) == (1, 1, 1)
    assert judged(alone, thing("dog"), thing("cat")) == (0, 1, 1)


def test_a_color_is_that_of_the_most_confident_objects():
    red = include({"class": "dog", "color": "red"})
    assert judged(red, thing("dog", "red")) == (1, 1, 1)
    assert judged(red, thing("dog", "blue")) == (0, 0, 0.5)
    assert judged(red) == (0, 0, 0)
    best = thing("dog", "red", confidence=0.9)
    second = thing("dog", "blue", confidence=0.8)
    assert judged(red, second, best) == (1, 0, 0)
    assert judged(
        red, thing("dog", "blue", confidence=0.9), thing("dog", "red", confidence=0.8)
    ) == (0, 0, 0)
    two = include({"class": "dog", "color": "red", "count": 2})
    assert judged(two, thing("dog", "red"), thing("dog", "blue")) == (0, 0, 0.75)


def test_attributes_belong_to_their_objects():
    bound = include(
        {"class": "dog", "color": "red"}, {"class": "cat", "color": "blue"}, tag="color_attr"
    )
    assert judged(bound, thing("dog", "red"), thing("cat", "blue")) == (1, 1, 1)
    assert judged(bound, thing("dog", "blue"), thing("cat", "red")) == (0, 0, 0.5)
    assert judged(bound, thing("dog", "red"), thing("cat", "green")) == (0, 0, 0.75)
    assert judged(bound, thing("dog", "red")) == (0, 0, 0.5)


@pytest.mark.parametrize(
    ("relation", "place"),
    [("left of", LEFT), ("right of", RIGHT), ("above", ABOVE), ("below", BELOW)],
)
def test_a_position_is_relative_to_the_other_object(relation, place):
    rules = include(DOG, {"class": "cat", "position": [relation, 0]}, tag="position")
    assert judged(rules, thing("dog"), thing("cat", box=place)) == (1, 1, 1)
    for other in {LEFT, RIGHT, ABOVE, BELOW, SQUARE} - {place}:
        # As in the published code, a wrong position is a 0 and a 1 in the mean.
        assert judged(rules, thing("dog"), thing("cat", box=other)) == (0, 0, 0.75)
    assert judged(rules, thing("cat", box=place)) == (0, 0, pytest.approx(1 / 3))
    assert judged(rules, thing("dog")) == (0, 0, pytest.approx(1 / 3))


def test_a_position_relative_to_what_does_not_hold_is_not_there():
    rules = include({"class": "dog", "color": "red"}, {"class": "cat", "position": ["left of", 0]})
    assert judged(rules, thing("dog", "red"), thing("cat", box=LEFT)) == (1, 1, 1)
    assert judged(rules, thing("dog", "blue"), thing("cat", box=LEFT)) == (0, 0, 0.5)
    several = include({"class": "dog", "count": 2}, {"class": "cat", "position": ["left of", 0]})
    assert judged(several, thing("dog"), thing("dog", box=RIGHT), thing("cat", box=LEFT)) == (
        1,
        1,
        1,
    )
    assert judged(several, thing("dog"), thing("dog", box=LEFT), thing("cat", box=LEFT))[0] == 0


def test_centres_must_differ_by_a_tenth_of_both_sizes():
    def shifted(x: float, y: float = 0) -> set[str]:
        return find_relations((x, y, x + 10, y + 10), (0, 0, 10, 10))

    # What is left of a shift x along one axis is x - 2, and that must be more than x / 2.
    assert shifted(2) == shifted(4) == set()
    assert shifted(4.1) == {"right of"}
    assert shifted(-4.1) == {"left of"}
    assert shifted(0, -4.1) == {"above"}
    assert shifted(0, 4.1) == {"below"}
    assert shifted(50, -50) == {"right of", "above"}
    # Steeper than 60 degrees, a little of x is left and less than half of the length.
    assert shifted(20, 50) == {"below"}
    assert find_relations((0, 0, 10, 10), (4.5, 0, 44.5, 10)) == {"left of"}
    assert find_relations((0, 0, 10, 10), (-7, 0, 33, 10)) == set()


def test_of_each_class_the_most_confident_sixteen_above_the_threshold_count():
    found = [Detection("dog", 0.3 + number / 100, SQUARE) for number in range(40)] + [
        Detection("cat", 0.31, SQUARE)
    ]
    objects = group_by_class(found, 0.3)
    assert [one.confidence for one in objects["dog"]] == pytest.approx(
        [0.3 + number / 100 for number in range(39, 23, -1)]
    )
    assert len(objects["cat"]) == 1
    assert group_by_class(found, 0.69) == {}


def logits(label: int, confidence: float) -> torch.Tensor:
    """Of one query, with all other probability on no object."""
    row = torch.full((81,), -50.0)
    row[label], row[80] = math.log(confidence), math.log(1 - confidence)
    return row


def test_detections_are_masks_with_their_boxes_and_confidences():
    inside = 3.0
    outside = -3.0
    masks = torch.full((3, 8, 8), outside)
    masks[0, 2:4, 1:6] = inside
    masks[1, 0, 0] = inside
    # The third has no pixel above one half.
    classes = torch.stack(
        [logits(CLASSES.index("dog"), 0.9), logits(CLASSES.index("cat"), 0.31), logits(0, 0.99)]
    )
    (found,) = extract_detections(classes, masks, (8, 8), whole(masks))
    quality = 1 / (1 + math.exp(-inside))
    assert (found.name, found.box) == ("dog", (1, 2, 6, 4))
    assert found.confidence == pytest.approx(0.9 * quality)
    assert found.mask[2:4, 1:6].all()
    assert found.mask.sum() == 10
    (larger,) = extract_detections(classes[:1], masks[:1], (16, 32), whole(masks))
    assert larger.mask.shape == (16, 32)
    assert larger.box == pytest.approx((4, 4, 24, 8), abs=2)


def whole(masks):
    """An input without bars, as large as its masks."""
    return InputSize(tuple(masks.shape[1:]), tuple(masks.shape[1:]))


def test_bars_are_cut_off_a_mask_before_it_is_resized():
    masks = torch.full((1, 8, 16), -3.0)
    masks[0, :, 6:] = 3.0  # the right half of ten columns, and the bar of six
    (found,) = extract_detections(
        logits(0, 0.99)[None], masks, (16, 20), InputSize((8, 10), (8, 16))
    )
    left, top, right, bottom = found.box
    assert (top, right, bottom) == (0, 20, 16)
    assert left == pytest.approx(12, abs=1)


def test_the_detector_sees_an_image_in_its_shape_with_bars():
    image = np.full((1, 100, 60, 3), 200, np.uint8)
    assert find_input_size(100, 60) == InputSize((107, 64), (128, 64))
    assert find_input_size(64, 64) == InputSize((64, 64), (64, 64))
    pixels = prepare_images(image, find_input_size(100, 60))
    assert pixels.shape == (1, 3, 128, 64)
    assert (pixels[:, :, :107] > 1).all()
    assert not pixels[:, :, 107:].any()


def test_one_query_may_be_of_several_classes():
    both = torch.full((1, 81), -50.0)
    both[0, 15] = both[0, 16] = 0.0
    masks = torch.full((1, 4, 4), 9.0)
    found = extract_detections(both, masks, (4, 4), whole(masks))
    assert {one.name for one in found} == {CLASSES[15], CLASSES[16]}


class Eye:
    """A CLIP whose image embedding is the mean colour and whose text embeddings are the primaries;
    it keeps what it saw.
    """

    SHADES = {"red": (1.0, 0, 0), "green": (0, 1.0, 0), "blue": (0, 0, 1.0)}

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []
        self.asked: list[str] = []

    def embed_images(self, images: np.ndarray) -> torch.Tensor:
        self.seen += list(images)
        return normalize(torch.tensor(images).float().mean((1, 2)), dim=-1)

    def embed_texts(self, texts: list[str]) -> torch.Tensor:
        self.asked += texts
        shades = [
            next((shade for name, shade in self.SHADES.items() if name in text), (0.1, 0.1, 0.1))
            for text in texts
        ]
        return normalize(torch.tensor(shades), dim=-1)


def test_a_color_is_asked_of_the_object_alone_on_grey():
    image = np.zeros((10, 12, 3), np.uint8)
    image[..., 2] = 255  # blue, but for the object
    mask = np.zeros((10, 12), bool)
    mask[2:6, 3:9] = True
    mask[2, 3] = False
    image[2:6, 3:9] = (200, 0, 0)
    eye = Eye()
    namer = ColorNamer(eye)
    assert namer.name_color(image, Detection("dog", 0.9, (3, 2, 9, 6), mask)) == "red"
    (seen,) = eye.seen
    assert seen.shape == (4, 6, 3)
    assert seen[0, 0].tolist() == [0x99] * 3
    assert (seen.reshape(-1, 3)[1:] == (200, 0, 0)).all()
    assert eye.asked[:3] == [
        "a photo of a red dog",
        "a photo of a red-colored dog",
        "a photo of a red object",
    ]
    assert len(eye.asked) == 3 * len(COLORS)
    namer.name_color(image, Detection("dog", 0.9, (3, 2, 9, 6), mask))
    assert len(eye.asked) == 3 * len(COLORS)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "include: Field required"),
        ({"include": []}, "include: "),
        (
            {"include": [{"class": "unicorn", "count": 1}]},
            "include.0: .*'unicorn' is no class of COCO",
        ),
        (
            {"include": [{"class": "dog", "count": 1, "color": "mauve"}]},
            "'mauve' is none of red, orange",
        ),
        ({"include": [{"class": "dog", "count": 0}]}, "include.0.count: "),
        ({"include": [{"class": "dog", "count": "1"}]}, "include.0.count: "),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["near", 0]}]},
            "include.0.position.0: ",
        ),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["above", 0]}]},
            "rule 0 has a position relative to rule 0",
        ),
        (
            {
                "include": [
                    {"class": "dog", "count": 1},
                    {"class": "cat", "count": 1, "position": ["above", -1]},
                ]
            },
            "rule -1",
        ),
    ],
)
def test_a_prompt_without_rules_is_a_failure_and_never_a_score(metadata, why, reward):
    result = reward(IMAGES[:2], [prompt_of(include(DOG)), prompt_of(metadata)])
    assert np.isnan(result.values).tolist() == [False, True]
    assert all(np.isnan(column).tolist() == [False, True] for column in result.metrics.values())
    assert list(result.failures) == [1]
    assert re.search(why, result.failures[1])


IMAGES = some_images()


def prompt_of(metadata: dict) -> Prompt:
    return Prompt(0, "a photo", "", None, "test", "train", json.dumps(metadata))


@pytest.fixture(scope="module", autouse=True)
def small_inputs():
    """Few pixels for the detector; the published size is in the file."""
    assert (geneval.SHORT_EDGE, geneval.LONG_EDGE) == (800, 1333)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geneval, "SHORT_EDGE", 64)
        patch.setattr(geneval, "LONG_EDGE", 107)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A detector that sees dogs everywhere. Never write into its folder."""
    return make_reward("geneval", tmp_path_factory.mktemp("geneval"), batch=2)


@pytest.fixture(scope="module")
def reward(config):
    return load_reward(config)


def test_networks_of_the_published_layout_are_loaded_and_judge(reward):
    dogs = {"count": 1, "class": "dog"}
    result = reward(IMAGES, [prompt_of(include(rule)) for rule in (dogs, CAT, dogs, CAT, dogs)])
    assert result.values.tolist() == [1, 0, 1, 0, 1]
    assert set(result.metrics) == {"geneval_strict", "geneval_soft"}
    colored = [
        reward(IMAGES[:1], [prompt_of(include(dogs | {"color": color}))]).values[0]
        for color in COLORS
    ]
    assert sorted(colored) == [0] * 9 + [1]
    assert not reward.has_gradient


def test_the_size_of_a_batch_does_not_count_and_prompts_without_rules_neither(config, reward):
    prompts = [
        prompt_of(include(DOG)),
        prompt_of({}),
        *[prompt_of(include({"class": "dog", "count": n})) for n in (2, 3, 4)],
    ]
    expected = reward(IMAGES, prompts)
    for batch in (1, 16):
        other = load_reward(config.model_copy(update={"batch": batch}))(IMAGES, prompts)
        assert np.array_equal(other.values, expected.values, equal_nan=True)
        assert np.array_equal(
            other.metrics["geneval_soft"], expected.metrics["geneval_soft"], equal_nan=True
        )
    assert reward(IMAGES[:0], []).values.shape == (0,)


def test_the_score_is_chosen_and_the_others_are_metrics(config, reward):
    prompts = [prompt_of(include(DOG, CAT))]
    soft = load_reward(config.model_copy(update={"score": "soft", "label": "rules"}))
    one = reward(IMAGES[:1], prompts)
    other = soft(IMAGES[:1], prompts)
    assert other.values[0] == one.metrics["geneval_soft"][0] != one.values[0]
    assert other.metrics.keys() == {"rules_correct", "rules_strict"}
    assert load_scorer([soft.config], [])(IMAGES[:1], prompts).metrics.keys() == {
        "rules",
        "rules_correct",
        "rules_strict",
    }


def test_counting_asks_for_more_confidence(reward, monkeypatch):
    monkeypatch.setattr(
        geneval,
        "extract_detections",
        lambda *arguments: [
            Detection("dog", 0.5, SQUARE),
            Detection("dog", 0.95, SQUARE),
        ],
    )
    two = include({"class": "dog", "count": 2})
    prompts = [prompt_of(two | {"tag": tag}) for tag in ("two_object", "counting")]
    assert reward(IMAGES[:2], prompts).values.tolist() == [1, 0]


def test_a_detector_that_is_not_finite_fails_the_image(reward, monkeypatch):
    detector = reward._score_function.args[0]
    broken = SimpleNamespace(
        class_queries_logits=torch.full((1, 4, 81), float("nan")),
        masks_queries_logits=torch.zeros(1, 4, 8, 8),
    )
    monkeypatch.setattr(type(detector), "__call__", lambda self, pixel_values: broken)
    result = reward(IMAGES[:1], [prompt_of(include(DOG))])
    assert np.isnan(result.values).all()
    assert result.failures == {0: "the detector gave a number that is not finite"}


def test_a_detector_of_other_classes_or_with_other_weights_is_refused(tmp_path):
    config = make_reward("geneval", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "mask_projection" not in name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        RewardError,
        match=r"does not fit this Mask2Former.*: 2 weights differ, first .*mask_projection",
    ):
        load_reward(config)(IMAGES[:1], [prompt_of(include(DOG))])
    write_detector(tmp_path, labels=150)
    with pytest.raises(
        RewardError, match="knows 150 classes and COCO has 80; take one of COCO instances"
    ):
        load_reward(config)(IMAGES[:1], [prompt_of(include(DOG))])


def test_missing_files_are_named_before_anything_is_loaded(tmp_path):
    config = make_reward("geneval", tmp_path)
    (tmp_path / "clip" / "tokenizer.json").unlink()
    assert "holds no tokenizer.json" in str(load_reward(config).explain_unavailable())
    with pytest.raises(RecipeError, match=r"clip"):
        Recipe.model_validate({"rewards": [{"name": "geneval"}]})
