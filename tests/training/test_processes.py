"""Several processes take the step of one, stop together, and save the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy
from training_cases import (
    ALONE,
    FULL,
    GROUPS,
    LORA,
    NFT,
    farthest,
    forward_rows,
    sgd,
    spoilt,
    stage_of,
    updater_of,
)

from benchmarks.tiny_models import build_tiny
from ebbflow.algorithms.base import Algorithm, mean_per_row
from ebbflow.algorithms.built_in import diffusion_nft
from ebbflow.data.prompts import Prompt
from ebbflow.models import load_model, predict
from ebbflow.recipe.model import FsdpConfig, ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training import sharding
from ebbflow.training.distributed import Ranks, join_process_group
from ebbflow.training.passes import TrainingError
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.update import PolicyUpdater
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

# Two processes with FSDP2. What they are dealt is uneven: four samples and two, two groups and one;
# what comes out is what one process computes.

CASES = {
    "full": (NFT, FULL, ALONE, 4, 2),
    "lora": (NFT, LORA, ALONE, 4, 2),
    "passes": (NFT, LORA, ALONE, 3, 3),
    "groups": ({"name": "dgpo"}, FULL, GROUPS, 5, 2),
    "dora": (NFT, LORA.model_copy(update={"dora": True}), ALONE, 4, 2),
    "some layers": (NFT, PolicyConfig(layers=["*.attn.*"]), ALONE, 4, 2),
    "offloaded": (NFT, FULL, ALONE, 4, 2),
    "offloaded lora": (NFT, LORA, ALONE, 4, 2),
    "kept gathered": (NFT, LORA, ALONE, 3, 3),
    "replicas": (NFT, LORA, ALONE, 4, 2),
}
"""Algorithm, policy, groups, samples of the first process, and passes. The last has the whole model
on both (HSDP).
"""
FSDP = {
    "kept gathered": FsdpConfig(keep_gathered=True, prefetch=True),
    "rounded": FsdpConfig(gather="bfloat16"),
}


def two_steps(base: Path, case: str, folder: Path, ranks: Ranks) -> list[dict[str, float]]:
    """Two steps on this rank's share, and with them the copies; rank 0 writes the policy."""
    algorithm, config, group_index, first, passes = CASES[case]
    config = config.model_copy(update={"ema": PolicyConfig(ema={"max_decay": 0.5}).ema})
    model = load_model(base)
    replicas = ranks.world if case == "replicas" else 1
    offload = case.startswith("offloaded")
    with patch.object(sharding, "fully_shard", wraps=sharding.fully_shard) as fully_shard:
        policy = Policy(
            model, config, 0, ranks.world > 1, replicas, offload, FSDP.get(case, FsdpConfig())
        )
    for call in fully_shard.call_args_list:
        assert isinstance(call.kwargs["offload_policy"], CPUOffloadPolicy) == offload
    policy.ensure_copy("old")
    policy.ensure_copy("ema")
    stage = stage_of(algorithm, reference={"weight": 0.1}, optimizer={"max_grad_norm": 0.01})
    updater = PolicyUpdater(policy, stage, optimizer=sgd(policy, lr=0.5))
    start, stop = (0, 6) if ranks.world == 1 else [(0, first), (first, 6)][ranks.rank]
    with (
        patch.object(
            dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single
        ) as reduce_scatter,
        patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather,
    ):
        metrics = [
            updater.update_policy(forward_rows(model, stage, group_index, start, stop), passes)
            for _ in range(2)
        ]
    metrics[0] |= {"reduced": reduce_scatter.call_count, "gathered": gather.call_count}
    metadata = PolicyMetadata(
        base_digest="b", recipe_digest="r", config=config, version=2, copies=("old", "iterate")
    )
    policy.save_folder(folder, metadata, write=ranks.rank == 0)
    return metrics


def num_trained_shards(base: Path, config: PolicyConfig) -> int:
    """Of those that FSDP2 reduces on their own: the blocks, and the rest of the network, if it is
    trained.
    """
    return len(load_model(base).list_blocks()) + (config.train == "full" and config.layers is None)


def refused_together(base: Path, ranks: Ranks) -> str:
    """What a process says of a step that is not finite on the second process alone."""
    policy = Policy(load_model(base), FULL, 0, shard=True)
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, stage_of(NFT), optimizer=sgd(policy))
    batch = forward_rows(policy.model, updater.stage, ALONE, *[(0, 3), (3, 6)][ranks.rank])
    with pytest.raises(TrainingError) as error:
        updater.update_policy(
            spoilt(batch, "advantage", 1, float("nan")) if ranks.rank == 1 else batch, 1
        )
    return str(error.value)


def rounded_gradients(base: Path, ranks: Ranks) -> dict[str, object]:
    """Kinds of weights as they compute and as they are trained, and how far the gradient is from
    that of one process.
    """
    found = []
    seen = set()
    for shard in (False, True):
        model = load_model(base, ModelConfig(path=str(base), precision="bfloat16"))
        policy = Policy(model, FULL, 0, shard, fsdp=FSDP["rounded"])
        layer = model.list_blocks()[0].attn.to_q
        hook = layer.register_forward_pre_hook(lambda layer, _: seen.add(str(layer.weight.dtype)))
        rows = slice(2 * ranks.rank, 2 * ranks.rank + 2) if shard else slice(0, 4)
        latents = torch.randn(4, *model.latent_shape, generator=torch.Generator().manual_seed(0))
        conditioning = model.encode_texts(["ABCD", "EFGH", "IJKL", "MNOP"]).select_rows(rows)
        seen.clear()
        predict(
            model, latents[rows], torch.full((4,), 0.7)[rows], conditioning
        ).square().mean().backward()
        hook.remove()
        gradients = [p.grad.full_tensor() if shard else p.grad for p in policy.parameters.values()]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return {
        "computed": sorted(seen),
        "trained": sorted({str(p.dtype) for p in policy.parameters.values()}),
        "gradients": sorted({str(p.grad.dtype) for p in policy.parameters.values()}),
        "apart": float((found[1] - found[0]).norm() / found[0].norm()),
    }


def velocities_of_experts(folder: Path, ranks: Ranks, expert: str = "high_noise") -> list[float]:
    """Without gradient, of this rank's rows: the first is of the band of the trained expert, the
    second of the other one's.
    """
    model = load_model(
        folder, ModelConfig(family="wan_a14b", path=str(folder), height=64, width=64, expert=expert)
    )
    Policy(model, LORA, 0, shard=ranks.world > 1)
    rows = slice(None) if ranks.world == 1 else slice(ranks.rank, ranks.rank + 1)
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    conditioning = model.encode_prompts(
        [Prompt(index, "two cats", "", None, "", "train", "{}") for index in range(2)]
    )
    with torch.no_grad():
        velocity = predict(
            model, latents[rows], torch.tensor([0.9, 0.5])[rows], conditioning.select_rows(rows)
        )
    return velocity.std((1, 2, 3, 4)).tolist()


def taught(base: Path, ranks: Ranks) -> dict[str, float]:
    """A step from two teachers: all rows of the first process are of one of them, those of the
    second process of the other.
    """
    model = load_model(base)
    policy = Policy(model, LORA, 0, shard=ranks.world > 1)
    for factor, name in ((1.1, "a"), (0.9, "b")):
        policy.copies[teacher_copy_name(name)] = {
            key: factor * p.detach() + 0.01 for key, p in policy.parameters.items()
        }
    updater = PolicyUpdater(policy, stage_of(NFT), optimizer=sgd(policy))

    def loss(rows, config):
        divergence = mean_per_row((rows.velocity - rows.copies["teacher"]) ** 2)
        return divergence, {"kl/teacher": divergence}

    updater.algorithm = Algorithm(
        updater.algorithm.config, loss, copies=lambda config: frozenset({"teacher"})
    )
    updater.teacher_copies = sorted(map(teacher_copy_name, "ab"))
    share = (0, 6) if ranks.world == 1 else [(0, 4), (4, 6)][ranks.rank]
    sets = {prompt: "a" if prompt < 4 else "b" for prompt in range(6)}
    return updater.update_policy(forward_rows(model, updater.stage, ALONE, *share), 2, sets)


def take_replicated_step(base: Path, rows: tuple[int, int], replicas: int) -> dict[str, float]:
    """Metrics of a step of one pass on these rows, where every process has the whole model."""
    policy = Policy(load_model(base), LORA, 0, shard=replicas > 1, replicas=replicas)
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, stage_of(NFT), optimizer=sgd(policy))
    batch = forward_rows(policy.model, updater.stage, ALONE, *rows)
    with patch.object(policy, "average_gradients", wraps=policy.average_gradients) as average:
        metrics = updater.update_policy(batch, 1)
    return metrics | {"reductions": average.call_count}


def train_as_a_rank(base: Path, experts: Path, output: Path) -> None:
    """Join the group that the environment announces, train every case, and save an untrained
    policy.
    """
    with join_process_group() as ranks:
        assert ranks == Ranks(int(os.environ["RANK"]), 2)
        said = {case: two_steps(base, case, output / case, ranks) for case in CASES} | {
            "error": refused_together(base, ranks)
        }
        said["rounded"] = rounded_gradients(base, ranks)
        said["taught"] = taught(base, ranks)
        share = [(0, 4), (4, 6)][ranks.rank]
        said["replicated"] = take_replicated_step(base, share, ranks.world)
        said |= {
            expert: velocities_of_experts(experts, ranks, expert)
            for expert in ("high_noise", "both")
        }
    assert Ranks.current() == Ranks(0, 1)
    (output / f"said-{ranks.rank}.json").write_text(json.dumps(said))
    untrained = PolicyMetadata(base_digest="b", recipe_digest="r", config=LORA, version=1)
    Policy(load_model(base), LORA, 0).save_folder(output / f"untrained-{ranks.rank}", untrained)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory):
    """A base model of two transformers, one of which is trained."""
    folder = tmp_path_factory.mktemp("experts") / "wan_a14b"
    build_tiny("wan_a14b", folder)
    return folder


@pytest.fixture(scope="module")
def two_processes(base_folder, experts_folder, tmp_path_factory):
    """The output folder of two gloo processes, this one and a spawned one, that trained a full and
    a LoRA policy.
    """
    output = tmp_path_factory.mktemp("two-processes")
    # Sets have another order in the other process, as they have by chance.
    as_two_ranks(train_as_a_rank, base_folder, experts_folder, output, PYTHONHASHSEED="7")
    return output


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_step_of_one(base_folder, two_processes, tmp_path, case):
    alone = two_steps(base_folder, case, tmp_path / "alone", Ranks(0, 1))
    together = [
        json.loads((two_processes / f"said-{rank}.json").read_text())[case] for rank in range(2)
    ]
    assert together[0] == together[1]
    reduced = together[0][0].pop("reduced")
    of_one = alone[0].pop("reduced")
    assert (together[0][0].pop("gathered") > 0, alone[0].pop("gathered")) == (case != "replicas", 0)
    # Twice in each of two updates, however many passes: of the first block of rows for its norm,
    # and of all of them.
    assert (reduced, of_one) == (
        2 * 2 * num_trained_shards(base_folder, CASES[case][1]) * (case != "replicas"),
        0,
    )
    for one, other in zip(alone, together[0], strict=True):
        # The first part has other rows when there are two processes: what is measured on it alone
        # differs.
        of_the_first_part = {"grad_variance": 0}
        assert other | of_the_first_part == pytest.approx(
            one | of_the_first_part, rel=1e-3, abs=1e-6
        )
    assert alone[1]["kl/reference"] > 0
    assert alone[0]["grad_norm"] > 0.01  # it is clipped
    files = {
        path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.safetensors")
    }
    assert len(files) == 3  # what is served, what training goes on from, and the old copy
    for file in files:
        expected = load_file(tmp_path / "alone" / file)
        found = load_file(two_processes / case / file)
        assert farthest(expected, found) < 1e-5


SAME = [("offloaded", "full"), ("offloaded lora", "lora"), ("kept gathered", "passes")]


@pytest.mark.parametrize(("case", "plain"), SAME)
def test_where_shards_wait_and_when_they_are_gathered_changes_no_byte(two_processes, case, plain):
    assert verify_folder(two_processes / case) == verify_folder(two_processes / plain)


def test_weights_that_stay_gathered_are_sent_once_for_all_passes_of_a_copy(
    base_folder, two_processes
):
    said = json.loads((two_processes / "said-0.json").read_text())
    kept, plain = (said[case][0]["gathered"] for case in ("kept gathered", "passes"))
    units = len(load_model(base_folder).list_blocks()) + 1
    copies = 2
    passes = CASES["passes"][-1]
    updates = 2
    assert plain - kept == units * copies * (passes - 1) * updates


def test_weights_are_gathered_in_sixteen_bits_and_trained_in_thirty_two(two_processes):
    for rank in range(2):
        said = json.loads((two_processes / f"said-{rank}.json").read_text())["rounded"]
        assert said["computed"] == ["torch.bfloat16"]
        assert said["trained"] == said["gradients"] == ["torch.float32"]
        assert 0 < said["apart"] < 0.1


def test_two_processes_stop_together(two_processes):
    errors = [
        json.loads((two_processes / f"said-{rank}.json").read_text())["error"] for rank in range(2)
    ]
    assert "not finite: a row of another process (" in errors[0]
    assert "of prompt 4, sample 7, noised to sigma" in errors[1]


@pytest.mark.parametrize("expert", ["high_noise", "both"])
def test_processes_predict_together_where_their_rows_are_of_different_experts(
    experts_folder, two_processes, expert
):
    together = [
        json.loads((two_processes / f"said-{rank}.json").read_text())[expert] for rank in range(2)
    ]
    assert sum(together, []) == pytest.approx(
        velocities_of_experts(experts_folder, Ranks(0, 1), expert), rel=1e-5
    )


def test_processes_learn_together_where_their_rows_are_of_different_teachers(
    base_folder, two_processes
):
    together = [
        json.loads((two_processes / f"said-{rank}.json").read_text())["taught"] for rank in range(2)
    ]
    alone = taught(base_folder, Ranks(0, 1))
    for said in together:
        assert said | {"grad_variance": 0} == pytest.approx(alone | {"grad_variance": 0}, rel=1e-4)
    assert alone["kl/teacher/a"] != pytest.approx(alone["kl/teacher/b"], rel=1e-2)


def test_replicas_measure_the_variance_by_the_gradients_of_their_own_rows(
    base_folder, two_processes
):
    shares = [take_replicated_step(base_folder, rows, 1) for rows in ((0, 4), (4, 6))]
    whole = take_replicated_step(base_folder, (0, 6), 1)
    assert "grad_variance" not in whole
    squared_norm = sum(share["grad_norm"] ** 2 for share in shares) / 2
    # Shares of different numbers of rows: the mean of 1 / 4 and 1 / 2.
    expected = (squared_norm - whole["grad_norm"] ** 2) / (3 / 8 - 1 / 6)
    for rank in range(2):
        said = json.loads((two_processes / f"said-{rank}.json").read_text())["replicated"]
        assert said["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
        assert said["grad_variance"] == pytest.approx(expected, rel=1e-3)
        assert said["reductions"] == 1  # none for the part that is measured


def test_two_processes_save_the_same_adapters_as_the_same_bytes(two_processes):
    assert verify_folder(two_processes / "untrained-0") == verify_folder(
        two_processes / "untrained-1"
    )


@pytest.mark.parametrize(
    "names", [["old", "teacher", "reference"], ["reference", "teacher", "old"]]
)
def test_copies_are_swapped_in_in_the_same_order_on_every_process(model, monkeypatch, names):
    # A set of names has another order in every process: their gathered weights would be a mix of
    # two copies.
    updater = updater_of(model, NFT, lr=0)
    order = []
    using = updater.policy.use_copy
    monkeypatch.setattr(updater.policy, "use_copy", lambda name: order.append(name) or using(name))
    updater.algorithm = dataclasses.replace(diffusion_nft.ALGORITHM, copies=lambda config: names)
    updater.update_policy(forward_rows(model, updater.stage), 1)
    assert order == ["old", "reference", "teacher"]


def test_a_rank_knows_its_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    ranks = Ranks(5, 8)
    assert (ranks.ranks_per_node, ranks.num_nodes, ranks.node_rank, ranks.local_rank) == (
        4,
        2,
        1,
        1,
    )
    assert Ranks(0, 1).ranks_per_node == 1, "outside a group"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (ranks.num_nodes, ranks.local_rank) == (1, 5)


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with join_process_group() as ranks:
        assert ranks == Ranks(0, 1)
