"""The requests and answers of SGLang-diffusion's post-training API, over HTTP.

As read in sgl-project/sglang, python/sglang/multimodal_gen/runtime: ``POST /rollout/generate`` in
entrypoints/post_training/rollout_api.py at 078e5e2 (#21204, #22604), its fields in io_struct.py at
00e1106, tensors in utils.py at 067e8f4, the weights' endpoints in weights_api.py at 0730031, and
the check of weights in post_training/tensor_update_checker.py at 08f335d.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import torch
from safetensors.torch import load
from torch import Tensor

from ebbflow.rollouts.vllm_omni import EngineError

TIMEOUT_SECONDS = 3600.0
"""A batch of videos takes long; a server that never answers must not hold a stage for good."""
SHOWN = 500
"""Characters of a refusal that an error repeats."""
MODULE = "transformer"
"""The part of the pipeline whose weights are trained."""

Answer = Mapping[str, Any]


class SglangServer:
    """One server.

    Args:
        url: such as ``http://127.0.0.1:30000``.

    Raises:
        EngineError: the URL holds a password, which logs and errors would repeat.
    """

    def __init__(self, url: str) -> None:
        if "@" in urlsplit(url).netloc:
            raise EngineError(
                "EBBFLOW_SGLANG_URL holds a user or a password, which SGLang does not ask for; name"
                " the server alone, such as http://127.0.0.1:30000"
            )
        self.url = url.rstrip("/")
        # The server is a machine of the run; a proxy for the internet does not know it.
        self._opener = build_opener(ProxyHandler({}))

    def generate(self, body: Mapping[str, Any]) -> list[Answer]:
        """Generate the samples of one prompt; the answer has one entry per sample.

        Raises:
            EngineError: the server does not answer, refuses, or answers with something else.
        """
        path = "/rollout/generate"
        import msgpack  # of the extra flyte: the core of the library does without it

        # Numbers, texts and bytes alone: reading msgpack runs no code.
        content = self._post(path, body, msgpack.unpackb)
        if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
            raise EngineError(f"{self.url}{path}: the answer is no list of samples")
        return [_read_tensors(one) for one in content]

    def update_weights(self, folder: str) -> None:
        """Have the server read ``folder/transformer/*.safetensors``.

        Raises:
            EngineError: it could not.
        """
        body = {"model_path": folder, "flush_cache": True, "target_modules": [MODULE]}
        self._post_command("/update_weights_from_disk", body)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Check that the server's network has these weights, in the data types that they have here.

        Raises:
            EngineError: it has others, or no parameters of these names.
        """
        expected = {name: compute_tensor_sha256(values) for name, values in weights.items()}
        body = {"target_module": MODULE, "expected_named_tensors_sha256": expected}
        self._post_command("/update_weights_from_tensor_checker", body)

    def _post_command(self, path: str, body: Mapping[str, Any]) -> None:
        # A refusal may come with status 200, and then says so in ``success``.
        answer = self._post(path, body, json.loads)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError(f"{self.url}{path}: the server has answered {str(answer)[:SHOWN]}")

    def _post(self, path: str, body: Mapping[str, Any], decode: Callable[[bytes], Any]) -> Any:
        request = Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                content: bytes = response.read()
        except HTTPError as error:
            # FastAPI explains it in ``detail``; a proxy in a page of HTML.
            refusal = error.read(SHOWN).decode(errors="replace")
            raise EngineError(f"{self.url}{path}: HTTP {error.code}: {refusal}") from None
        # HTTPException: the server has died in the middle of its answer.
        except (URLError, OSError, HTTPException) as error:
            raise EngineError(
                f"{self.url}{path}: no answer from SGLang ({error!r}). Start the server, and set"
                " EBBFLOW_SGLANG_URL to its address; or set engine: diffusers"
            ) from None
        try:
            return decode(content)
        except ValueError as error:
            raise EngineError(
                f"{self.url}{path}: the answer cannot be read ({error}); it begins with"
                f" {content[:SHOWN]!r}. Is EBBFLOW_SGLANG_URL the address of SGLang?"
            ) from None


def compute_tensor_sha256(values: Tensor) -> str:
    """Hash a tensor as the server does: its data type, its shape, its bytes."""
    # NumPy has no bfloat16, so the elements are hashed as bytes.
    plain = values.detach().cpu().contiguous()
    digest = hashlib.sha256(str(plain.dtype).encode())
    digest.update(repr(tuple(plain.shape)).encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_tensors(value: Any) -> Any:
    """Replace each serialised tensor of an answer by the tensor: base64 of a safetensors file."""
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load(base64.b64decode(value["data"]))["t"]
        return {name: _read_tensors(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_read_tensors(part) for part in value]
    return value
