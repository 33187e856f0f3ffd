"""An engine with a denoising loop of its own behind the certificate's adapter, and one subclass for
each fault that is planted in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ebbflow.certification.adapter import Generated, NotSupportedError, WeightsVersionError
from ebbflow.flow.noise import generate_initial_noise
from ebbflow.flow.sampler import compute_log_prob, compute_transition
from ebbflow.flow.windows import Trajectory
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.rollouts.generate import Rollouts
from ebbflow.training.policy import Policy


class PlainEngine:
    """Does everything right, in the fewest lines."""

    versions = {"plain_engine": "1.0"}

    def __init__(self, setup):
        self.setup = setup
        self.policy = Policy(load_model(setup.base, setup.model), setup.policy, seed=0)
        self.model = self.policy.model
        self.version = -1

    def load(self, weights, version):
        if version < self.version:
            raise WeightsVersionError(f"{version} is older than {self.version}")
        self.version = version
        self.apply_weights(weights)

    def apply_weights(self, weights):
        self.policy.assign_parameters(weights)

    def generate(self, request):
        if request.version != self.version:
            raise WeightsVersionError(f"{request.version} is not {self.version}")
        return Generated(self.denoise(request), self.version)

    def close(self):
        pass

    def compute_sigmas(self, steps):
        return self.model.compute_sigmas(steps)

    def choose_noise(self, request, index):
        return request.generate_noise(index)

    def choose_conditioning(self, conditioning):
        return conditioning

    def scale_std(self):
        return 1.0

    def compute_log_prob(self, transition, next_latents):
        return compute_log_prob(transition, next_latents)

    @torch.no_grad()
    def denoise(self, request):
        sigmas = self.compute_sigmas(request.sampler.steps)
        conditioning = self.choose_conditioning(request.conditioning)
        latents = self.choose_noise(request, 0)
        states = [latents]
        means = []
        log_probs = []
        for step in range(request.sampler.steps):
            sigma = sigmas[step].expand(len(request))
            velocity = predict(self.model, latents, sigma, conditioning, self.setup.precision)
            if not request.plan or step not in request.plan.stochastic:
                latents = latents + velocity * (sigmas[step + 1] - sigmas[step])
                continue
            sampler = request.sampler
            move = compute_transition(sampler.name, latents, velocity, sigmas, step, sampler.eta)
            noise = self.choose_noise(request, step + 1)
            latents = move.mean + self.scale_std() * move.std * noise
            states.append(latents)
            means.append(move.mean)
            log_probs.append(self.compute_log_prob(move, latents))
        if not request.plan:
            return Rollouts(latents, None)
        steps = torch.tensor(request.plan.trained)
        recorded = Trajectory(
            sigmas,
            steps,
            torch.stack(states, 1),
            torch.stack(log_probs, 1),
            torch.stack(means, 1),
        )
        return Rollouts(latents, recorded)


class RecordsNoMeans(PlainEngine):
    def denoise(self, request):
        rollouts = super().denoise(request)
        if rollouts.trajectory is None:
            return rollouts
        return replace(rollouts, trajectory=replace(rollouts.trajectory, means=None))


class OffersFlowSdeAlone(PlainEngine):
    def generate(self, request):
        if request.sampler.name not in ("flow_sde", "ode"):
            raise NotSupportedError(request.sampler.name)
        return super().generate(request)


class KeepsEveryVersion(PlainEngine):
    """Generates with the version that a request names, whatever was pushed since."""

    def __init__(self, setup):
        super().__init__(setup)
        self.kept = {}

    def load(self, weights, version):
        self.kept[version] = weights

    def generate(self, request):
        self.version = request.version
        self.apply_weights(self.kept[request.version])
        return super().generate(request)


class ResumesRight(PlainEngine):
    def generate_in_parts(self, request, cut):
        return self.generate(request)


class IgnoresAdapters(PlainEngine):
    def apply_weights(self, weights):
        if self.setup.policy.train == "full":
            super().apply_weights(weights)


class WrongAlpha(PlainEngine):
    """Takes the rank for the alpha."""

    def apply_weights(self, weights):
        wrong = self.setup.policy.rank / self.setup.policy.alpha
        super().apply_weights(
            {name: v * (wrong if "lora_B" in name else 1) for name, v in weights.items()}
        )


class IgnoresOneLayer(PlainEngine):
    def apply_weights(self, weights):
        layer = "transformer_blocks.0.attn.to_k.lora_B"
        super().apply_weights({n: v * (0 if layer in n else 1) for n, v in weights.items()})


class IgnoresMagnitudes(PlainEngine):
    def apply_weights(self, weights):
        base = self.policy.copies["reference"]
        super().apply_weights(
            {n: base[n] if "magnitude" in n else values for n, values in weights.items()}
        )


class LosesAParameter(PlainEngine):
    def apply_weights(self, weights):
        name = "transformer_blocks.0.attn.to_k.weight"
        lost = {name: self.policy.copies["reference"][name]} if name in weights else {}
        super().apply_weights({**weights, **lost})


class OnePushLate(PlainEngine):
    def apply_weights(self, weights):
        if hasattr(self, "pending"):
            super().apply_weights(self.pending)
        self.pending = weights


class OneRequestLate(PlainEngine):
    def apply_weights(self, weights):
        self.pending = weights

    def denoise(self, request):
        rollouts = super().denoise(request)
        super().apply_weights(self.pending)
        return rollouts


class TakesOlderPushes(PlainEngine):
    def load(self, weights, version):
        self.version = max(version, self.version)
        self.apply_weights(weights)


class AnswersOldRequestsWithNewWeights(PlainEngine):
    def generate(self, request):
        return Generated(self.denoise(request), request.version)


class SkipsSmallUpdates(PlainEngine):
    """Compares with the update before, not with what it has loaded."""

    def apply_weights(self, weights):
        last = getattr(self, "last", None)
        self.last = weights
        if last is not None:
            change = sum((weights[n] - last[n]).square().sum() for n in weights).sqrt()
            size = sum(values.square().sum() for values in weights.values()).sqrt()
            if change < 0.02 * size:
                return
        super().apply_weights(weights)


class ShiftedSchedule(PlainEngine):
    def compute_sigmas(self, steps):
        sigmas = super().compute_sigmas(steps)
        return 1.5 * sigmas / (1 + 0.5 * sigmas)


class NoiseOfAnotherStream(PlainEngine):
    def choose_noise(self, request, index):
        keys = replace(request.keys, seed=request.keys.seed + (index > 0))
        return replace(request, keys=keys).generate_noise(index)


class OtherStart(PlainEngine):
    def choose_noise(self, request, index):
        if index:
            return request.generate_noise(index)
        keys = replace(request.keys, seed=request.keys.seed + 1)
        return generate_initial_noise(request.latent_shape, keys)


class NoiseDependsOnTheBatch(PlainEngine):
    """One generator for the whole batch, seeded by its first sample."""

    def choose_noise(self, request, index):
        noise = request.generate_noise(index)
        rest = torch.Generator().manual_seed(index)
        noise[1:] = torch.randn(noise[1:].shape, generator=rest)
        return noise


class GuidanceTwice(PlainEngine):
    def choose_conditioning(self, conditioning):
        scale = conditioning.guidance
        return replace(conditioning, guidance=scale if scale == 1 else 1 + 2 * (scale - 1))


class DropsNegativePrompts(PlainEngine):
    def choose_conditioning(self, conditioning):
        return conditioning.without_guidance()


class MixesPrompts(PlainEngine):
    def choose_conditioning(self, conditioning):
        return conditioning.select_rows(torch.arange(len(conditioning)).flip(0))


class LargerStd(PlainEngine):
    def scale_std(self):
        return 1.02


class SummedLogProbs(PlainEngine):
    def compute_log_prob(self, transition, next_latents):
        return next_latents[0].numel() * super().compute_log_prob(transition, next_latents)


class OtherNetwork(PlainEngine):
    def __init__(self, setup):
        super().__init__(setup)
        with torch.no_grad():
            for parameter in self.model.transformer.parameters():
                if not parameter.requires_grad or setup.policy.train == "full":
                    parameter.mul_(1.01)

    def apply_weights(self, weights):
        if self.setup.policy.train == "lora":
            super().apply_weights(weights)


class ResumesFromAnotherStep(PlainEngine):
    """Goes on with the noise of the step before."""

    def generate_in_parts(self, request, cut):
        self.cut = cut
        try:
            return self.generate(request)
        finally:
            del self.cut

    def choose_noise(self, request, index):
        return request.generate_noise(index - (index > getattr(self, "cut", index)))


class TruncatesTexts(PlainEngine):
    def encode_prompts(self, prompts):
        short = [replace(prompt, prompt=prompt.prompt[:10]) for prompt in prompts]
        return self.model.encode_prompts(short)


class EncodesToNan(PlainEngine):
    """As a text encoder that overflows in float16."""

    def encode_prompts(self, prompts):
        encoded = self.model.encode_prompts(prompts)
        tensors = {name: values * torch.nan for name, values in encoded.tensors.items()}
        return replace(encoded, tensors=tensors)


class OverflowsOnALongPrompt(PlainEngine):
    """Gives no number for the second prompt, the longer one, and only where it steps as ``ode``."""

    def denoise(self, request):
        rollouts = super().denoise(request)
        if request.plan is None and request.keys.prompt_ids[0] == 1:
            return replace(rollouts, latents=rollouts.latents * torch.nan)
        return rollouts


class EncodesTextsAlone(PlainEngine):
    """Generates nothing at all."""

    def encode_prompts(self, prompts):
        return self.model.encode_prompts(prompts)

    def generate(self, request):
        raise NotSupportedError("it only encodes")


class EncodesTexts(PlainEngine):
    def encode_prompts(self, prompts):
        return self.model.encode_prompts(prompts)


class Crashes(PlainEngine):
    def denoise(self, request):
        raise ZeroDivisionError("planted")
