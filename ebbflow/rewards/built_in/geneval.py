"""``geneval``: whether an image shows the objects, counts, colours and positions of a GenEval
prompt (2310.11513).

A detector finds objects, CLIP names their colours, and ``judge_objects`` compares both with the
rules in the prompt's further columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ebbflow.recipe.base import sanitize_text, shorten_value
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.base import RewardError, RewardResult
from ebbflow.rewards.network import CLIP_FILES, Files, PretrainedReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.clip import Clip

    Examine = Callable[[np.ndarray, list["Rules"]], list["Judgement | None"]]

THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
"""Confidence above which an object counts; the second for prompts with the tag ``counting``."""
MAX_OBJECTS = 16
MAX_DETECTIONS = 100
"""The most confident objects of each class that count, of the most confident ones of an image."""
POSITION_THRESHOLD = 0.1
"""Share of the sizes of two objects by which their centres must differ."""
INPUT_SIZE = {"shortest_edge": 800, "longest_edge": 1333}
"""Pixels that the detector sees, as MMDetection tests it; the repository of the weights has a
smaller size.
"""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
GREY = 0x99
"""What surrounds an object whose colour is asked for."""
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
UNUSED = r"relative_position_index$|\.swin\.layernorm\.|^criterion\."
"""Weights without an effect: indices that are computed, a norm after the last stage, and the loss.
"""
Relation = Literal["left of", "right of", "above", "below"]


class GenEvalConfig(PretrainedRewardConfig):
    """Whether the image shows what a GenEval prompt asks for (2310.11513), 0 or 1."""

    num_parameters: ClassVar[int] = (
        496_357_596  # Mask2Former (Swin-S) and CLIP-L, as transformers builds it
    )
    name: Literal["geneval"] = "geneval"
    path: str | None = "facebook/mask2former-swin-small-coco-instance"
    clip: PretrainedSourceConfig
    """CLIP, which recognises colours: ``openai/clip-vit-large-patch14`` as a folder or a
    repository.
    """
    score: Literal["correct", "strict", "soft"] = "correct"
    """Score to train on; the two others are metrics. ``correct``: 1 if all conditions hold, as
    published. ``soft``: about the share of the conditions that hold, as Flow-GRPO trains.
    ``strict``: 1 if all conditions hold and the image has exactly as many objects as the prompt
    asks for.
    """
    batch: int = Field(4, ge=1)
    """Images per forward pass of the detector."""

    def build(self) -> Reward:
        return GenEval(self)


class Rule(BaseModel):
    """So many objects of a class, of a colour, at a place relative to those of an earlier rule."""

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
    """

    model_config = ConfigDict(frozen=True, strict=True)

    tag: str | None = None
    include: tuple[Rule, ...] = Field(min_length=1)
    exclude: tuple[Rule, ...] | None = None

    @model_validator(mode="after")
    def _check_relative_positions(self) -> Rules:
        targets = [
            (index, rule.position[1]) for index, rule in enumerate(self.include) if rule.position
        ]
        wrong = [(index, target) for index, target in targets if not 0 <= target < index]
        if wrong:
            raise ValueError(
                "rule {} has a position relative to rule {}, which is no earlier one".format(
                    *wrong[0]
                )
            )
        return self


@dataclass(frozen=True, eq=False)
class Detection:
    """An object in an image.

    Attributes:
        box: left, top, right and bottom in pixels.
        mask: bool [height, width]; None for the whole box.
    """

    name: str
    confidence: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Judgement:
    """How an image fulfils its rules (``judge_objects``)."""

    correct: float
    strict: float
    soft: float


class GenEval(PretrainedReward):
    """GenEval's protocol with a Mask2Former (Swin-S, COCO) of transformers in the place of
    MMDetection's, and CLIP ViT-L/14.
    """

    config: GenEvalConfig

    def list_files(self) -> list[Files]:
        return [
            Files(self.config, ("config.json", "model*.safetensors")),
            Files(self.config.clip, CLIP_FILES),
        ]

    def load_score_function(self) -> Examine:
        from transformers import Mask2FormerForUniversalSegmentation

        from ebbflow.rewards.clip import load_clip
        from ebbflow.rewards.weights import load_network

        folder, clip = (files.fetch_folder() for files in self.list_files())
        detector = load_network(Mask2FormerForUniversalSegmentation, folder, UNUSED)
        labels = detector.config.num_labels
        if labels != len(CLASSES):
            reason = f"the detector in {folder} knows {labels} classes and COCO has {len(CLASSES)}"
            raise RewardError(f"{reason}; take one of COCO instances")
        return partial(_examine_images, detector, ColorNamer(load_clip(clip)))

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score images in batches.

        Raises:
            HubError: a network cannot be fetched.
            RewardError: its files are not the published ones.
        """
        import numpy as np

        values = {name: np.full(len(images), np.nan) for name in ("correct", "strict", "soft")}
        rules, failures = _collect_rules(prompts)
        indices = list(rules)
        for batch in (
            indices[start : start + self.config.batch]
            for start in range(0, len(indices), self.config.batch)
        ):
            for index, judgement in zip(
                batch,
                self._score_function(images[batch], [rules[index] for index in batch]),
                strict=True,
            ):
                if judgement is None:
                    failures[index] = "the detector gave a number that is not finite"
                    continue
                for name, column in values.items():
                    column[index] = getattr(judgement, name)
        chosen = values.pop(self.config.score)
        return RewardResult(
            chosen, {f"{self.name}_{name}": column for name, column in values.items()}, failures
        )


def _collect_rules(prompts: Sequence[Prompt]) -> tuple[dict[int, Rules], dict[int, str]]:
    """The rules of the prompts that have some, and why others have none, by index."""
    rules = {}
    failures = {}
    for index, prompt in enumerate(prompts):
        try:
            rules[index] = read_rules(prompt.metadata)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the rules"
            failures[index] = sanitize_text(
                f"the prompt's columns are no rules of GenEval: {place}: {first['msg']}", 300
            )
    return rules, failures


@lru_cache(4096)
def read_rules(metadata: str) -> Rules:
    """The rules in the further columns of a prompt, a JSON object.

    Raises:
        ValidationError: there are none, or they name a class or a colour that GenEval does not
            know.
    """
    return Rules.model_validate_json(metadata)


# From detections to scores.


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
    matched: list[Sequence[Detection]] = []
    for rule in rules.include:
        found = objects.get(rule.name, ())[: rule.count]
        holds = (
            len(found) == rule.count
            and (rule.color is None or all(color_of(one) == rule.color for one in found))
            and (
                rule.position is None
                or _is_placed(found, matched[rule.position[1]], rule.position[0])
            )
        )
        matched.append(found if holds else ())
    excluded = any(len(objects.get(rule.name, ())) >= rule.count for rule in rules.exclude or ())
    return all(matched) and not excluded


def _compare_counts(
    objects: Mapping[str, Sequence[Detection]], rules: Rules, color_of: Callable[[Detection], str]
) -> tuple[bool, float]:
    """Whether everything holds exactly, and the mean over what is asked for: a count, and a colour
    or a position.

    A count (of objects, or of those of the colour) n instead of N scores 1 - |n - N| / N, which is
    negative above 2 N. A colour or a position of the wrong number of objects scores 0. As in the
    published code, a wrong position scores a 0 and a 1, a right one a 1.
    """
    matched: list[Sequence[Detection]] = []
    parts: list[float] = []
    for rule in rules.include:
        found = objects.get(rule.name, ())
        holds = len(found) == rule.count
        parts.append(1 - abs(rule.count - len(found)) / rule.count)
        if not holds and (rule.color or rule.position):
            parts.append(0.0)
        if holds and rule.color:
            colored = sum(color_of(one) == rule.color for one in found)
            parts.append(1 - abs(rule.count - colored) / rule.count)
            holds = colored == rule.count
        if holds and rule.position:
            relation, target = rule.position
            holds = _is_placed(found, matched[target], relation)
            parts += [1.0] if holds else [0.0, 1.0] if matched[target] else [0.0]
        matched.append(found if holds else ())
    return all(matched), sum(parts) / len(parts)


def _is_placed(
    found: Sequence[Detection], targets: Sequence[Detection], relation: Relation
) -> bool:
    """Whether all objects are at the place relative to all targets, of which there must be some."""
    return bool(targets) and all(
        relation in find_relations(one.box, target.box) for one in found for target in targets
    )


def find_relations(box: Sequence[float], target: Sequence[float]) -> set[Relation]:
    """Where the first box is relative to the second; boxes are left, top, right, bottom.

    Of the offset of the centres along each axis, ``POSITION_THRESHOLD`` times the sum of the sizes
    is taken off. What is left must be more than half of the length of the offset.
    """
    offsets = [(box[axis] + box[axis + 2] - target[axis] - target[axis + 2]) / 2 for axis in (0, 1)]
    sizes = [abs(one[axis + 2] - one[axis]) for one in (box, target) for axis in (0, 1)]
    left = [
        max(abs(offset) - POSITION_THRESHOLD * (sizes[axis] + sizes[axis + 2]), 0)
        for axis, offset in enumerate(offsets)
    ]
    if max(left) < 1e-3:
        return set()
    names: list[tuple[Relation, Relation]] = [("left of", "right of"), ("above", "below")]
    half = math.hypot(*offsets) / 2
    return {
        pair[offset > 0]
        for pair, offset, amount in zip(names, offsets, left, strict=True)
        if amount > half
    }


def group_by_class(found: Sequence[Detection], threshold: float) -> dict[str, list[Detection]]:
    """Of every class, the ``MAX_OBJECTS`` most confident objects above a threshold, in that
    order."""
    objects: dict[str, list[Detection]] = {}
    for one in sorted(found, key=lambda one: -one.confidence):
        if (
            one.confidence > threshold
            and len(same := objects.setdefault(one.name, [])) < MAX_OBJECTS
        ):
            same.append(one)
    return objects


# From images to detections.


def _examine_images(
    detector: Any, colors: ColorNamer, images: np.ndarray, rules: list[Rules]
) -> list[Judgement | None]:
    """The judgement of each image, uint8 RGB [n, height, width, 3]; None where the detector gave no
    finite numbers.
    """
    import torch
    from transformers import Mask2FormerImageProcessorPil

    processor = Mask2FormerImageProcessorPil(size=INPUT_SIZE)
    pixels = processor(
        list(images), input_data_format="channels_last", return_tensors="pt"
    ).pixel_values
    judgements: list[Judgement | None] = []
    with torch.no_grad():
        output = detector(pixel_values=pixels.to(detector.device))
        for image, rule, classes, masks in zip(
            images, rules, output.class_queries_logits, output.masks_queries_logits, strict=True
        ):
            if not (classes.isfinite().all() and masks.isfinite().all()):
                judgements.append(None)
                continue
            threshold = COUNTING_THRESHOLD if rule.tag == "counting" else THRESHOLD
            objects = group_by_class(extract_detections(classes, masks, image.shape[:2]), threshold)
            judgements.append(
                judge_objects(objects, rule, cache(partial(colors.name_color, image)))
            )
    return judgements


def extract_detections(classes: Tensor, masks: Tensor, size: tuple[int, int]) -> list[Detection]:
    """The objects in an image of ``size`` with a confidence above ``THRESHOLD``, as MMDetection
    takes them from a Mask2Former.

    The confidence is the probability of the class times the mean probability of the pixels of the
    mask, those above one half.

    Args:
        classes: logits [queries, classes + 1], the last one of no object.
        masks: logits [queries, h, w].
    """
    from torch.nn.functional import interpolate

    probabilities = classes.softmax(-1)[:, :-1]
    likely, places = probabilities.flatten().topk(min(MAX_DETECTIONS, probabilities.numel()))
    found = []
    for place in places[likely > THRESHOLD].tolist():
        query, label = divmod(place, probabilities.shape[1])
        logits = interpolate(masks[None, None, query], size, mode="bilinear")[0, 0]
        mask = logits > 0
        quality = (logits.sigmoid() * mask).sum() / (mask.sum() + 1e-6)
        confidence = float(probabilities[query, label] * quality)
        if confidence > THRESHOLD:
            rows, columns = (mask.any(axis).nonzero()[:, 0].tolist() for axis in (1, 0))
            box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            found.append(Detection(CLASSES[label], confidence, box, mask.cpu().numpy()))
    return found


class ColorNamer:
    """Names the colour of an object by CLIP, zero-shot, from the object alone on grey."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self.texts: dict[str, Tensor] = {}

    def name_color(self, image: np.ndarray, found: Detection) -> str:
        """The colour of an object in its image, uint8 RGB [height, width, 3]."""
        import numpy as np

        left, top, right, bottom = (round(edge) for edge in found.box)
        shown = (
            image if found.mask is None else np.where(found.mask[..., None], image, np.uint8(GREY))
        )
        seen = self.clip.embed_images(shown[None, top:bottom, left:right])[0]
        return COLORS[int((self._embed_colors(found.name) @ seen).argmax())]

    def _embed_colors(self, name: str) -> Tensor:
        """Unit vectors [colours, width] of a class: the means of those of the templates."""
        from torch.nn.functional import normalize

        if name not in self.texts:
            texts = [template.format(color, name) for color in COLORS for template in TEMPLATES]
            embedded = self.clip.embed_texts(texts).view(len(COLORS), len(TEMPLATES), -1)
            self.texts[name] = normalize(embedded.mean(1), dim=-1)
        return self.texts[name]
