"""One optimiser step: what it computes does not depend on how the work is dealt out, and it never goes through on nonsense."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ebbflow.algorithms import diffusion_nft, flow_grpo
from ebbflow.algorithms.base import Algorithm, ForwardTerms
from ebbflow.artifacts import verify
from ebbflow.models import Conditioning, load_model
from ebbflow.recipe.algorithms import DiffusionNFT, FlowGRPO
from ebbflow.recipe.recipe import Policy as PolicyConfig
from ebbflow.recipe.stages import Optimizer, Sampler
from ebbflow.rollouts.generate import SampleKeys, generate
from ebbflow.training import distributed
from ebbflow.training.batches import ForwardBatch, Points, forward_batch, trajectory_batch
from ebbflow.training.distributed import Ranks, process_group
from ebbflow.training.policy import Policy, PolicyCard
from ebbflow.training.update import TrainingError, make_optimizer, micro_batches, optimise

FREE = Optimizer(max_grad_norm=1e9)
NFT = DiffusionNFT(beta=0.5, reference_weight=0.1)
FULL, LORA = PolicyConfig(train="full"), PolicyConfig(train="lora", rank=4, alpha=8)


def sgd(policy, lr=0.1):
    """Plain gradient descent: Adam's first step is a sign, which turns rounding into full steps."""
    return torch.optim.SGD(policy.parameters.values(), lr=lr)


def some_terms(model, start=0, stop=6):
    """Rows ``start`` to ``stop`` of a fixed batch of six forward-process terms."""
    prompt_ids = list(range(start, stop))
    keys = SampleKeys(1, prompt_ids, [0] * len(prompt_ids))
    clean = torch.stack([torch.randn(model.latent_shape, generator=torch.Generator().manual_seed(i)) for i in prompt_ids])
    advantage = torch.tensor([-2.0, -1.0, 0.5, 1.0, 2.0, 3.0])[start:stop]
    conditioning = model.encode(["ABCD", "EFGH", "IJKL", "MNOP", "QRST", "UVWX"][start:stop])
    return forward_batch(clean, conditioning, advantage, keys, draws=1, visit=0)


def with_old(policy):
    policy.ensure("old")
    return policy


def parameters(policy):
    return {name: value.detach().clone() for name, value in policy.parameters.items()}


def farthest(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_micro_batches_do_not_change_the_step(base_folder):
    results = []
    for passes in (1, 4, 6):
        model = load_model(base_folder)
        policy = with_old(Policy(model, FULL, 0))
        start = parameters(policy)
        optimizer = sgd(policy)
        metrics = optimise(policy, optimizer, diffusion_nft.ALGORITHM, NFT, some_terms(model), FREE, passes)
        optimise(policy, optimizer, diffusion_nft.ALGORITHM, NFT, some_terms(model), FREE, passes)
        results.append((parameters(policy), metrics))
        assert farthest(start, parameters(policy)) > 1e-3
    for values, metrics in results[1:]:
        assert farthest(values, results[0][0]) < 1e-5
        assert {name: value for name, value in metrics.items() if name != "grad_variance"} == pytest.approx(
            results[0][1], rel=1e-4, abs=1e-7
        )


def test_metrics_are_means_over_the_terms(model):
    policy = with_old(Policy(model, FULL, 0))
    batch = some_terms(model)
    with torch.no_grad():
        velocity = model.velocity(batch.points.latents, batch.points.sigma, batch.points.conditioning)
        loss, expected = diffusion_nft.loss(batch.terms(slice(0, 6), velocity, {"old": velocity, "reference": velocity}), NFT)
    metrics = optimise(policy, make_optimizer(policy, Optimizer(lr=1e-4)), diffusion_nft.ALGORITHM, NFT, batch, FREE, 4)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["nft/better_error"] == pytest.approx(expected["nft/better_error"].item(), rel=1e-5)
    assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
    assert metrics["lr"] == 1e-4
    assert {"loss", "grad_norm", "grad_variance", "kl/reference", "nft/old_deviation", "nft/worse_error"} <= metrics.keys()


@pytest.mark.parametrize(("place", "wrong"), [("clean", float("nan")), ("clean", float("inf")), ("advantage", float("nan"))])
def test_nonsense_stops_the_step_before_the_parameters_change(model, place, wrong):
    policy = with_old(Policy(model, FULL, 0))
    optimizer = make_optimizer(policy, Optimizer())
    batch = some_terms(model)
    values = getattr(batch, place).clone()
    values[2] = wrong
    before = parameters(policy)
    config = NFT.model_copy(update={"reference_weight": 0.0})
    with pytest.raises(TrainingError, match=r"not finite: .*loss.*step was not taken.*optimizer\.lr"):
        optimise(policy, optimizer, diffusion_nft.ALGORITHM, config, dataclasses.replace(batch, **{place: values}), FREE, 3)
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())
    assert not optimizer.state


def test_a_gradient_that_alone_is_not_finite_stops_the_step(model):
    def loss(terms, config):
        return (terms.velocity * 0).abs().sqrt().mean(), {}  # 0 / 0 backwards

    policy = Policy(model, FULL, 0)
    before = parameters(policy)
    algorithm = Algorithm("root of nothing", ForwardTerms, loss, lambda config: frozenset())
    with pytest.raises(TrainingError, match="the gradient alone"):
        optimise(policy, sgd(policy), algorithm, None, some_terms(model), FREE, 1)
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())


def test_a_loss_that_alone_is_not_finite_stops_the_step(model):
    def loss(terms, config):
        return terms.velocity.mean() + float("inf"), {}

    policy = Policy(model, FULL, 0)
    before = parameters(policy)
    algorithm = Algorithm("an infinite constant", ForwardTerms, loss, lambda config: frozenset())
    with pytest.raises(TrainingError, match="not finite: loss"):
        optimise(policy, sgd(policy), algorithm, None, some_terms(model), FREE, 1)
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_the_gradient_is_clipped_to_its_norm_and_never_scaled_up(model, share):
    policy = with_old(Policy(model, FULL, 0))
    before = parameters(policy)
    norm = optimise(policy, sgd(policy, lr=0), diffusion_nft.ALGORITHM, NFT, some_terms(model), FREE, 2)["grad_norm"]
    limit = Optimizer(max_grad_norm=share * norm)
    metrics = optimise(policy, sgd(policy, lr=1), diffusion_nft.ALGORITHM, NFT, some_terms(model), limit, 2)
    moved = sum(((value - before[name]) ** 2).sum() for name, value in policy.parameters.items()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert moved.item() == pytest.approx(min(1, share) * norm, rel=1e-3)


def rollout(model, policy, sampler, window=range(3), samples=6):
    conditioning = model.encode(["ABCD", "WXYZ"] * (samples // 2))
    keys = SampleKeys(2, [0, 1] * (samples // 2), list(range(samples)))
    trajectory = generate(model, conditioning, keys, sampler, window, micro_batch=4).trajectory
    advantage = torch.linspace(-2, 2, samples)
    return lambda rows: trajectory_batch(trajectory, conditioning, advantage, sampler, rows)


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
def test_the_first_ratio_after_a_rollout_is_one(model, name, config):
    policy = Policy(model, config, 0)
    batch = rollout(model, policy, Sampler(name=name, steps=5), range(4))(torch.tensor([5, 0, 3, 1]))
    metrics = optimise(policy, make_optimizer(policy, Optimizer()), flow_grpo.ALGORITHM, FlowGRPO(), batch, FREE, 3)
    assert len(batch.points) == 16
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/deviation"] < 1e-6
    assert metrics["kl/reference"] == pytest.approx(0, abs=1e-9)
    again = optimise(policy, make_optimizer(policy, Optimizer(lr=1e-3)), flow_grpo.ALGORITHM, FlowGRPO(), batch, FREE, 3)
    assert again["ratio/deviation"] > 1e-6


def test_without_a_learning_rate_the_ratio_stays_one(model):
    policy = Policy(model, FULL, 0)
    before = parameters(policy)
    optimizer = make_optimizer(policy, Optimizer(lr=0))
    batches = rollout(model, policy, Sampler(name="flow_sde", steps=4))
    for _ in range(8):
        metrics = optimise(policy, optimizer, flow_grpo.ALGORITHM, FlowGRPO(), batches(torch.arange(6)), FREE, 2)
        assert metrics["ratio/deviation"] < 1e-6
        assert metrics["velocity_drift"] == pytest.approx(0, abs=1e-10)
        assert metrics["grad_norm"] > 0
    assert all(torch.equal(value, before[name]) for name, value in policy.parameters.items())


def test_a_window_becomes_a_term_for_each_sample_and_step(model):
    policy = Policy(model, FULL, 0)
    conditioning, keys = model.encode(["ABCD", "WXYZ", "QQQQ"]), SampleKeys(2, [0, 1, 2], [0, 0, 0])
    sampler = Sampler(name="flow_sde", steps=5)
    trajectory = generate(model, conditioning, keys, sampler, range(1, 3)).trajectory
    batch = trajectory_batch(trajectory, conditioning, torch.tensor([1.0, 2.0, 3.0]), sampler, torch.tensor([2, 0]))
    assert batch.advantage.tolist() == [3, 3, 1, 1]
    assert batch.steps.tolist() == [1, 2, 1, 2]
    assert torch.equal(batch.points.sigma, model.sigmas(5)[[1, 2, 1, 2]])
    for term, (sample, place) in enumerate([(2, 0), (2, 1), (0, 0), (0, 1)]):
        assert torch.equal(batch.points.latents[term], trajectory.latents[sample, place])
        assert torch.equal(batch.next_latents[term], trajectory.latents[sample, place + 1])
        assert torch.equal(batch.old_log_prob[term], trajectory.log_probs[sample, place])
        assert torch.equal(batch.points.conditioning.embeds[term], conditioning.embeds[sample])
    assert policy.parameters


def test_forward_terms_are_stratified_and_belong_to_their_sample(model, make_keys):
    clean = torch.randn(6, *model.latent_shape)
    conditioning = model.encode(["ABCD", "EFGH", "IJKL", "MNOP", "QRST", "UVWX"])
    advantage = torch.arange(6.0)
    batch = forward_batch(clean, conditioning, advantage, make_keys(6), draws=3, visit=0)
    sigma = batch.points.sigma.view(3, 6)
    for draw in range(3):
        assert ((sigma[draw] >= draw / 3) & (sigma[draw] <= (draw + 1) / 3)).all()
    share = batch.points.sigma.view(-1, 1, 1, 1)
    assert torch.allclose(batch.points.latents, (1 - share) * batch.clean + share * batch.noise)
    for row in range(18):
        assert torch.equal(batch.clean[row], clean[row % 6])
        assert batch.advantage[row] == row % 6
        assert torch.equal(batch.points.conditioning.pooled[row], conditioning.pooled[row % 6])
    assert len({tuple(row.flatten()[:4].tolist()) for row in batch.noise}) == 18
    later = forward_batch(clean, conditioning, advantage, make_keys(6), draws=3, visit=1)
    assert not (later.noise == batch.noise).flatten(1).all(1).any()
    # A sample's draws are its own: they do not depend on who else is in the batch.
    alone = forward_batch(clean[4:5], conditioning.rows(slice(4, 5)), advantage[4:5], make_keys(6).rows(slice(4, 5)), 3, 0)
    assert torch.equal(alone.noise, batch.noise[4::6])
    assert torch.equal(alone.points.sigma, batch.points.sigma[4::6])


def test_micro_batches_hold_at_most_their_size(model):
    assert [micro_batches(some_terms(model), size) for size in (1, 4, 6, 100)] == [6, 2, 1, 1]


# Gradient variance, on a policy whose per-term gradients are given: v = w, loss = mean over the terms of <w, g_i>.


def linear_policy(elements):
    weight = torch.nn.Parameter(torch.zeros(elements))
    model = SimpleNamespace(velocity=lambda latents, sigma, conditioning: weight.expand(len(latents), elements))
    return SimpleNamespace(parameters={"weight": weight}, model=model)


def given_gradients(gradients):
    count = len(gradients)
    points = Points(gradients, torch.zeros(count), Conditioning(gradients, gradients))
    return ForwardBatch(points, gradients, gradients, torch.zeros(count))


LINEAR = Algorithm(
    "linear in the velocity",
    ForwardTerms,
    lambda terms, config: ((terms.velocity * terms.noise).sum(1).mean(), {}),
    lambda config: frozenset(),
)


def gradient_metrics(gradients, passes):
    policy = linear_policy(gradients.shape[1])
    return optimise(policy, sgd(policy), LINEAR, None, given_gradients(gradients), FREE, passes)


def test_gradient_norm_and_variance_of_known_gradients():
    gradients = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    metrics = gradient_metrics(gradients, passes=3)
    small, whole = gradients[:4].mean(0).norm().item(), gradients.mean(0).norm().item()
    assert metrics["grad_norm"] == pytest.approx(whole, rel=1e-5)
    assert metrics["grad_variance"] == pytest.approx((small**2 - whole**2) / (1 / 4 - 1 / 12), rel=1e-4)
    assert "grad_variance" not in gradient_metrics(gradients, passes=1)


def test_gradient_variance_is_the_trace_of_the_covariance_on_average():
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.5, 1.0, 2.0])
    trials = [
        gradient_metrics(torch.tensor([3.0, -1.0, 0.0]) + spread * torch.randn(16, 3, generator=generator), 4)["grad_variance"]
        for _ in range(800)
    ]
    assert np.mean(trials) == pytest.approx((spread**2).sum().item(), abs=4 * np.std(trials) / len(trials) ** 0.5)


def test_equal_gradients_have_no_variance():
    assert gradient_metrics(torch.ones(8, 3), passes=4)["grad_variance"] == pytest.approx(0, abs=1e-5)


# Two processes with FSDP2. Six terms go to them unevenly; what comes out is what one process computes.

CLIPPED = Optimizer(max_grad_norm=0.01)


def two_steps(base: Path, config: PolicyConfig, folder: Path, ranks: Ranks) -> list[dict[str, float]]:
    """Two steps on this rank's share, with the old policy moved between them; rank 0 writes the policy."""
    model = load_model(base)
    policy = with_old(Policy(model, config, 0, shard=ranks.world > 1))
    start, stop = (0, 6) if ranks.world == 1 else [(0, 4), (4, 6)][ranks.rank]
    optimizer = sgd(policy, lr=0.5)
    metrics = []
    for _ in range(2):
        batch = some_terms(model, start, stop)
        metrics.append(optimise(policy, optimizer, diffusion_nft.ALGORITHM, NFT, batch, CLIPPED, 2, total_terms=6))
        policy.blend("old", 0.5)
    card = PolicyCard(base_digest="b", recipe_digest="r", config=config, version=2, copies=("old",))
    policy.save(folder, card, write=ranks.rank == 0)
    return metrics


def train_as_a_rank(base: Path, output: Path) -> None:
    """Join the group that the environment announces, train both kinds of policy, and save an untrained one."""
    with process_group() as ranks:
        assert ranks == Ranks(int(os.environ["RANK"]), 2)
        metrics = {config.train: two_steps(base, config, output / config.train, ranks) for config in (FULL, LORA)}
    assert Ranks.current() == Ranks(0, 1)
    (output / f"metrics-{ranks.rank}.json").write_text(json.dumps(metrics))
    untrained = PolicyCard(base_digest="b", recipe_digest="r", config=LORA, version=1)
    Policy(load_model(base), LORA, 0).save(output / f"untrained-{ranks.rank}", untrained)


def second_process(_: int, base: Path, output: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
    train_as_a_rank(base, output)


@pytest.fixture(scope="module")
def two_processes(base_folder, tmp_path_factory):
    """The output folder of two gloo processes, this one and a spawned one, that trained a full and a LoRA policy."""
    output = tmp_path_factory.mktemp("two-processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    other_hashes = {"PYTHONHASHSEED": 7}  # sets have another order in the other process, as they have by chance
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (group | other_hashes).items():
            patch.setenv(name, str(value))
        patch.setattr(distributed, "TIMEOUT", timedelta(minutes=3))
        other = torch.multiprocessing.spawn(second_process, (base_folder, output), nprocs=1, join=False)
        train_as_a_rank(base_folder, output)
        while not other.join():
            pass
    return output


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_two_processes_take_the_step_of_one(base_folder, two_processes, tmp_path, config):
    alone = two_steps(base_folder, config, tmp_path / "alone", Ranks(0, 1))
    together = [json.loads((two_processes / f"metrics-{rank}.json").read_text())[config.train] for rank in range(2)]
    assert together[0] == together[1]
    for one, other in zip(alone, together[0], strict=True):
        # The first micro-batch has other terms when there are two processes, so its variance estimate differs.
        assert {**other, "grad_variance": 0} == pytest.approx({**one, "grad_variance": 0}, rel=1e-3, abs=1e-6)
    assert alone[1]["kl/reference"] > 0
    assert alone[0]["grad_norm"] > CLIPPED.max_grad_norm
    files = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.safetensors")}
    assert len(files) == 2
    for file in files:
        expected, found = load_file(tmp_path / "alone" / file), load_file(two_processes / config.train / file)
        assert expected.keys() == found.keys()
        assert farthest(expected, found) < 1e-5


def test_two_processes_save_the_same_adapters_as_the_same_bytes(two_processes):
    assert verify(two_processes / "untrained-0") == verify(two_processes / "untrained-1")


def test_copies_are_swapped_in_in_the_same_order_on_every_process(model, monkeypatch):
    # A set of names has another order in every process: their gathered weights would be a mix of two copies.
    policy, orders = with_old(Policy(model, FULL, 0)), []
    using = policy.using

    def watch(name):
        orders[-1].append(name)
        return using(name)

    monkeypatch.setattr(policy, "using", watch)
    for names in (["old", "reference"], ["reference", "old"]):
        orders.append([])
        algorithm = dataclasses.replace(diffusion_nft.ALGORITHM, copies=lambda config, names=names: names)
        optimise(policy, sgd(policy, lr=0), algorithm, NFT, some_terms(model), FREE, 1)
    assert orders[0] == orders[1]


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with process_group() as ranks:
        assert ranks == Ranks(0, 1)
