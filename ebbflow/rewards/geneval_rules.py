"""GenEval's rules (2310.11513): what a prompt asks for, and whether the objects of an image fulfil
it. Pure functions from detections to scores; ``ebbflow.rewards.built_in.geneval`` has the networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ebbflow.recipe.base import shorten_value

if TYPE_CHECKING:
    import numpy as np

MAX_OBJECTS = 16
"""The most confident objects of each class that count."""
POSITION_THRESHOLD = 0.1
"""Share of the sizes of two objects by which their centres must differ."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
CLASSES = (
    "person",
    "bicycle",
    "car",
    "motorcycle",
    "airplane",
    "bus",
    "train",
    "truck",
    "boat",
    "traffic light",
    "fire hydrant",
    "stop sign",
    "parking meter",
    "bench",
    "bird",
    "cat",
    "dog",
    "horse",
    "sheep",
    "cow",
    "elephant",
    "bear",
    "zebra",
    "giraffe",
    "backpack",
    "umbrella",
    "handbag",
    "tie",
    "suitcase",
    "frisbee",
    "skis",
    "snowboard",
    "sports ball",
    "kite",
    "baseball bat",
    "baseball glove",
    "skateboard",
    "surfboard",
    "tennis racket",
    "bottle",
    "wine glass",
    "cup",
    "fork",
    "knife",
    "spoon",
    "bowl",
    "banana",
    "apple",
    "sandwich",
    "orange",
    "broccoli",
    "carrot",
    "hot dog",
    "pizza",
    "donut",
    "cake",
    "chair",
    "couch",
    "potted plant",
    "bed",
    "dining table",
    "toilet",
    "tv",
    "laptop",
    "computer mouse",
    "tv remote",
    "computer keyboard",
    "cell phone",
    "microwave",
    "oven",
    "toaster",
    "sink",
    "refrigerator",
    "book",
    "clock",
    "vase",
    "scissors",
    "teddy bear",
    "hair drier",
    "toothbrush",
)
"""The classes of COCO in their order, by the names that GenEval gives them."""
Relation = Literal["left of", "right of", "above", "below"]


class Rule(BaseModel):
    """So many objects of a class, of a colour, at a place relative to those of an earlier rule.

    Example:
        "a red dog to the left of two cats" has two rules. The cats come first, because a position
        refers to an earlier rule by its number::

            {"class": "cat", "count": 2}
            {"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]}
    """

    model_config = ConfigDict(frozen=True, strict=True)

    name: str = Field(alias="class")
    count: int = Field(ge=1)
    color: str | None = None
    position: tuple[Relation, int] | None = None
    """The relation, and the number of the earlier rule."""

    @model_validator(mode="after")
    def _check_words(self) -> Rule:
        if self.name not in CLASSES:
            raise ValueError(
                f"{shorten_value(self.name)} is no class of COCO as GenEval calls them"
            )
        if self.color not in (None, *COLORS):
            raise ValueError(f"{shorten_value(self.color)} is none of {', '.join(COLORS)}")
        return self


class Rules(BaseModel):
    """The columns of a GenEval prompt: everything in ``include`` must be there, and nothing in
    ``exclude``.

    Example:
        Exactly two bears: the published score counts "at least" by ``include``, so that the prompts
        of the tag ``counting`` exclude one more::

            {
                "tag": "counting",
                "include": [{"class": "bear", "count": 2}],
                "exclude": [{"class": "bear", "count": 3}]
            }
    """

    model_config = ConfigDict(frozen=True, strict=True)

    tag: str | None = None
    include: tuple[Rule, ...] = Field(min_length=1)
    exclude: tuple[Rule, ...] | None = None

    @model_validator(mode="after")
    def _check_relative_positions(self) -> Rules:
        for index, rule in enumerate(self.include):
            if rule.position is None:
                continue
            # Rules are matched in one pass in their order, so what one refers to must be before it.
            _, target = rule.position
            if not 0 <= target < index:
                raise ValueError(
                    f"rule {index} has a position relative to rule {target}, which is no earlier"
                    " one"
                )
        return self


@dataclass(frozen=True, eq=False)
class Detection:
    """An object in an image.

    Attributes:
        box: left, top, right and bottom in pixels.
        mask: bool [height, width]; None for the whole box.

    Example::

        Detection("dog", confidence=0.93, box=(12, 40, 64, 90))
    """

    name: str
    confidence: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Judgement:
    """How an image fulfils its rules (``judge_objects``).

    Example:
        Three bears where two were asked for, and none excluded: at least two are there, not exactly
        two, and the count is off by half::

            Judgement(correct=1.0, strict=0.0, soft=0.5)
    """

    correct: float
    strict: float
    soft: float


@lru_cache(4096)
def read_rules(metadata: str) -> Rules:
    """Read the rules in the further columns of a prompt, a JSON object.

    Raises:
        ValidationError: there are none, or they name a class or a colour that GenEval does not
            know.
    """
    return Rules.model_validate_json(metadata)


def judge_objects(
    objects: Mapping[str, Sequence[Detection]], rules: Rules, color_of: Callable[[Detection], str]
) -> Judgement:
    """Compare objects with rules.

    ``correct`` is the published score (djghosh13/geneval, ``evaluate``): each rule must hold for
    the ``count`` most confident objects of its class. ``strict`` and ``soft`` are those of
    Flow-GRPO (yifan123/reward-server, ``evaluate_reward``), over all objects of a class.

    Args:
        objects: by class, the most confident first (``group_by_class``).
    """
    strict, soft = _compare_counts(objects, rules, color_of)
    return Judgement(float(_is_correct(objects, rules, color_of)), float(strict), soft)


def _is_correct(
    objects: Mapping[str, Sequence[Detection]], rules: Rules, color_of: Callable[[Detection], str]
) -> bool:
    # The objects that fulfil each rule, by its number; none where it does not hold, so that a
    # position relative to it does not hold either.
    matched: list[Sequence[Detection]] = []
    for rule in rules.include:
        # As published: the most confident ones, as many as asked for; further ones do not count
        # against the image, unless ``exclude`` says so.
        detections = objects.get(rule.name, ())[: rule.count]
        holds = len(detections) == rule.count
        if holds and rule.color:
            holds = all(color_of(detection) == rule.color for detection in detections)
        if holds and rule.position:
            relation, target = rule.position
            holds = _is_placed(detections, matched[target], relation)
        matched.append(detections if holds else ())
    excluded = any(len(objects.get(rule.name, ())) >= rule.count for rule in rules.exclude or ())
    return all(matched) and not excluded


def _compare_counts(
    objects: Mapping[str, Sequence[Detection]], rules: Rules, color_of: Callable[[Detection], str]
) -> tuple[bool, float]:
    """Return whether everything holds exactly, and the mean over what is asked for: a count, and a
    colour or a position.

    A count (of objects, or of those of the colour) n instead of N scores 1 - |n - N| / N, which is
    negative above 2 N. A colour or a position of the wrong number of objects scores 0. As in the
    published code, a wrong position scores a 0 and a 1, a right one a 1.
    """
    matched: list[Sequence[Detection]] = []
    parts: list[float] = []
    for rule in rules.include:
        detections = objects.get(rule.name, ())
        holds = len(detections) == rule.count
        parts.append(1 - abs(rule.count - len(detections)) / rule.count)
        if not holds and (rule.color or rule.position):
            parts.append(0.0)
        if holds and rule.color:
            num_colored = sum(color_of(detection) == rule.color for detection in detections)
            parts.append(1 - abs(rule.count - num_colored) / rule.count)
            holds = num_colored == rule.count
        if holds and rule.position:
            relation, target = rule.position
            holds = _is_placed(detections, matched[target], relation)
            if not holds:
                parts.append(0.0)
            # The published code appends this 1 also after the 0 of a wrong position, unless there
            # is nothing to be placed relative to.
            if matched[target]:
                parts.append(1.0)
        matched.append(detections if holds else ())
    return all(matched), sum(parts) / len(parts)


def _is_placed(
    detections: Sequence[Detection], targets: Sequence[Detection], relation: Relation
) -> bool:
    """Return whether all objects are at the place relative to all targets, of which there must be
    some.
    """
    return bool(targets) and all(
        relation in find_relations(detection.box, target.box)
        for detection in detections
        for target in targets
    )


def find_relations(box: Sequence[float], target: Sequence[float]) -> set[Relation]:
    """Return where the first box is relative to the second; boxes are left, top, right, bottom.

    Of the offset of the centres along each axis, ``POSITION_THRESHOLD`` times the sum of the sizes
    is taken off. What is left must be more than half of the length of the offset.
    """
    # Axis 0 is x, to the right; axis 1 is y, downwards.
    offsets = [(box[axis] + box[axis + 2] - target[axis] - target[axis + 2]) / 2 for axis in (0, 1)]
    # Width and height of the first box, then of the second.
    sizes = [abs(edges[axis + 2] - edges[axis]) for edges in (box, target) for axis in (0, 1)]
    remaining = [
        max(abs(offset) - POSITION_THRESHOLD * (sizes[axis] + sizes[axis + 2]), 0)
        for axis, offset in enumerate(offsets)
    ]
    if max(remaining) < 1e-3:
        return set()
    names: list[tuple[Relation, Relation]] = [("left of", "right of"), ("above", "below")]
    # As published: what is left along an axis, divided by the length of the whole offset, must be
    # above .5. Both axes can be: an object may be left of another and above it.
    half_length = math.hypot(*offsets) / 2
    return {
        pair[offset > 0]
        for pair, offset, amount in zip(names, offsets, remaining, strict=True)
        if amount > half_length
    }


def group_by_class(detections: Sequence[Detection], threshold: float) -> dict[str, list[Detection]]:
    """Return, for every class, the ``MAX_OBJECTS`` most confident objects above a threshold, in
    that order.
    """
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.confidence):
        if detection.confidence <= threshold:
            break
        same_class = objects.setdefault(detection.name, [])
        if len(same_class) < MAX_OBJECTS:
            same_class.append(detection)
    return objects
