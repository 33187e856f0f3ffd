"""What a run is rewarded for, and what it only watches. Each class names one reward; its code is in ``ebbflow.rewards``.

The first line of a class says what the reward measures and on which scale (``ebbflow list`` prints it).
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator

from ebbflow.recipe.algorithms import PATH, name_or_path
from ebbflow.recipe.base import Strict
from ebbflow.recipe.pretrained import PretrainedSourceConfig


class RewardConfig(Strict):
    """What every reward may be told."""

    name: str
    weight: float = Field(1.0, gt=0)
    """Of a reward that is trained on, in the sum."""
    label: str | None = Field(None, pattern=r"^[A-Za-z]\w*$")
    """How its scores are called in tables, charts and reports; left out, its name."""

    @property
    def column(self) -> str:
        """The column of its scores."""
        return self.label or self.name

    @property
    def reads(self) -> bool:
        """Whether it compares an image with the prompt's target text, which every prompt must then have."""
        return False


class ReadingRewardConfig(RewardConfig):
    """A reward that reads the image."""

    @property
    def reads(self) -> bool:
        return True


class OcrConfig(ReadingRewardConfig):
    """1 - edit distance / length between what PP-OCR reads and the prompt's target text, 0 to 1."""

    name: Literal["ocr"] = "ocr"
    layout: Literal["line", "page"] = "line"
    """``line``: the image is one line of text. ``page``: the lines are found first, as in photographs and posters."""


class TesseractConfig(ReadingRewardConfig):
    """The same distance, as tesseract reads: an independent second OCR, 0 to 1."""

    name: Literal["tesseract"] = "tesseract"


class SimilarityConfig(ReadingRewardConfig):
    """Likeness of the letters to rendered ones of the target text, 0 to 1."""

    name: Literal["similarity"] = "similarity"


class JpegCompressibilityConfig(RewardConfig):
    """-kB / 500 of the image as a JPEG of quality 95: plain images score higher, below 0."""

    name: Literal["jpeg_compressibility"] = "jpeg_compressibility"


class JpegIncompressibilityConfig(RewardConfig):
    """kB / 500 of the image as a JPEG of quality 95: images full of detail score higher, above 0."""

    name: Literal["jpeg_incompressibility"] = "jpeg_incompressibility"


class PretrainedRewardConfig(RewardConfig, PretrainedSourceConfig):
    """A reward with a network of its own, loaded once from a folder or from one commit of a Hugging Face repository."""

    batch: int = Field(16, ge=1)
    """Images per forward pass."""


class PickScoreConfig(PretrainedRewardConfig):
    """logit scale * cosine / 26 of a CLIP-H trained on human choices (2305.01569), about .75 to .9."""

    name: Literal["pickscore"] = "pickscore"
    path: str | None = "yuvalkirstain/PickScore_v1"


class ClipScoreConfig(PretrainedRewardConfig):
    """Cosine between prompt and image under CLIP (2104.08718), about .15 to .4."""

    name: Literal["clipscore"] = "clipscore"
    path: str | None = "openai/clip-vit-large-patch14"


class AestheticConfig(PretrainedRewardConfig):
    """LAION's aesthetic predictor on CLIP-L image embeddings, raw, about 1 to 10; it never sees the prompt."""

    name: Literal["aesthetic"] = "aesthetic"
    path: str | None = "openai/clip-vit-large-patch14"
    head: PretrainedSourceConfig
    """Of the predictor, ``sac+logos+ava1-l14-linearMSE`` as .pth or .safetensors: the file, or a folder or repository with it."""


class ImageRewardConfig(PretrainedRewardConfig):
    """ImageReward (2304.05977), raw: human preferences, standardised to mean 0 and deviation 1 on its own training set."""

    name: Literal["imagereward"] = "imagereward"
    path: str | None = "zai-org/ImageReward"
    tokenizer: PretrainedSourceConfig
    """Of the text encoder: ``google-bert/bert-base-uncased`` as a folder or a repository."""


class HpsConfig(PretrainedRewardConfig):
    """Cosine between prompt and image under HPS v2.1 (2306.09341), about .2 to .35."""

    name: Literal["hps"] = "hps"
    path: str | None = "xswu/HPSv2"
    processor: PretrainedSourceConfig
    """Configuration and tokenizer of CLIP-H: ``laion/CLIP-ViT-H-14-laion2B-s32B-b79K`` as a folder or a repository."""


class ServedRewardConfig(RewardConfig):
    """A reward behind HTTP. The host must be this machine or one of ``EBBFLOW_REWARD_HOSTS`` (commas between them)."""

    url: str = Field(pattern=r"^https?://[!-?A-~]+$")
    token_variable: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """The environment variable that holds the bearer token; the token itself has no place in a recipe."""
    timeout: float = Field(60.0, gt=0, le=3600)
    """Seconds for one request."""
    attempts: int = Field(3, ge=1, le=10)
    """Requests before their images count as failed; waits grow in between, with jitter."""

    @field_validator("url")
    @classmethod
    def _is_a_base(cls, url: str) -> str:
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError("take http://host:port, with a path where the server has one, and nothing after it")
        parts.port  # noqa: B018  raises ValueError for a port that is none
        return url.rstrip("/")


class RemoteConfig(ServedRewardConfig):
    """A score from a server of rewards: ``ebbflow serve-reward``, GenEval, whatever speaks the protocol of docs/rewards.md."""

    name: Literal["remote"] = "remote"
    batch: int = Field(16, ge=1, le=256)
    """Images per request."""
    metrics: list[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]] = []
    """Further columns of the server to keep, each as ``<label>_<column>``; the others are left out."""


class VisionJudgeConfig(ServedRewardConfig):
    """A vision-language model behind an OpenAI-compatible server answers a question about the image, 0 to 1."""

    name: Literal["vision_judge"] = "vision_judge"
    model: str = Field(min_length=1)
    """As the server calls it."""
    concurrency: int = Field(8, ge=1, le=64)
    """Requests at a time, of one image each."""
    question: str = Field('Does this image show: {prompt}? Answer "yes" or "no".', min_length=1)
    """``{prompt}`` and ``{target}`` stand for those of the image's prompt; no other braces are taken."""
    answer: Literal["probability", "yes_no", "number"] = "probability"
    """``probability``: P(yes) / (P(yes) + P(no)) of the first token. ``yes_no``: 1 or 0. ``number``: a number from 0 to
    ``scale``, divided by it. Every other answer is a failure, never a guess."""
    scale: float = Field(10.0, gt=0)

    @field_validator("question")
    @classmethod
    def _names_nothing_else(cls, question: str) -> str:
        rest = question.replace("{prompt}", "").replace("{target}", "")
        if "{" in rest or "}" in rest:
            raise ValueError("{prompt} and {target} are all that may stand in braces")
        return question

    @property
    def reads(self) -> bool:
        return "{target}" in self.question


class CustomRewardConfig(RewardConfig):
    """A user's own: what ``package.module:Name`` leads to, called with the options."""

    name: Literal["custom"] = "custom"
    path: Annotated[str, name_or_path()]
    options: dict[str, Any] = {}

    @property
    def column(self) -> str:
        return self.label or self.path.rpartition(":")[2]


def _named(given: Any) -> Any:
    """A bare name stands for the reward with its defaults, a path in its place for one of the user's own."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict) or not isinstance(name := given.get("name"), str):
        return given
    if PATH.fullmatch(name):
        return {**given, "name": "custom", "path": name}
    if name not in (*REWARD_NAMES, "custom"):
        nearest = difflib.get_close_matches(name, REWARD_NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"{hint}Take {', '.join(REWARD_NAMES)}, or give package.module:name of your own")
    return given


BuiltInRewardConfig = (
    OcrConfig
    | TesseractConfig
    | SimilarityConfig
    | JpegCompressibilityConfig
    | JpegIncompressibilityConfig
    | PickScoreConfig
    | ClipScoreConfig
    | AestheticConfig
    | ImageRewardConfig
    | HpsConfig
    | RemoteConfig
    | VisionJudgeConfig
)
REWARDS: tuple[type[RewardConfig], ...] = get_args(BuiltInRewardConfig)
REWARD_NAMES: tuple[str, ...] = tuple(config.model_fields["name"].default for config in REWARDS)
AnyRewardConfig = Annotated[
    Annotated[BuiltInRewardConfig | CustomRewardConfig, Field(discriminator="name")], BeforeValidator(_named)
]
"""A reward that comes along, or a user's own; a bare name is enough."""


def reward(name: str, **keys: Any) -> RewardConfig:
    """A reward by its name (or a user's own by its path) and the keys that a recipe would give it.

    Raises:
        ValidationError: there is no such reward or key.
    """
    return TypeAdapter(AnyRewardConfig).validate_python({"name": name, **keys})
