"""SGLang-diffusion as a rollout engine: a server that somebody has started, behind its own protocol
for post-training (``ebbflow.rollouts.sglang_server``).

What the protocol cannot give is handled here, and docs/online.md says it:

- It takes texts and encodes them itself, and it generates its own noise. A seed goes there, and the
  noise comes back in the recorded latents: the same sample of a run gets the same seed, but no
  other engine, and no other kind of GPU, generates the same noise from it.
- It loads full weights from a folder and returns "success" for names that it does not know. So
  adapters are merged into their layers here, and the server's own checksums are compared with what
  was sent.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import find_sampler
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models.base import DTYPES, Conditioning
from ebbflow.models.families import load_adapter
from ebbflow.models.packed import unpack_tokens
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.choices import SGLANG_SAMPLERS, SamplerConfig
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.rollouts.sglang_server import MODULE, Answer, SglangServer
from ebbflow.rollouts.vllm_omni import EngineError
from ebbflow.seeding import derive_seed
from ebbflow.stage import StageContext

logger = logging.getLogger(__name__)
URL = "EBBFLOW_SGLANG_URL"
DEFAULT_URL = "http://127.0.0.1:30000"
FOLDER = "EBBFLOW_SGLANG_FOLDER"
"""Where weights are handed over: a folder that the server sees under the same path."""


class Sglang:
    """``ebbflow.rollouts.engine.Engine`` on a server of SGLang.

    After an error it is closed, because which weights the server then has is not known.

    Attributes:
        takes_noise: the server generates noise of its own.
        takes_texts: ``generate`` gets the prompts, too.
        size: height and width of the images.
        samplers: those that the server has.

    Args:
        base: the base-model folder; the server must have been started with the same one.
    """

    takes_noise = False
    takes_texts = True
    samplers = tuple(SGLANG_SAMPLERS)

    def __init__(self, ctx: StageContext, base: Path) -> None:
        self.base = base
        self.policy = ctx.recipe.policy
        model = ctx.recipe.model
        # A recipe may leave the size to the family; those that are served here all have one.
        adapter = cast(type[PipelineModel], load_adapter(model.family))
        height, width = adapter.default_size
        self.size = (model.height or height, model.width or width)
        self.micro_batch = ctx.config.micro_batch
        self.dtype = DTYPES[ctx.config.rollout_precision or model.precision]
        self.server = SglangServer(os.environ.get(URL, DEFAULT_URL))
        # The folder that was pushed last: where the server returns to if a later push fails.
        self._pushed: tempfile.TemporaryDirectory[str] | None = None
        self._is_closed = False
        logger.info(
            "engine sglang at %s: the noise is the server's own, so that samples are not those of"
            " another engine, nor to the bit those of another kind of GPU",
            self.server.url,
        )

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """As ``Engine.load``: adapters are merged into the weights of their layers.

        Raises:
            EngineError: the server has not taken them, or has other weights afterwards.
        """
        self._require_open()
        # The folder's path travels and not its content: the protocol's own tensors are pickles.
        folder = tempfile.TemporaryDirectory(
            prefix="ebbflow_weights_", dir=os.environ.get(FOLDER, tempfile.gettempdir())
        )
        try:
            whole = self._merge_weights(weights)
            Path(folder.name, MODULE).mkdir()
            save_file(whole, Path(folder.name, MODULE, "model.safetensors"))
            # The server may be another user.
            Path(folder.name).chmod(0o755)
            self.server.update_weights(folder.name)
            # It skips the names that it does not know and reports success.
            self.server.check_weights(whole)
        except BaseException:
            folder.cleanup()
            self.close()
            raise
        # Only now: had the push failed, the server would have read the old folder again.
        if self._pushed is not None:
            self._pushed.cleanup()
        self._pushed = folder

    def _merge_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters of the network by diffusers' names, in the server's data type."""
        if self.policy.train == "full":
            return {name: values.to(self.dtype).contiguous() for name, values in weights.items()}
        # Only the layers that are adapted travel; all others have the base model's weights still.
        pairs = {
            name.partition(".lora_")[0] + ".weight": (
                values,
                weights[name.replace("lora_A", "lora_B")],
            )
            for name, values in weights.items()
            if "lora_A" in name
        }
        # W + s B A in float32, rounded once.
        scale = self.policy.adapter_scale
        return {
            name: (values.float() + scale * (pairs[name][1] @ pairs[name][0])).to(self.dtype)
            for name, values in _read_base_weights(self.base / MODULE, set(pairs))
        }

    def generate(
        self,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None = None,
        *,
        prompts: Sequence[Prompt],
    ) -> tuple[Rollouts, np.ndarray]:
        """As ``Engine.generate``; of ``conditioning`` only the guidance is used.

        Args:
            prompts: [N], which the server encodes.

        Raises:
            EngineError: the server has failed, or has answered something else than was asked for.
        """
        self._require_open()
        # One request per prompt: the protocol takes one text.
        try:
            parts = [
                self._generate_run(rows, conditioning, keys, sampler, plan, prompts[rows.start])
                for rows in _list_runs(keys, self.micro_batch)
            ]
        except BaseException:
            self.close()
            raise
        rollouts = join_rollouts([part for part, _ in parts])
        images = np.concatenate([part_images for _, part_images in parts])
        return rollouts.move_to(conditioning.device), images

    def close(self) -> None:
        """The server goes on running; the weights that it has read are deleted."""
        self._is_closed = True
        if self._pushed is not None:
            self._pushed.cleanup()
            self._pushed = None

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("sglang was closed, after an error or by its owner; open a new one")

    def _generate_run(
        self,
        rows: slice,
        conditioning: Conditioning,
        keys: SampleKeys,
        sampler: SamplerConfig,
        plan: Plan | None,
        prompt: Prompt,
    ) -> tuple[Rollouts, np.ndarray]:
        """Generate samples of one prompt with successive numbers."""
        count = rows.stop - rows.start
        # The first state of every recorded step, the one after it, and the final latents.
        trained = plan.trained if plan else ()
        states = sorted({state for step in trained for state in (step, step + 1)})
        returned = sorted({*states, sampler.steps})
        body = {
            "seed": _derive_server_seed(keys, rows.start),
            "num_outputs_per_prompt": count,
            "height": self.size[0],
            "width": self.size[1],
            **_describe_guidance(conditioning, prompt),
            **_describe_steps(sampler, plan),
            "rollout_return_dit_trajectory": True,
            "rollout_return_step_indices": returned,
            "suppress_logs": True,
        }
        answers = self.server.generate(body)
        if len(answers) != count:
            raise EngineError(f"{count} samples were asked for, and SGLang returned {len(answers)}")
        # Of every sample on its own, in the order of the seeds.
        samples = [self._read_sample(answer, sampler, plan, returned) for answer in answers]
        # The last state that was asked for is that after all steps.
        final = torch.stack([latents[-1] for latents, _, _ in samples])
        images = np.stack([_read_pixels(answer["generated_output"]) for answer in answers])
        if plan is None:
            return Rollouts(final, None), images
        positions = [returned.index(state) for state in states]
        means = [means for _, _, means in samples if means is not None]
        trajectory = Trajectory(
            sigmas=answers[0]["dit_trajectory"]["sigmas"].float(),
            steps=torch.tensor(trained),
            states=torch.stack([latents[positions] for latents, _, _ in samples]),
            log_probs=torch.stack([log_probs for _, log_probs, _ in samples]),
            means=torch.stack(means) if means else None,
        )
        return Rollouts(final, trajectory), images

    def _read_sample(
        self, answer: Answer, sampler: SamplerConfig, plan: Plan | None, returned: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read latents [len(returned), ...], log-probs [W] and means [W, ...] of a sample.

        Raises:
            EngineError: there are more or fewer than were asked for.
        """
        trajectory = answer.get("dit_trajectory") or {}
        latents = trajectory.get("latents")
        if not isinstance(latents, Tensor) or len(latents) != len(returned):
            found = None if latents is None else len(latents)
            raise EngineError(f"SGLang returned {found} states, and {len(returned)} were asked for")
        # In float32, as all trajectories, whatever the server denoises in.
        latents = self._restore_latents(latents.float())
        if plan is None:
            return latents, latents.new_empty(0), None
        log_probs = answer.get("rollout_log_probs")
        if not isinstance(log_probs, Tensor) or len(log_probs) != sampler.steps:
            raise EngineError(f"SGLang returned no log-prob for each of {sampler.steps} steps")
        # Of all steps; those without noise have 0.
        trained = list(plan.trained)
        means: Tensor | None = None
        if plan.with_means:
            recorded = answer["rollout_debug_tensors"]["rollout_prev_sample_means"]
            means = self._restore_latents(recorded[trained].float())
        return latents, log_probs[trained].float(), means

    def _restore_latents(self, values: Tensor) -> Tensor:
        """Bring latents [K, ...] into the layout of our adapters, [K, C, H, W].

        Raises:
            EngineError: they are in a layout that is not known.
        """
        if values.ndim == 4:
            return values
        # [K, C, 1, H, W]: an image as a video of one frame.
        if values.ndim == 5 and values.shape[2] == 1:
            return values[:, :, 0]
        # [K, S, 4 C]: tokens of 2 x 2 latents.
        if values.ndim == 3:
            # How many pixels a latent has is in no answer; it follows from the number of tokens.
            tokens = values.shape[1]
            pixels = self.size[0] * self.size[1]
            scale = math.isqrt(pixels // (4 * tokens))
            height = self.size[0] // scale
            width = self.size[1] // scale
            if height * width == 4 * tokens:
                return unpack_tokens(values, (values.shape[2] // 4, height, width))
        raise EngineError(f"SGLang returned latents of shape {list(values.shape[1:])}")


def _describe_guidance(conditioning: Conditioning, prompt: Prompt) -> dict[str, Any]:
    """Both names of the scale, as pipelines differ in which one is the classifier-free one."""
    scale = float(conditioning.guidance)
    # A scale without a negative prompt is an input of the network, as of FLUX.1.
    is_guided = conditioning.negative is not None and scale != 1
    body: dict[str, Any] = {
        "prompt": prompt.prompt,
        "guidance_scale": scale,
        "true_cfg_scale": scale if is_guided else 1.0,
    }
    if is_guided:
        body["negative_prompt"] = prompt.negative_prompt
    return body


def _describe_steps(sampler: SamplerConfig, plan: Plan | None) -> dict[str, Any]:
    """The sampler and its stochastic steps, of ``SchedulerRLMixin.flow_sde_sampling``.

    Raises:
        EngineError: the server has no such sampler, as for a validation with another one.
    """
    if sampler.name not in SGLANG_SAMPLERS:
        raise EngineError(
            f"SGLang has the samplers {', '.join(SGLANG_SAMPLERS)}, not {sampler.name}; take one of"
            " them as sampler and evaluation.sampler, or set engine: diffusers"
        )
    facts = find_sampler(sampler.name)
    eta = facts.eta if sampler.eta is None else sampler.eta
    # Never the last step: its noise would stay in the image.
    stochastic = list(plan.stochastic) if plan else list(range(sampler.steps - 1))
    return {
        "num_inference_steps": sampler.steps,
        "rollout": True,
        "rollout_sde_type": SGLANG_SAMPLERS[sampler.name],
        "rollout_noise_level": eta or 0.0,
        "rollout_sde_step_indices": stochastic,
        # -mean((x' - mu)^2), as CPS is published; the server's ``ode`` has no other one.
        "rollout_log_prob_no_const": not (sampler.is_stochastic and facts.log_prob_is_density),
        "rollout_debug_mode": bool(plan and plan.with_means),
    }


def _derive_server_seed(keys: SampleKeys, row: int) -> int:
    """The seed of a sample: the server's generators of a request have seed, seed + 1, ..., and so a
    sample has the same one alone and among others.
    """
    # 62 bits: the number of a sample must not lead beyond 2^63.
    first = derive_seed(keys.seed, "sglang", int(keys.prompt_ids[row])) >> 1
    return first + int(keys.samples[row])


def _list_runs(keys: SampleKeys, limit: int) -> Iterator[slice]:
    """Cut the samples into runs of one prompt with successive numbers, at most ``limit`` long."""
    start = 0
    for row in range(1, len(keys) + 1):
        continues = (
            row < len(keys)
            and row - start < limit
            and keys.prompt_ids[row] == keys.prompt_ids[row - 1]
            and keys.samples[row] == keys.samples[row - 1] + 1
        )
        if not continues:
            yield slice(start, row)
            start = row


def _read_base_weights(folder: Path, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Read some parameters of the base model.

    Raises:
        EngineError: one is missing.
    """
    missing = set(names)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(missing & set(tensors.keys())):
                missing.discard(name)
                yield name, tensors.get_tensor(name)
    if missing:
        raise EngineError(f"{folder} has no {sorted(missing)[0]}, which an adapter changes")


def _read_pixels(values: Tensor) -> np.ndarray:
    """An image [3, H, W], or [3, 1, H, W], between 0 and 1, as uint8 [H, W, 3]."""
    # The server has already clamped it.
    image = values.float().reshape(3, *values.shape[-2:])
    return (image * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
