"""The engine's side of ``ebbflow.rollouts.wire``."""

from __future__ import annotations

import os
import socket
import threading
import time
from importlib.metadata import version
from typing import Any

import torch
from vllm_omni.diffusion import registry
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from ebbflow.compute import use_deterministic_kernels
from ebbflow.models.base import DTYPES
from ebbflow.models.families import load_adapter
from ebbflow.recipe.model import ModelConfig
from ebbflow.rollouts.wire import Header, Task, Tensors, serve_calls
from ebbflow_vllm_omni.pipeline import EbbflowPipeline
from ebbflow_vllm_omni.worker import POLICY, Weights

PACKAGES = ("vllm-omni", "diffusers", "transformers")
"""Of this environment, whose versions certificates name."""


class Engine:
    """vLLM-Omni in this process, and what it can be called for."""

    omni: Omni
    lora: bool = False

    def open(self, header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
        """Load the base model: ``base`` its folder, ``model`` the recipe's, ``threads`` of torch,
        and ``deterministic``. The answer names the versions of this environment.
        """
        torch.set_num_threads(header["threads"])
        if header["deterministic"]:
            use_deterministic_kernels()
        config = ModelConfig.model_validate(header["model"])
        name = load_adapter(config.family).pipeline_class.__name__
        # Ours are images already, with more beside them than the library's own function takes.
        registry._DIFFUSION_POST_PROCESS_FUNCS.pop(name, None)
        # Images to edit arrive encoded with the task; the library's function wants them as files.
        registry._DIFFUSION_PRE_PROCESS_FUNCS.pop(name, None)
        self.omni = Omni(
            model=header["base"],
            dtype=str(DTYPES[config.precision]).removeprefix("torch."),
            custom_pipeline_args={
                "pipeline_class": _import_path_of(EbbflowPipeline),
                "model": header["model"],
            },
            worker_extension_cls=_import_path_of(Weights),
            enforce_eager=True,
            max_num_seqs=1,
            # The fast kernels for attention have no float32.
            **(
                {"diffusion_attention_config": {"default": "TORCH_SDPA"}}
                if config.precision == "float32"
                else {}
            ),
        )
        return {"versions": {package: version(package) for package in PACKAGES}}, {}

    def load_lora(self, header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
        """Take over the LoRA factors of a file."""
        self.lora = True
        answer = self._call_worker("take_lora", header["file"], header["rank"], header["alpha"])
        return answer, {}

    def load_weights(self, header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
        """Take over full weights from a file, the last of a push or not."""
        return {"sha256": self._call_worker("take_weights", header["file"], header["last"])}, {}

    def generate(self, header: Header, tensors: Tensors) -> tuple[Header, Tensors]:
        """The rollouts of a task."""
        task = Task.unpack_message(header, tensors)
        params = OmniDiffusionSamplingParams(
            num_inference_steps=task.sampler.steps,
            lora_request=POLICY if self.lora else None,
            extra_args={"task": task},
        )
        (output,) = self.omni.generate([{"prompt": ""}], params, use_tqdm=False)
        return {}, {"images": output.images[0]} | output.multimodal_output["metadata"]["rl"]

    def _call_worker(self, method: str, *args: Any) -> Any:
        """The result of a worker's method. vLLM-Omni mostly returns what went wrong instead of
        raising it.

        Raises:
            RuntimeError: it failed; names the method.
        """
        (results,) = self.omni.engine.collective_rpc(method, args=args)
        if isinstance(results, dict):
            raise RuntimeError(f"vLLM-Omni could not {method}: {results.get('error', results)}")
        return results[0]


def _import_path_of(what: type) -> str:
    return f"{what.__module__}.{what.__qualname__}"


def main(connection: int, parent: int) -> None:
    """Serve the other end of an inherited socket for as long as the process that holds it lives."""
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    engine = Engine()
    calls = {
        call.__name__: call
        for call in (engine.open, engine.load_lora, engine.load_weights, engine.generate)
    }
    serve_calls(socket.socket(fileno=connection), calls)
    os._exit(0)  # the library's threads would be waited for


def _exit_with_parent(parent: int) -> None:
    """A generation may be under way when the trainer dies; nobody waits for it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
