"""``geneval``: whether an image shows the objects, counts, colours and positions of a GenEval
prompt (2310.11513).

A detector finds objects, CLIP names their colours, and ``ebbflow.rewards.geneval_rules`` compares
both with the rules in the prompt's further columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError

from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from ebbflow.rewards.base import RewardError, RewardResult
from ebbflow.rewards.geneval_rules import (
    CLASSES,
    COLORS,
    Detection,
    Judgement,
    Rules,
    group_by_class,
    judge_objects,
    read_rules,
)
from ebbflow.rewards.network import CLIP_FILES, Files, PretrainedReward, PretrainedRewardConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.base import Reward
    from ebbflow.rewards.clip import Clip

    Examine = Callable[[np.ndarray, list[Rules]], list[Judgement | None]]

THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
"""Confidence above which an object counts; the second for prompts with the tag ``counting``."""
MAX_DETECTIONS = 100
"""The most confident objects of an image that are looked at."""
SHORT_EDGE = 800
LONG_EDGE = 1333
DIVISOR = 32
"""Pixels that the detector sees, as MMDetection tests it: the largest size of the image's shape
within these edges, and then bars up to multiples of 32. The repository of the weights has smaller
edges.
"""
TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
GREY = 0x99
"""What surrounds an object whose colour is asked for."""
UNUSED = r"relative_position_index$|\.swin\.layernorm\.|^criterion\."
"""Weights without an effect: indices that are computed, a norm after the last stage, and the loss.
"""


class GenEvalConfig(PretrainedRewardConfig):
    """Whether the image shows what a GenEval prompt asks for (2310.11513), 0 or 1."""

    # Mask2Former (Swin-S) and CLIP-L, as transformers builds them.
    num_parameters: ClassVar[int] = 496_357_596
    known_lowest: ClassVar[float | None] = 0.0
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

    def explain_unscorable(self, prompt: Prompt) -> str | None:
        return _collect_rules([prompt])[1].get(0)

    def build(self) -> Reward:
        return GenEval(self)


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
            # A detector of ADE20K or of panoptic COCO would load, and name every object wrongly.
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
        indices = list(rules)  # of the images whose prompts have rules; the others have failed
        for start in range(0, len(indices), self.config.batch):
            batch = indices[start : start + self.config.batch]
            judgements = self._score_function(images[batch], [rules[index] for index in batch])
            for index, judgement in zip(batch, judgements, strict=True):
                if judgement is None:
                    failures[index] = "the detector gave a number that is not finite"
                    continue
                for name, column in values.items():
                    column[index] = getattr(judgement, name)
        # One of the three is the score, and the two others are metrics.
        chosen = values.pop(self.config.score)
        return RewardResult(
            chosen, {f"{self.name}_{name}": column for name, column in values.items()}, failures
        )


def _collect_rules(prompts: Sequence[Prompt]) -> tuple[dict[int, Rules], dict[int, str]]:
    """Read the rules of the prompts; return them, and why other prompts have none, by index."""
    rules = {}
    failures = {}
    for index, prompt in enumerate(prompts):
        try:
            rules[index] = read_rules(prompt.metadata)
        except ValidationError as error:
            # The first of pydantic's errors: a prompt of another benchmark has one for each key.
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the rules"
            failures[index] = sanitize_text(
                f"the prompt's columns are no rules of GenEval: {place}: {first['msg']}", 300
            )
    return rules, failures


def _examine_images(
    detector: Any, colors: ColorNamer, images: np.ndarray, rules: list[Rules]
) -> list[Judgement | None]:
    """Judge images, uint8 RGB [n, height, width, 3], by their rules; None where the detector gave
    numbers that are not finite.
    """
    import torch

    input_size = find_input_size(*images.shape[1:3])
    pixels = prepare_images(images, input_size)
    judgements: list[Judgement | None] = []
    with torch.no_grad():
        output = detector(pixel_values=pixels.to(detector.device))
        for image, rule, classes, masks in zip(
            images, rules, output.class_queries_logits, output.masks_queries_logits, strict=True
        ):
            if not (classes.isfinite().all() and masks.isfinite().all()):
                # An image without objects fulfils "no cat": NaN must not be taken for none.
                judgements.append(None)
                continue
            # The published code asks for .9 of prompts that count, where a weak second detection of
            # the same object would spoil the number, and for .3 of all others.
            threshold = COUNTING_THRESHOLD if rule.tag == "counting" else THRESHOLD
            detections = extract_detections(classes, masks, image.shape[:2], input_size)
            objects = group_by_class(detections, threshold)
            # Three scores ask for the same colours; each is a pass of CLIP.
            color_of = cache(partial(colors.name_color, image))
            judgements.append(judge_objects(objects, rule, color_of))
    return judgements


class InputSize(NamedTuple):
    """Height and width of an image as the detector sees it, without and with its bars."""

    resized: tuple[int, int]
    padded: tuple[int, int]


def find_input_size(height: int, width: int) -> InputSize:
    """Return the size of an image for the detector (``Resize`` with ``keep_ratio``, and ``Pad``, of
    MMDetection).
    """
    scale = min(LONG_EDGE / max(height, width), SHORT_EDGE / min(height, width))
    resized = (int(height * scale + 0.5), int(width * scale + 0.5))
    return InputSize(resized, (_round_up(resized[0]), _round_up(resized[1])))


def _round_up(edge: int) -> int:
    return -(-edge // DIVISOR) * DIVISOR


def prepare_images(images: np.ndarray, input_size: InputSize) -> Tensor:
    """Return standardised images, float32 [n, 3, *padded], with bars of 0 on the right and at the
    bottom.
    """
    from torch.nn.functional import pad
    from transformers import Mask2FormerImageProcessorPil

    # The processor itself would stretch each edge to the next multiple of 32.
    height, width = input_size.resized
    processor = Mask2FormerImageProcessorPil(
        size={"height": height, "width": width}, size_divisor=0
    )
    pixels = processor(
        list(images), input_data_format="channels_last", return_tensors="pt"
    ).pixel_values
    return pad(pixels, (0, input_size.padded[1] - width, 0, input_size.padded[0] - height))


def extract_detections(
    classes: Tensor, masks: Tensor, size: tuple[int, int], input_size: InputSize
) -> list[Detection]:
    """Return the objects in an image of ``size`` with a confidence above ``THRESHOLD``, as
    MMDetection takes them from a Mask2Former.

    The confidence is the probability of the class times the mean probability of the pixels of the
    mask, those above one half.

    Args:
        classes: logits [queries, classes + 1], the last one of no object.
        masks: logits [queries, h, w] of the padded input.
        input_size: of the image as the detector has seen it.
    """
    from torch.nn.functional import interpolate

    probabilities = classes.softmax(-1)[:, :-1]  # [queries, classes]
    # Over all pairs of query and class, so one query can be two objects, as in MMDetection.
    top, indices = probabilities.flatten().topk(min(MAX_DETECTIONS, probabilities.numel()))
    detections = []
    # The quality of a mask is at most 1: what is below the threshold here stays below it, and its
    # mask is not resized.
    for flat_index in indices[top > THRESHOLD].tolist():
        query, label = divmod(flat_index, probabilities.shape[1])
        logits = interpolate(masks[None, None, query], input_size.padded, mode="bilinear")
        # Without the bars.
        logits = logits[..., : input_size.resized[0], : input_size.resized[1]]
        logits = interpolate(logits, size, mode="bilinear")[0, 0]
        mask = logits > 0
        quality = (logits.sigmoid() * mask).sum() / (mask.sum() + 1e-6)
        confidence = float(probabilities[query, label] * quality)
        if confidence > THRESHOLD:
            rows, columns = (mask.any(axis).nonzero()[:, 0].tolist() for axis in (1, 0))
            box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            detections.append(Detection(CLASSES[label], confidence, box, mask.cpu().numpy()))
    return detections


class ColorNamer:
    """Names the colour of an object by CLIP, zero-shot, from the object alone on grey."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self.texts: dict[str, Tensor] = {}

    def name_color(self, image: np.ndarray, detection: Detection) -> str:
        """Return the colour of an object in its image, uint8 RGB [height, width, 3]."""
        import numpy as np

        left, top, right, bottom = (round(edge) for edge in detection.box)
        masked = image
        if detection.mask is not None:
            # The colour of what is around the object must not be taken for its own.
            masked = np.where(detection.mask[..., None], image, np.uint8(GREY))
        embedding = self.clip.embed_images(masked[None, top:bottom, left:right])[0]  # [width]
        return COLORS[int((self._embed_colors(detection.name) @ embedding).argmax())]

    def _embed_colors(self, name: str) -> Tensor:
        """Embed the colours of a class as unit vectors [colours, width]: the means over the
        templates.
        """
        from torch.nn.functional import normalize

        if name not in self.texts:
            texts = [template.format(color, name) for color in COLORS for template in TEMPLATES]
            embedded = self.clip.embed_texts(texts).view(len(COLORS), len(TEMPLATES), -1)
            self.texts[name] = normalize(embedded.mean(1), dim=-1)
        return self.texts[name]
