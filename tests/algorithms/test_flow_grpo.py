"""The policy gradient against closed forms, all in float64."""

import math

import numpy as np
import pytest
import torch

from ebbflow.algorithms import flow_grpo
from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.algorithms.base import TrajectoryTerms
from ebbflow.algorithms.registry import ALGORITHMS
from ebbflow.flow.transition import Transition, log_prob, sample, transition
from ebbflow.recipe.algorithms import FlowGRPO
from ebbflow.recipe.stages import Advantages

EPSILON = 0.1
SIGMAS = torch.linspace(1, 0, 7, dtype=torch.float64)


def gaussian(mean, std):
    """A step with that mean, [M, D], and standard deviation, with the rest of a Flow-SDE transition around it."""
    std = torch.as_tensor(std, dtype=torch.float64)
    return Transition("flow_sde", mean, std.expand(len(mean)), std, torch.tensor(-0.1, dtype=torch.float64))


def terms_with_ratio(ratio, advantage):
    """One term whose ratio and advantage are given, and the leaf that its log-probability is."""
    leaf = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    step = gaussian(torch.zeros(1, 2, dtype=torch.float64), 1.0)
    zero = torch.zeros(1, dtype=torch.float64)
    return TrajectoryTerms(step, leaf, zero, {}, torch.tensor([advantage], dtype=torch.float64)), leaf


@pytest.mark.parametrize(
    ("advantage", "ratio", "counted", "trained", "clip"),
    [
        (2.0, 1.05, 1.05, True, None),
        (2.0, 1.30, 1.10, False, "clip/up"),
        (2.0, 0.70, 0.70, True, None),
        (-2.0, 1.30, 1.30, True, None),
        (-2.0, 0.70, 0.90, False, "clip/down"),
        (-2.0, 0.95, 0.95, True, None),
    ],
)
def test_ppo_clip_by_cases(advantage, ratio, counted, trained, clip):
    terms, leaf = terms_with_ratio(ratio, advantage)
    loss, metrics = flow_grpo.loss(terms, FlowGRPO(clip_range=EPSILON, reference_weight=0))
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * counted, abs=1e-12)
    assert leaf.grad.item() == pytest.approx(-advantage * ratio if trained else 0.0, abs=1e-12)
    assert [name for name in ("clip/up", "clip/down") if metrics[name].item()] == ([clip] if clip else [])
    assert metrics["ratio/mean"].item() == pytest.approx(ratio)
    assert metrics["ratio/deviation"].item() == pytest.approx(abs(ratio - 1))
    assert metrics["kl/old"].item() == pytest.approx(math.log(ratio) ** 2 / 2)


def random_terms(sampler="flow_sde", rows=6, off=0.0, reference=False):
    """Terms of a random velocity (a leaf) at random steps; ``off`` moves the velocity away from the one that sampled."""
    generator = torch.Generator().manual_seed(0)
    latents, velocity, noise, other, drift = (torch.randn(rows, 2, 3, dtype=torch.float64, generator=generator) for _ in range(5))
    steps = torch.arange(rows) % 5
    old = transition(sampler, latents, velocity, SIGMAS, steps)
    after = sample(old, noise)
    advantage = torch.randn(rows, dtype=torch.float64, generator=generator)
    leaf = (velocity + off * drift).requires_grad_()

    def terms(values):
        step = transition(sampler, latents, values, SIGMAS, steps)
        copies = {"reference": transition(sampler, latents, other, SIGMAS, steps)} if reference else {}
        return TrajectoryTerms(step, log_prob(step, after), log_prob(old, after).detach(), copies, advantage)

    return terms, leaf


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde", "cps"])
def test_gradient_at_ratio_one_is_the_policy_gradient(sampler):
    terms, leaf = random_terms(sampler)
    loss, metrics = flow_grpo.loss(terms(leaf), FlowGRPO(reference_weight=0))
    (gradient,) = torch.autograd.grad(loss, leaf)
    here = terms(leaf)
    (expected,) = torch.autograd.grad((-here.advantage * here.log_prob).mean(), leaf)
    assert metrics["ratio/deviation"].item() == 0
    assert expected.abs().max() > 1e-3
    assert (gradient - expected).abs().max() < 1e-12


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde", "cps"])
def test_finite_differences(sampler):
    terms, leaf = random_terms(sampler, off=0.05, reference=True)
    config = FlowGRPO(clip_range=0.9, reference_weight=0.5)
    assert flow_grpo.loss(terms(leaf), config)[1]["ratio/deviation"].item() > 1e-3
    assert torch.autograd.gradcheck(lambda values: flow_grpo.loss(terms(values), config)[0], (leaf,), eps=1e-6, atol=1e-7)


def test_linear_gaussian_policy_has_the_gradient_of_reinforce():
    # x ~ N(theta, b^2 I), R = w x: the gradient of E[R] is w. GRPO subtracts a mean that contains the sample itself, hence
    # (G - 1) / G, and takes log-probs as means over D elements, hence 1 / D.
    groups, size, elements, std = 50_000, 4, 8, 0.7
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, dtype=torch.float64, generator=generator)
    theta = torch.randn(elements, dtype=torch.float64, generator=generator).requires_grad_()
    count = groups * size
    step = gaussian(theta.expand(count, elements), std)
    after = sample(step, torch.randn(count, elements, dtype=torch.float64, generator=generator)).detach()
    prompt_ids = np.repeat(np.arange(groups), size)
    advantage = compute_advantages((after @ weights).numpy(), prompt_ids, Advantages(std="none", clip=1e6)).values
    score = log_prob(step, after)
    terms = TrajectoryTerms(step, score, score.detach(), {}, torch.from_numpy(advantage).double())
    loss, _ = flow_grpo.loss(terms, FlowGRPO(reference_weight=0))
    (gradient,) = torch.autograd.grad(loss, theta)
    expected = -weights * (size - 1) / size / elements
    assert torch.cosine_similarity(gradient, expected, dim=0) > 0.999
    assert (gradient.norm() / expected.norm()).item() == pytest.approx(1, abs=0.02)


def test_importance_identities():
    # Under the old policy the likelihood ratio has mean 1; the ratio of mean log-probs that the loss clips stays below.
    count, elements, std = 400_000, 4, 0.5
    generator = torch.Generator().manual_seed(0)
    shift = 0.12 * torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    old = gaussian(torch.zeros(count, elements, dtype=torch.float64), std)
    after = sample(old, torch.randn(count, elements, dtype=torch.float64, generator=generator))
    step = gaussian(shift.expand(count, elements), std)
    terms = TrajectoryTerms(step, log_prob(step, after), log_prob(old, after), {}, torch.ones(count, dtype=torch.float64))
    likelihood = (elements * (terms.log_prob - terms.old_log_prob)).exp().mean().item()
    assert likelihood == pytest.approx(1, abs=5e-3)
    _, metrics = flow_grpo.loss(terms, FlowGRPO(reference_weight=0))
    distance = (shift**2).sum().item() / (2 * std**2 * elements)
    expected = math.exp(-distance * (1 - 1 / elements))
    assert expected < 0.97
    assert metrics["ratio/mean"].item() == pytest.approx(expected, abs=1e-3)


def test_kl_is_the_divergence_of_two_gaussians_per_element():
    terms, leaf = random_terms(reference=True)
    here = terms(leaf)
    reference, std = here.copies["reference"], here.transition.std.view(-1, 1, 1)
    normal = torch.distributions.Normal
    divergence = torch.distributions.kl_divergence(normal(here.transition.mean, std), normal(reference.mean, std))
    assert torch.allclose(flow_grpo.kl(here), divergence.flatten(1).mean(1), rtol=1e-12)
    without, _ = flow_grpo.loss(here, FlowGRPO(reference_weight=0))
    loss, metrics = flow_grpo.loss(here, FlowGRPO(reference_weight=0.3))
    assert (loss - without).item() == pytest.approx(0.3 * divergence.mean().item(), rel=1e-9)
    assert metrics["kl/reference"].item() == pytest.approx(divergence.mean().item(), rel=1e-12)


def test_kl_to_itself_is_zero_with_zero_gradient():
    terms, leaf = random_terms()
    here = terms(leaf)
    same = TrajectoryTerms(
        here.transition, here.log_prob, here.old_log_prob, {"reference": terms(leaf.detach()).transition}, here.advantage
    )
    divergence = flow_grpo.kl(same)
    assert (divergence == 0).all()
    (gradient,) = torch.autograd.grad(divergence.sum(), leaf)
    assert (gradient == 0).all()


def test_it_asks_for_the_reference_only_when_it_is_used():
    algorithm = ALGORITHMS["flow_grpo"]
    assert algorithm.copies(FlowGRPO(reference_weight=0.1)) == {"reference"}
    assert algorithm.copies(FlowGRPO(reference_weight=0)) == set()
    assert algorithm.old_decay is None
    terms, leaf = random_terms()
    assert "kl/reference" not in flow_grpo.loss(terms(leaf), FlowGRPO(reference_weight=0))[1]
