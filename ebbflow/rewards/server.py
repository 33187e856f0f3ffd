"""A small server that makes any reward of this machine a remote one (``ebbflow.rewards.protocol``).

A request is checked before it is unpacked: its token, then the size of its body and of its JSON
(``server_limits``), then the chunks of its images and the sizes that their headers give. Only
chunks with pixels are decoded: compressed text in other chunks can be a thousand times as large as
the file.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, cast, get_args

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import ValidationError

from ebbflow.data.images import PNG_SIGNATURE, is_animated_image, iterate_png_chunks
from ebbflow.data.prompts import Prompt
from ebbflow.data.sounds import SoundError, Sounds, decode_wavs
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.groups import check_result
from ebbflow.rewards.http import is_loopback
from ebbflow.rewards.protocol import (
    HEALTH,
    SCORE,
    Health,
    PromptMessage,
    ScoreAnswer,
    ScoreRequest,
    SentSamples,
    describe_first_problem,
    identify_image,
)
from ebbflow.rewards.samples import SoundedVideos
from ebbflow.rewards.server_limits import BodyReader, build_server_options

MAX_IMAGES = 256
MAX_PIXELS = 64 * 2**20
"""Of all images of a request: 64 of 1024x1024, which a few kilobytes of PNG can claim to be."""
MAX_CHUNKS = 2**16
"""Of all PNG files of a request: so many pixels in libpng's chunks of 8 KiB, twice."""
PIXEL_CHUNKS = (b"IHDR", b"IDAT", b"IEND")
"""All that 8-bit RGB has; ``PLTE`` only suggests colours there."""
ANIMATION_CHUNKS = (b"acTL", b"fcTL", b"fdAT")
"""What videos have besides. For a reward of images an animation is its first frame."""

logger = logging.getLogger(__name__)


def run_reward_server(config: RewardConfig, host: str, port: int, token: str | None = None) -> None:
    """Serve a reward until the process is stopped.

    Raises:
        RewardError: the reward cannot run here, or anybody on the network could ask it.
    """
    # First, before a network of gigabytes is loaded.
    if token is None and not is_loopback(host):
        raise RewardError(
            f"host = {host!r} is open to others than this machine; set a token, or take 127.0.0.1"
        )
    reward = load_reward(config)
    reason = reward.explain_unavailable()
    if reason:
        raise RewardError(f"the reward {reward.name!r} cannot run here: {reason}")
    if reward.scores not in get_args(SentSamples):
        what = "compares images" if reward.compares else f"scores {reward.scores}"
        raise RewardError(
            f"the reward {reward.name!r} {what}, and requests hold single images or videos; name it"
            " in the recipe itself"
        )
    uvicorn.run(build_app(reward, token), host=host, port=port, **build_server_options())


def build_app(reward: Reward, token: str | None) -> FastAPI:
    """Build the server as an ASGI application: it asks for the bearer token where there is one, and
    scores one request at a time.
    """

    async def check_token(request: Request) -> None:
        if token is None:
            return
        authorization = request.headers.get("Authorization", "").encode()
        # As bytes: compare_digest takes no text outside ASCII. It takes the same time wherever the
        # first difference is, so that a token cannot be guessed letter by letter.
        if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
            raise HTTPException(
                401, "send the header Authorization: Bearer with the token of this server"
            )

    # A dependency of the application runs before any body is read. Its pages of documentation would
    # load scripts of other hosts.
    app = FastAPI(
        dependencies=[Depends(check_token)], docs_url=None, redoc_url=None, openapi_url=None
    )
    bodies = BodyReader()
    # Rewards are written for one caller at a time.
    one_at_a_time = asyncio.Lock()

    # Without defaults: a client that knows images alone would refuse the key of their kind.
    @app.get(HEALTH, response_model_exclude_defaults=True)
    async def report_health() -> Health:
        return Health(reward=reward.name, ready=True, scores=_get_sent_samples(reward))

    @app.post(SCORE)
    async def score_request(request: Request) -> Response:
        # In this order: a client that sends slowly must not keep others from being scored.
        async with bodies.read_body(request) as body, one_at_a_time:
            answer = await run_in_threadpool(_answer_request, reward, body)
        return Response(answer, media_type="application/json")

    return app


def _answer_request(reward: Reward, body: bytearray) -> str:
    asked = _parse_request(body)
    body.clear()  # the request holds all of it once more
    return _score_request(reward, asked).model_dump_json()


def _parse_request(body: bytearray) -> ScoreRequest:
    try:
        asked = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, describe_first_problem(error)) from None
    if len(asked.images) > MAX_IMAGES:
        raise HTTPException(
            413, f"{len(asked.images)} images are more than {MAX_IMAGES}; send fewer at once"
        )
    return asked


def _score_request(reward: Reward, asked: ScoreRequest) -> ScoreAnswer:
    samples: Any = _decode_samples(_get_sent_samples(reward), asked)  # as the reward declares
    try:
        result = check_result(
            reward.name,
            reward(samples, [_build_prompt(*numbered) for numbered in enumerate(asked.prompts)]),
            len(samples),
        )
    except Exception as error:  # a reward can raise anything, and the next request may be scored
        logger.exception("scoring failed")
        raise HTTPException(500, f"{reward.name} failed: {type(error).__name__}: {error}") from None
    ids = [identify_image(base64.b64decode(image)) for image in asked.images]
    return _build_answer(result, ids)


def _get_sent_samples(reward: Reward) -> SentSamples:
    """Return what requests to the server of a reward hold."""
    return cast(SentSamples, reward.scores)


def _decode_samples(kind: SentSamples, asked: ScoreRequest) -> np.ndarray | SoundedVideos:
    """Decode what a reward of this kind scores."""
    images = _decode_images(asked.images, are_videos=kind != "images")
    if kind != "sounds":
        if asked.sounds is not None:
            raise HTTPException(
                422, f"sounds are sent to a reward that scores {kind}; leave them out"
            )
        return images
    if asked.sounds is None:
        raise HTTPException(422, "sounds: this reward scores videos with sound; send a WAV of each")
    return SoundedVideos(images, _decode_sounds(asked.sounds))


def _decode_sounds(texts: list[str]) -> Sounds:
    """Decode WAV files in base64."""
    if not texts:
        return Sounds(np.zeros((0, 1, 1), np.int16), 1)
    try:
        return decode_wavs([base64.b64decode(text, validate=True) for text in texts])
    except SoundError as error:
        raise HTTPException(422, f"sounds: one {error}") from None
    except ValueError:
        raise HTTPException(422, "sounds: one is no base64") from None


def _decode_images(texts: list[str], are_videos: bool = False) -> np.ndarray:
    """Decode PNG files in base64 to uint8 RGB [N, height, width, 3], animated ones to [N, frames,
    height, width, 3].
    """
    if not texts:
        return np.zeros((0, 1, 1, 1, 3) if are_videos else (0, 1, 1, 3), np.uint8)
    # All headers are read before any pixel is: they say what unpacking would cost. Text in an image
    # is bounded by the body, its chunks by this counter, which all images of a request share.
    chunks_left = iter(range(MAX_CHUNKS))
    kept = PIXEL_CHUNKS + ANIMATION_CHUNKS if are_videos else PIXEL_CHUNKS
    images = [_open_image(index, text, chunks_left, kept) for index, text in enumerate(texts)]
    for index, image in enumerate(images):
        if are_videos and not is_animated_image(image):
            raise HTTPException(
                422, f"images.{index}: this reward scores videos; send animated PNG files"
            )
    sizes = {(*image.size, getattr(image, "n_frames", 1)) for image in images}
    if len(sizes) > 1:
        raise HTTPException(
            422,
            "the images of a request must have one size and number of frames, got"
            f" {sorted(sizes)}; send them apart",
        )
    ((width, height, frames),) = sizes
    if len(images) * frames * width * height > MAX_PIXELS:
        kind = f"videos of {frames} frames" if are_videos else "images"
        raise HTTPException(
            413,
            f"{len(images)} {kind} of {width}x{height} are more than {MAX_PIXELS} pixels; send"
            " fewer",
        )
    # Filled one by one: a list of decoded images and their stack would be twice the memory.
    pixels = np.empty((len(images), frames, height, width, 3), np.uint8)
    for index, image in enumerate(images):
        _decode_frames(index, image, pixels[index])
    return pixels if are_videos else pixels[:, 0]


def _open_image(
    index: int, text: str, chunks_left: Iterator[int], kept: tuple[bytes, ...]
) -> Image.Image:
    """Open the image as its header describes it, before its pixels are unpacked."""
    try:
        file = _keep_chunks(base64.b64decode(text, validate=True), chunks_left, kept)
        image = Image.open(io.BytesIO(file), formats=["PNG"])
    except HTTPException:
        raise
    except Image.DecompressionBombError:
        raise HTTPException(413, f"images.{index} has more than {MAX_PIXELS} pixels") from None
    except Exception:  # base64's, and Pillow's of many types for files that are broken on purpose
        raise HTTPException(422, f"images.{index} is no PNG file in base64") from None
    # Converted silently, a transparent or a 16-bit image would get a score of what nobody saw.
    if image.mode != "RGB":
        raise HTTPException(
            422, f"images.{index} is a PNG file of the mode {image.mode}; send 8-bit RGB"
        )
    return image


def _keep_chunks(picture: bytes, chunks_left: Iterator[int], kept: tuple[bytes, ...]) -> bytes:
    """Return the PNG file without text, colour profiles and everything else that no score depends
    on.
    """
    parts = [PNG_SIGNATURE]
    for name, chunk in iterate_png_chunks(picture):
        if next(chunks_left, None) is None:
            raise HTTPException(
                413,
                f"the images have more than {MAX_CHUNKS} PNG chunks; send fewer images, or larger"
                " chunks",
            )
        if name in kept:
            parts.append(chunk)
    return b"".join(parts)


def _decode_frames(index: int, image: Image.Image, pixels: np.ndarray) -> None:
    """Decode all frames into ``pixels``, [frames, height, width, 3]; an image has one."""
    try:
        for position, frame in enumerate(pixels):
            # An error where the header of an animation claims more frames than there are.
            image.seek(position)
            frame[:] = np.asarray(image)
    except Exception:  # Pillow's of many types, as above
        raise HTTPException(
            422, f"images.{index} is a PNG file that ends early or is broken"
        ) from None


def _build_prompt(index: int, message: PromptMessage) -> Prompt:
    # In the form in which a prompt table keeps it, so that a reward gets the same text as without
    # a server between.
    metadata = json.dumps(message.metadata, sort_keys=True, ensure_ascii=False)
    return Prompt(
        index,
        message.prompt,
        message.negative_prompt,
        message.target,
        source="",
        split="",
        metadata=metadata,
    )


def _build_answer(result: RewardResult, ids: list[str]) -> ScoreAnswer:
    failed = np.flatnonzero(np.isnan(result.values)).tolist()
    return ScoreAnswer(
        scores=_nan_to_none(result.values),
        failures={index: result.failures[index] for index in failed if index in result.failures},
        metrics={column: _nan_to_none(values) for column, values in result.metrics.items()},
        ids=ids,
    )


def _nan_to_none(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
