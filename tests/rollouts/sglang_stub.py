"""A stub of SGLang's server for post-training, around one of our models: its request fields and
answers, its schedule of random numbers, and its formulas of a step, written from

- sgl-project/sglang, python/sglang/multimodal_gen/runtime, entrypoints/post_training:
  rollout_api.py at 078e5e2, io_struct.py at 00e1106, utils.py at 067e8f4, weights_api.py at 0730031
- the same, post_training: scheduler_rl_mixin.py at 1e7c586, rollout_denoising_mixin.py at 0470d4f,
  weights_updater.py at 5667858, tensor_update_checker.py at 08f335d
- the same, pipelines_core/stages/input_validation.py at 03b8c17 (seeds)

SGLang itself generated nothing beside these tests. Version 0.5.23 was asked once to take weights
(docs/online.md): it skips the names of ``FusesProjections`` as that does.
"""

from __future__ import annotations

import base64
import json
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgpack
import torch
from safetensors.torch import load_file, save

from ebbflow.data.prompts import Prompt
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.models.packed import PackedPipelineModel, pack_latents
from ebbflow.rollouts.sglang_server import compute_tensor_sha256

FIELDS = frozenset(
    [
        "prompt",
        "negative_prompt",
        "seed",
        "generator_device",
        "width",
        "height",
        "num_inference_steps",
        "num_outputs_per_prompt",
        "guidance_scale",
        "true_cfg_scale",
        "num_frames",
        "fps",
        "rollout",
        "rollout_sde_type",
        "rollout_noise_level",
        "rollout_log_prob_no_const",
        "rollout_debug_mode",
        "rollout_return_denoising_env",
        "rollout_return_dit_trajectory",
        "rollout_sde_step_indices",
        "rollout_return_step_indices",
        "image_path",
        "suppress_logs",
        "extra_sampling_params",
    ]
)
"""Of ``RolloutRequest`` in io_struct.py."""


class Stub:
    """A right server; subclasses are wrong ones.

    Attributes:
        requests: (path, body) of every request.
        declares_bytes: length that the header of an answer says; default: its own.
    """

    declares_bytes: int | None = None

    def __init__(self, base, config):
        self.model = load_model(base, config)
        self.requests = []

    def answer(self, path, body):
        self.requests.append((path, body))
        if path == "/rollout/generate":
            # The server ignores what it does not know, and a misspelt field would have no effect.
            assert set(body) <= FIELDS, set(body) - FIELDS
            return msgpack.packb(self.generate(body))
        if path == "/update_weights_from_disk":
            return json.dumps(self.update_weights(body)).encode()
        if path == "/update_weights_from_tensor_checker":
            return json.dumps(self.check_weights(body)).encode()
        raise KeyError(path)

    # Weights

    def update_weights(self, body):
        (module,) = body["target_modules"]
        for file in sorted(Path(body["model_path"], module).glob("*.safetensors")):
            self.apply_weights(load_file(file))
        return {"success": True, "message": f"Updated 1 modules ({module})."}

    @torch.no_grad()
    def apply_weights(self, weights):
        parameters = dict(self.model.transformer.named_parameters())
        for name, values in weights.items():
            # weights_updater.load_weights_into_model: unknown names are skipped
            if name in parameters:
                parameters[name].copy_(values)

    def list_parameters(self):
        return dict(self.model.transformer.named_parameters())

    def check_weights(self, body):
        parameters = self.list_parameters()
        expected = body["expected_named_tensors_sha256"]
        wrong = [
            name
            for name, digest in expected.items()
            if name not in parameters or compute_tensor_sha256(parameters[name]) != digest
        ]
        message = f"checksum mismatch for {len(wrong)} tensor(s): {wrong[:5]}" if wrong else ""
        return {"success": not wrong, "message": message}

    # Samples

    def compute_sigmas(self, steps):
        return self.model.compute_sigmas(steps)

    def encode(self, body):
        guided = body["true_cfg_scale"] != 1
        negative = body["negative_prompt"] if guided else ""
        prompt = Prompt(0, body["prompt"], negative, None, "stub", "train", "{}")
        encoded = self.model.encode_prompts([prompt])
        if guided:
            return self.set_guidance(encoded, body["true_cfg_scale"])
        return encoded.without_guidance()

    def set_guidance(self, encoded, scale):
        assert encoded.guidance == scale
        return encoded

    @torch.no_grad()
    def generate(self, body):
        count = body["num_outputs_per_prompt"]
        generators = [torch.Generator().manual_seed(body["seed"] + i) for i in range(count)]
        shape = self.model.latent_shape
        draw = lambda: torch.stack([torch.randn(shape, generator=g) for g in generators])  # noqa: E731
        sigmas = self.compute_sigmas(body["num_inference_steps"])
        encoded = self.encode(body).select_rows(torch.zeros(count, dtype=torch.int64))
        latents = draw()
        states = [latents]
        log_probs = []
        means = []
        # DenoisingStage: one generator for each sample, in the order of the steps.
        for step in range(len(sigmas) - 1):
            velocity = predict(self.model, latents, sigmas[step].expand(count), encoded)
            kind = body["rollout_sde_type"]
            if step not in body["rollout_sde_step_indices"]:
                kind = "ode"
            mean, std = self.take_step(kind, latents, velocity, sigmas, step, body)
            noise = torch.zeros_like(mean) if kind == "ode" else draw()
            latents = mean + std * noise
            states.append(latents)
            means.append(mean)
            log_probs.append(self.score(noise, std, body, kind))
        return [self.pack(body, i, sigmas, states, log_probs, means) for i in range(count)]

    def take_step(self, kind, sample, velocity, sigmas, step, body):
        """flow_sde_sampling of scheduler_rl_mixin.py."""
        sigma = sigmas[step]
        after = sigmas[step + 1]
        dt = after - sigma
        level = body["rollout_noise_level"]
        # A step that rollout_sde_step_indices leaves out is Euler's.
        if kind == "ode":
            return sample + dt * velocity, torch.zeros(())
        if kind == "cps":
            std = after * math.sin(level * math.pi / 2)
            estimate = sample + velocity * (1 - sigma)
            clean = sample - sigma * velocity
            return clean * (1 - after) + estimate * torch.sqrt(after**2 - std**2), std
        # sigma_max of prepare_rollout: the second sigma, where the first is 1.
        below_one = sigmas[1] if torch.isclose(sigma, torch.tensor(1.0)) else sigma
        std = torch.sqrt(sigma / (1 - below_one)) * level
        mean = sample * (1 + std**2 / (2 * sigma) * dt)
        mean = mean + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, std * torch.sqrt(-dt)

    def score(self, noise, std, body, kind):
        # From the noise, not from x' - mean: rounding of x' does not show.
        squares = -((noise * std) ** 2)
        if body["rollout_log_prob_no_const"] or kind == "ode":
            return squares.flatten(1).mean(1)
        densities = squares / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
        return densities.flatten(1).mean(1)

    def pack(self, body, index, sigmas, states, log_probs, means):
        """RolloutResponse, one of the samples of a batch."""
        kept = [states[state][index] for state in body["rollout_return_step_indices"]]
        # The decoding stage returns [3, 1, H, W] between 0 and 1.
        images = torch.from_numpy(self.model.decode_latents(states[-1][index : index + 1]))
        debug = {"rollout_prev_sample_means": self.lay_out([one[index] for one in means])}
        return {
            "request_id": "stub",
            "prompt": body["prompt"],
            "seed": body["seed"],
            "generated_output": serialize(images[0].permute(2, 0, 1)[:, None].float() / 255),
            "rollout_log_probs": serialize(torch.stack([one[index] for one in log_probs])),
            "rollout_debug_tensors": (
                {name: serialize(values) for name, values in debug.items()}
                if body["rollout_debug_mode"]
                else None
            ),
            "dit_trajectory": {
                "latents": serialize(self.lay_out(kept)),
                "timesteps": serialize(1000 * sigmas[:-1]),
                "sigmas": serialize(sigmas),
            },
        }

    def lay_out(self, latents):
        """Qwen-Image and FLUX denoise tokens of 2 x 2 latents."""
        stacked = torch.stack(latents)
        packed = isinstance(self.model, PackedPipelineModel)
        return pack_latents(stacked) if packed else stacked


def serialize(values):
    """``_maybe_serialize`` of utils.py."""
    values = values.detach().contiguous()
    return {
        "__tensor__": True,
        "data": base64.b64encode(save({"t": values})).decode(),
        "shape": list(values.shape),
        "dtype": str(values.dtype),
    }


class IgnoresUpdates(Stub):
    """Reports success, and checks nothing: as a server whose LoRA applies to no layer."""

    def apply_weights(self, weights):
        pass

    def check_weights(self, body):
        return {"success": True, "message": ""}


class OneUpdateLate(Stub):
    """Generates with the weights before the last ones."""

    pending = None

    def apply_weights(self, weights):
        if self.pending is not None:
            super().apply_weights(self.pending)
        self.pending = weights

    def check_weights(self, body):
        return {"success": True, "message": ""}


class FusesProjections(Stub):
    """Has no parameters of the names that are sent, skips them, and says so when it is asked."""

    def apply_weights(self, weights):
        super().apply_weights({name: v for name, v in weights.items() if ".to_q." not in name})

    def list_parameters(self):
        return {name: v for name, v in super().list_parameters().items() if ".to_q." not in name}


class OtherSchedule(Stub):
    def compute_sigmas(self, steps):
        sigmas = super().compute_sigmas(steps)
        return 1.5 * sigmas / (1 + 0.5 * sigmas)


class SwappedGuidance(Stub):
    """Steers towards the negative prompt."""

    def set_guidance(self, encoded, scale):
        positive = encoded.without_guidance()
        return replace(encoded, tensors=encoded.negative.tensors, negative=positive)


class OtherLogProbs(Stub):
    """Sums over the elements of a latent instead of taking their mean."""

    def score(self, noise, std, body, kind):
        return noise[0].numel() * super().score(noise, std, body, kind)


class LosesSamples(Stub):
    def generate(self, body):
        return super().generate(body)[1:]


@contextmanager
def serve(stub):
    """Serve a stub on a free port; the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                content = stub.answer(self.path, body)
                status = 200
            except Exception as error:
                content = json.dumps({"detail": repr(error)}).encode()
                status = 500
            self.send_response(status)
            self.send_header("Content-Length", str(stub.declares_bytes or len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
