"""A small server that makes any reward of this machine a remote one (``ebbflow.rewards.protocol``).

What is asked for is checked before it is unpacked: the token, then the size of the body, then the sizes of the images as their
headers give them.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import logging

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from pydantic import ValidationError

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.combine import checked, load_reward
from ebbflow.rewards.http import is_loopback
from ebbflow.rewards.protocol import HEALTH, SCORE, Health, PromptMessage, ScoreAnswer, ScoreRequest, first_problem

MAX_BYTES = 256 * 2**20
"""Of a request."""
MAX_IMAGES = 256
MAX_PIXELS = 64 * 2**20
"""Of all images of a request: 64 of 1024x1024, which a few kilobytes of PNG can claim to be."""

logger = logging.getLogger(__name__)


def serve(config: RewardConfig, host: str, port: int, token: str | None = None) -> None:
    """Serve a reward until the process is stopped.

    Raises:
        RewardError: the reward cannot run here, or anybody on the network could ask it.
    """
    if token is None and not is_loopback(host):
        raise RewardError(f"host = {host!r} is open to others than this machine; set a token, or take 127.0.0.1")
    reward = load_reward(config)
    if reason := reward.unavailable():
        raise RewardError(f"the reward {reward.name!r} cannot run here: {reason}")
    uvicorn.run(make_app(reward, token), host=host, port=port)


def make_app(reward: Reward, token: str | None) -> FastAPI:
    """The server as an ASGI application: it asks for the bearer token where there is one, and scores one request at a time."""

    async def require_token(request: Request) -> None:
        given = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "send the header Authorization: Bearer with the token of this server")

    app = FastAPI(dependencies=[Depends(require_token)], docs_url=None, redoc_url=None, openapi_url=None)
    one_at_a_time = asyncio.Lock()

    @app.get(HEALTH)
    async def health() -> Health:
        return Health(reward=reward.name, ready=True)

    @app.post(SCORE)
    async def score(request: Request) -> Response:
        asked = _parsed(await _body(request))
        async with one_at_a_time:
            answer = await run_in_threadpool(_score, reward, asked)
        return Response(answer.model_dump_json(), media_type="application/json")

    return app


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"the request has more than {MAX_BYTES} bytes; send fewer images at once")
    return bytes(body)


def _parsed(body: bytes) -> ScoreRequest:
    try:
        asked = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, first_problem(error)) from None
    if len(asked.images) > MAX_IMAGES:
        raise HTTPException(413, f"{len(asked.images)} images are more than {MAX_IMAGES}; send fewer at once")
    return asked


def _score(reward: Reward, asked: ScoreRequest) -> ScoreAnswer:
    images = _decoded(asked.images)
    try:
        result = checked(reward.name, reward(images, [_prompt(*numbered) for numbered in enumerate(asked.prompts)]), len(images))
    except Exception as error:
        logger.exception("scoring failed")
        raise HTTPException(500, f"{reward.name} failed: {type(error).__name__}: {error}") from None
    return _as_answer(result)


def _decoded(texts: list[str]) -> np.ndarray:
    """uint8 RGB [N, height, width, 3] of PNG files in base64."""
    if not texts:
        return np.zeros((0, 1, 1, 3), np.uint8)
    images = [_opened(index, text) for index, text in enumerate(texts)]
    if len(sizes := {image.size for image in images}) > 1:
        raise HTTPException(422, f"the images of a request must have one size, got {sorted(sizes)}; send them apart")
    width, height = images[0].size
    if len(images) * width * height > MAX_PIXELS:
        raise HTTPException(413, f"{len(images)} images of {width}x{height} are more than {MAX_PIXELS} pixels; send fewer")
    return np.stack([_pixels(index, image) for index, image in enumerate(images)])


def _opened(index: int, text: str) -> Image.Image:
    """The image as its header describes it, before its pixels are unpacked."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
    except Image.DecompressionBombError:
        raise HTTPException(413, f"images.{index} has more than {MAX_PIXELS} pixels") from None
    except Exception:  # base64's, and Pillow's of many types for files that are broken on purpose
        raise HTTPException(422, f"images.{index} is no PNG file in base64") from None
    if image.mode != "RGB":
        raise HTTPException(422, f"images.{index} is a PNG file of the mode {image.mode}; send 8-bit RGB")
    return image


def _pixels(index: int, image: Image.Image) -> np.ndarray:
    try:
        return np.asarray(image)
    except Exception:  # as above
        raise HTTPException(422, f"images.{index} is a PNG file that ends early or is broken") from None


def _prompt(index: int, message: PromptMessage) -> Prompt:
    metadata = json.dumps(message.metadata, sort_keys=True, ensure_ascii=False)
    return Prompt(index, message.prompt, message.negative_prompt, message.target, source="", split="", metadata=metadata)


def _as_answer(result: RewardResult) -> ScoreAnswer:
    failed = np.flatnonzero(np.isnan(result.values)).tolist()
    return ScoreAnswer(
        scores=_nullable(result.values),
        failures={index: result.failures[index] for index in failed if index in result.failures},
        metrics={column: _nullable(values) for column, values in result.metrics.items()},
    )


def _nullable(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
