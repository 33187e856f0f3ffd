"""An engine and the trainer's policy side by side, with the same weights: what every line of the
certificate is measured on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ebbflow.certification.adapter import (
    CertifiedEngine,
    EngineSetup,
    Generated,
    OpenEngine,
    Request,
)
from ebbflow.certification.certificate import Measure
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import broadcast_rows, compute_transition
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models import load_model
from ebbflow.models.base import Conditioning, device_of, predict
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.families import find_family
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.samplers import SAMPLERS
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.rollouts.step_comparison import (
    EFFECT_TOLERANCE,
    MEASURABLE,
    Source,
    StepComparison,
    compare_steps,
)
from ebbflow.training.policy import Policy

TEXTS = (
    "two cats",
    "a red bicycle leans against a blue wall in the evening sun",
    'a sign that says "OPEN"',
    "snow on a mountain, seen from a train that crosses a bridge over a river",
)
"""Of different lengths, because padding is what encoders and batches get wrong."""
NEGATIVE = "blurry, low quality"
SEED = 20
IMAGE_SIDE = 64
"""Pixels of the images to edit."""
EFFECT = 0.2
"""Size of the changes of the weights that are measured, relative to the velocity: above the
rounding of bfloat16, and small enough that a network answers as it does in training.
"""
MIDDLE_SIGMA = 0.6
"""Where that size is measured."""
NO_EFFECT = 1e-6
"""A change below, relative to the velocity, belongs to weights that the velocity does not depend
on, such as those after the last joint attention.
"""


MIN_STEPS = 2
"""Denoising steps, the fewest that a sampler takes."""


class HiddenEffectError(Exception):
    """The rounding of the engine's precision hides what a line wants to measure."""


@dataclass(frozen=True)
class CertificateSettings:
    """How much is generated.

    Attributes:
        steps: denoising steps.
        samples: of each of the two prompts that a line generates.
        adapters: the kinds of adapters, the first of which most lines are measured with.
        updates: weights that are pushed for the drift.
        layers: most layers that are adapted one by one; of more, they are taken by kind and by
            block.
    """

    steps: int = 6
    samples: int = 2
    adapters: tuple[PolicyConfig, ...] = (
        PolicyConfig(train="lora", rank=4, alpha=8),
        PolicyConfig(train="lora", rank=8, alpha=4),
        PolicyConfig(train="lora", rank=16, alpha=16, rslora=True),
        PolicyConfig(train="lora", rank=4, alpha=4, dora=True),
    )
    updates: int = 100
    layers: int = 64


@dataclass
class Bench:
    """An opened engine, and the policy that it must show.

    Attributes:
        version: of the weights that were pushed last.
        knows_noise: whether the engine adds the noise that requests name, once that was measured.
    """

    # The trainer's side is built from the same setup, so that both load the same folder.
    setup: EngineSetup
    settings: CertificateSettings
    engine: CertifiedEngine
    policy: Policy
    prompts: list[Prompt]
    encoded: Conditioning
    version: int = -1
    knows_noise: bool = False

    @property
    def sampler(self) -> SamplerConfig:
        return SamplerConfig(name="flow_sde", steps=self.settings.steps)

    def push_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Push the policy's weights, or others, under the next version."""
        # Counted here: an engine must not be trusted to count its own weights.
        self.version += 1
        self.engine.load(self.copy_weights() if weights is None else weights, self.version)

    def copy_weights(self) -> dict[str, Tensor]:
        """Copy the policy's trained parameters to the CPU."""
        return {
            name: parameter.detach().cpu().float().clone()
            for name, parameter in self.policy.parameters.items()
        }

    def settle_weights(self) -> None:
        """Push the policy's weights so that an engine which is one push or one request late has
        them, too: that is the fault of another line.
        """
        # Two steps are the cheapest request that a sampler takes; its samples are thrown away.
        self.push_weights()
        self.generate(self.build_request([0], 1, steps=MIN_STEPS))
        self.push_weights()
        self.generate(self.build_request([0], 1, steps=MIN_STEPS))

    def restore_base(self) -> None:
        """Give both sides the base model's weights again."""
        # The lines after this one expect the base model, whatever this one has pushed.
        self.policy.assign_parameters(self.policy.copies["reference"])
        self.settle_weights()

    def build_request(
        self,
        rows: Sequence[int],
        samples: int,
        sampler: SamplerConfig | None = None,
        guided: bool = False,
        steps: int | None = None,
        first_sample: int = 0,
    ) -> Request:
        """Build a request for ``samples`` of each of some prompts, by their rows.

        Args:
            steps: denoising steps of a deterministic request that records nothing; None: every
                step but the last is stochastic and recorded.
        """
        # Prompt ids are row numbers, so that a key finds its prompt.
        keys = SampleKeys.number_groups(SEED, list(rows), samples, first_sample)
        index = torch.tensor(keys.prompt_ids)
        encoded = self.encoded if guided else remove_guidance(self.encoded)
        plan: Plan | None = None
        if steps is None:
            sampler = sampler or self.sampler
            # Without the last step, whose noise would stay in the image.
            every = tuple(range(sampler.steps - 1))
            plan = Plan(every, every, with_means=True)
        else:
            sampler = SamplerConfig(name="ode", steps=steps)
        # Requests travel to other processes, so that nothing of them lies on a GPU.
        return Request(
            max(self.version, 0),
            [self.prompts[row] for row in keys.prompt_ids],
            encoded.select_rows(index.to(encoded.device)).to(torch.device("cpu")),
            keys,
            sampler,
            plan,
            self.policy.model.latent_shape,
        )

    def build_requests(
        self, sampler: SamplerConfig | None = None, guided: bool = False
    ) -> list[Request]:
        """Build a request for each of two prompts, so that no request mixes prompts."""
        samples = self.settings.samples
        return [self.build_request([row], samples, sampler, guided) for row in (0, 1)]

    def generate(self, request: Request) -> Generated:
        """Have the engine generate, and complete what it has recorded.

        Raises:
            NotSupportedError: the engine does not offer what the request asks for.
            ValueError: what came back is not what was asked for.
        """
        answer = self.engine.generate(request)
        return replace(answer, rollouts=complete_rollouts(answer.rollouts, request))

    def compare(
        self,
        requests: Iterable[Request],
        base: str | None = None,
        base_conditioning: Sequence[Conditioning] | None = None,
    ) -> StepComparison:
        """Generate some requests of one sampler, and compare their steps with the policy's.

        Args:
            base: the copy of the policy from which the change is measured.
            base_conditioning: what the change is measured from, for each request.
        """
        # Joined before they are compared: the share needs all steps of all samples at once.
        asked = list(requests)
        rollouts = join_rollouts([self.generate(request).rollouts for request in asked])
        return self.compare_rollouts(rollouts, asked, base, base_conditioning)

    def compare_rollouts(
        self,
        rollouts: Rollouts,
        requests: Sequence[Request],
        base: str | None = None,
        base_conditioning: Sequence[Conditioning] | None = None,
    ) -> StepComparison:
        """Compare the steps that requests of one sampler got with the policy's."""
        device = device_of(self.policy.model)
        rollouts = rollouts.move_to(device)
        assert rollouts.trajectory is not None
        conditioning = Conditioning.concatenate([one.conditioning for one in requests]).to(device)
        change: Source | None = None
        if base is not None:
            change = Source(base, conditioning)
        # The weights stay, and what they are conditioned on changes: guidance, or the prompt.
        if base_conditioning is not None:
            change = Source("current", Conditioning.concatenate(base_conditioning).to(device))
        return compare_steps(
            self.policy,
            rollouts.trajectory,
            requests[0].sampler,
            Source("current", conditioning),
            change,
            self.setup.precision,
            self.setup.micro_batch,
        )

    @torch.no_grad()
    def change_weights(self, seed: int, only: Iterable[str] | None = None) -> bool:
        """Change the policy from the base model at random, in such a size that the velocity changes
        by ``EFFECT``; return whether it changes at all.

        Args:
            only: names of the parameters that may change; None: all of them.
        """
        chosen = set(self.policy.parameters if only is None else only)
        base = self.policy.copies["reference"]
        # A generator of its own: a global one would depend on which lines ran before.
        generator = torch.Generator().manual_seed(seed)
        directions: dict[str, Tensor] = {}
        for name, parameter in self.policy.parameters.items():
            noise = torch.randn(parameter.shape, generator=generator)
            # First factors stay: with both factors moved, the product would not be linear in the
            # size. Every other parameter moves by a share of its own size.
            if name in chosen and "lora_A" not in name:
                typical = base[name].float().square().mean().sqrt().item()
                directions[name] = noise * (typical or 1.0)
        # The effect is almost linear in the size, so three corrections suffice.
        size = 0.01
        for _ in range(3):
            self._assign_change(directions, size)
            effect = self._measure_effect()
            if not effect > NO_EFFECT * size:
                self.policy.assign_parameters(base)
                return False
            # Limited, because a layer with a tiny effect would need weights that overflow.
            size *= min(30.0, EFFECT / effect)
        self._assign_change(directions, size)
        return True

    def _assign_change(self, directions: Mapping[str, Tensor], size: float) -> None:
        base = self.policy.copies["reference"]
        changed = {
            name: values + size * directions[name].to(values) if name in directions else values
            for name, values in base.items()
        }
        self.policy.assign_parameters(changed)

    @torch.no_grad()
    def _measure_effect(self) -> float:
        """Measure how far the velocity is from the base model's, relative to that."""
        model = self.policy.model
        device = device_of(model)
        request = self.build_request([0, 1], 1)
        # Pure noise at a middle sigma is no state of a trajectory; for a size it need not be.
        latents = request.generate_noise(0).to(device)
        conditioning = request.conditioning.to(device)
        sigma = torch.full((len(request),), MIDDLE_SIGMA, device=device)
        changed = predict(model, latents, sigma, conditioning)
        with self.policy.use_copy("reference"):
            base = predict(model, latents, sigma, conditioning)
        return ((changed - base).square().mean() / base.square().mean()).sqrt().item()

    def close(self) -> None:
        self.engine.close()


def open_bench(open_engine: OpenEngine, setup: EngineSetup, settings: CertificateSettings) -> Bench:
    """Open an engine for one kind of weights, with the base model's in it.

    Raises:
        NotSupportedError: the engine does not offer this kind.
    """
    # The engine first: one that is refused costs no model.
    engine = open_engine(setup)
    policy = Policy(load_model(setup.base, setup.model), setup.policy, seed=0)
    prompts = build_prompts(setup.model.family)
    encoded = policy.model.encode_prompts(prompts)
    bench = Bench(setup, settings, engine, policy, prompts, encoded)
    bench.push_weights()
    return bench


def build_prompts(family: str) -> list[Prompt]:
    """Build the prompts of a certificate, with images for a family that edits them."""
    facts = find_family(family)
    images: list[bytes | None] = [None] * len(TEXTS)
    if facts is not None and facts.edits_images:
        coarse = np.random.default_rng(SEED).integers(0, 256, (len(TEXTS), 4, 4, 3), dtype=np.uint8)
        # As many as the family needs, each the same: their places tell them apart.
        images = [
            image * facts.min_images
            for image in encode_pngs(coarse.repeat(IMAGE_SIDE // 4, 1).repeat(IMAGE_SIDE // 4, 2))
        ]
    return [
        Prompt(row, text, NEGATIVE, None, "certificate", "train", "{}", image)
        for row, (text, image) in enumerate(zip(TEXTS, images, strict=True))
    ]


def remove_guidance(conditioning: Conditioning) -> Conditioning:
    """Remove guidance, also where it is an input of the network."""
    return replace(conditioning, negative=None, guidance=1.0)


def complete_rollouts(rollouts: Rollouts, request: Request) -> Rollouts:
    """Check what an engine has recorded, and compute the means from the noise that it was given
    where it records none.

    Raises:
        ValueError: it has recorded something else than the plan says.
    """
    trajectory = rollouts.trajectory
    # Nothing is recorded of an evaluation's samples, so there is nothing to check.
    if request.plan is None:
        return Rollouts(rollouts.latents.float(), None)
    if trajectory is None:
        raise ValueError("the engine has recorded no trajectory, although the plan asks for one")
    steps = trajectory.steps.tolist()
    # Other steps would be compared with the policy's at the wrong sigmas.
    if steps != list(request.plan.trained):
        raise ValueError(
            f"the engine has recorded the steps {steps}, the plan has {list(request.plan.trained)}"
        )
    if trajectory.means is None:
        trajectory = replace(trajectory, means=_compute_means(trajectory, request))
    return Rollouts(rollouts.latents.float(), trajectory)


def _compute_means(trajectory: Trajectory, request: Request) -> Tensor:
    """Compute mu = x' - b z of every step, [N, W, ...]."""
    means = []
    for column, step in enumerate(trajectory.steps.tolist()):
        states = trajectory.states[:, trajectory.find_states()[column] :][:, :2]
        # The standard deviation does not depend on the velocity: any will do.
        std = compute_transition(
            request.sampler.name,
            states[:, 0],
            torch.zeros_like(states[:, 0]),
            trajectory.sigmas,
            step,
            request.sampler.eta,
        ).std
        noise = request.generate_noise(step + 1).to(states)
        means.append(states[:, 1] - broadcast_rows(std, noise) * noise)
    return torch.stack(means, 1)


def recover_noise(trajectory: Trajectory, request: Request) -> Tensor:
    """Recover the noise that an engine has added in each step, [N, W, ...], from its own means."""
    assert trajectory.means is not None
    noises = []
    for column, step in enumerate(trajectory.steps.tolist()):
        states = trajectory.states[:, trajectory.find_states()[column] :][:, :2]
        mean = trajectory.means[:, column]
        # Only its standard deviation is used, which depends on the sigmas alone.
        transition = compute_transition(
            request.sampler.name, states[:, 0], mean, trajectory.sigmas, step, request.sampler.eta
        )
        noises.append((states[:, 1] - mean) / broadcast_rows(transition.std, mean))
    return torch.stack(noises, 1)


def measure_steps(comparison: StepComparison, named: str = "") -> list[Measure]:
    """Describe how far the steps are from the policy's: the largest share of what would pass."""
    shifts = torch.stack(comparison.shifts, 1)  # [N, W]
    limits = torch.tensor(comparison.limits).to(shifts)
    relative = shifts / limits
    # ``argmax`` finds a NaN first, so a mean that is no number is the worst one.
    worst = int(relative.argmax()) % len(limits)
    return [
        Measure(
            f"{named}shift of a step's mean, in its standard deviations",
            shifts[:, worst].max().item(),
            high=limits[worst].item(),
        )
    ]


def measure_change(comparison: StepComparison, named: str) -> list[Measure]:
    """Describe which share of a change the engine shows, and how far its steps are from the
    policy's.

    Raises:
        HiddenEffectError: the steps are the policy's up to rounding, and rounding hides the change.
    """
    steps = measure_steps(comparison, f"{named}: ")
    share = comparison.effect.share()
    uncertainty = comparison.effect.uncertainty()
    if uncertainty < MEASURABLE:
        # Where rounding is small, a share that is off by more than a tenth is no rounding.
        tolerance = max(EFFECT_TOLERANCE, uncertainty)
        bounds = (1 - tolerance, 1 + tolerance)
        return [Measure(f"{named}: share that shows", share, *bounds), *steps]
    if all(measure.passes for measure in steps):
        raise HiddenEffectError(
            f"{named}: rounding moves the steps too much to see it; use more samples or steps"
        )
    # An engine with other weights shows another share at every step: the steps have decided.
    return [Measure(f"{named}: share that shows", share), *steps]


def list_stochastic_samplers(steps: int) -> list[SamplerConfig]:
    """List every sampler that has log-probs."""
    names = [name for name, facts in SAMPLERS.items() if facts.eta is not None]
    return [SamplerConfig(name=name, steps=steps) for name in names]
