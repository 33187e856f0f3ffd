"""Batches that ranks generate in rounds: two ranks write the rollouts and the evaluation of one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ebbflow.data import prompt_windows
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import Evaluation
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.models import load_model
from ebbflow.offline import rollouts
from ebbflow.offline.rollouts import generate_shard
from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import StageContext
from ebbflow.storage.tables import read_table, read_table_metadata
from ebbflow.training.distributed import Ranks, join_process_group
from ebbflow.training.policy import Policy
from ebbflow.training.rounds import call_on_first, collect_rounds, deal_in_rounds
from tests.conftest import Darkness
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_every_batch_is_dealt_once_and_ranks_have_as_many_rounds(
    world: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt = []
    for rank in range(world):
        monkeypatch.setattr(Ranks, "current", lambda rank=rank: Ranks(rank, world))
        dealt.append(deal_in_rounds(range(count)))
    assert {len(batches) for batches in dealt} == {-(-count // world)}
    rounds = [batch for each_round in zip(*dealt, strict=True) for batch in each_round]
    assert [batch for batch in rounds if batch is not None] == list(range(count))


def test_a_rank_sends_its_parts_to_the_first_in_the_order_of_batches() -> None:
    as_two_ranks(collect_letters)


def collect_letters() -> None:
    with join_process_group(backend="gloo") as ranks:
        dealt = deal_in_rounds("abcde")
        collected = list(collect_rounds(letter and letter.upper() for letter in dealt))
        assert collected == (list("ABCDE") if ranks.rank == 0 else [])
        assert call_on_first(lambda: ranks.rank) == 0


def change_policy(base: Path) -> Policy:
    """Open a policy that is not its base model."""
    policy = Policy(load_model(base), PolicyConfig(), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    policy.ensure_copy("old")
    return policy


def generate_table(recipe: Recipe, base: Path, prompts: list[Prompt], path: Path) -> None:
    policy = change_policy(base)
    generate_shard(StageContext(recipe, 0, 1), policy.model, policy, 7, prompts, 0, path)


def generate_table_in_windows(
    recipe: Recipe, base: Path, prompts: list[Prompt], path: Path
) -> None:
    """As ``generate_table``; three windows, each of a micro-batch of two groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 3)
        generate_table(recipe, base, prompts, path)


def evaluate_table(recipe: Recipe, base: Path, prompts: list[Prompt], path: Path) -> Evaluation:
    policy = change_policy(base)
    judge = Scorer(((Darkness(), 1.0),))
    return evaluate_on_prompts(recipe, policy.model, policy, 3, judge, prompts, "one", path)


def evaluate_table_in_windows(
    recipe: Recipe, base: Path, prompts: list[Prompt], path: Path
) -> Evaluation:
    """As ``evaluate_table``; windows of two micro-batches of two prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 4)
        return evaluate_table(recipe, base, prompts, path)


def run_as_rank(
    work: Callable[..., object], recipe: Recipe, base: Path, prompts: list[Prompt], path: Path
) -> None:
    """Run work that writes the table of rank 0; the other writes none."""
    with join_process_group(backend="gloo") as ranks:
        assert dist.get_backend() == "gloo"
        own_path = path.with_suffix(f".{ranks.rank}")
        result = work(recipe, base, prompts, own_path)
        assert own_path.exists() == (ranks.rank == 0)
        if isinstance(result, Evaluation):
            path.with_name(f"evaluation-{ranks.rank}").write_text(describe_evaluation(result))


def describe_evaluation(evaluation: Evaluation) -> str:
    return evaluation.model_copy(update={"seconds": {}}).model_dump_json()


@pytest.mark.parametrize("generate", [generate_table, generate_table_in_windows])
def test_two_ranks_write_the_rollouts_of_one_process_bit_for_bit(
    generate, make_recipe, make_prompts, base_folder: Path, tmp_path: Path
) -> None:
    # Three micro-batches of two groups, so that the last round has none for the second rank.
    recipe = make_recipe(offline={"prompts": 6, "shards": 1})
    alone = tmp_path / "alone"
    generate(recipe, base_folder, make_prompts(8), alone)
    as_two_ranks(run_as_rank, generate, recipe, base_folder, make_prompts(8), tmp_path / "shared")
    shared = tmp_path / "shared.0"
    assert read_table(shared).equals(read_table(alone))
    about, about_alone = (read_table_metadata(path) for path in (shared, alone))
    for metadata in (about, about_alone):
        assert metadata.pop("seconds")["rollout"] > 0
    assert about == about_alone


@pytest.mark.parametrize("evaluate", [evaluate_table, evaluate_table_in_windows])
def test_two_ranks_write_the_evaluation_of_one_process_bit_for_bit(
    evaluate, make_recipe, make_prompts, base_folder: Path, tmp_path: Path
) -> None:
    settings = {"steps": 3, "micro_batch": 2, "samples": 2, "repeated_prompts": 3}
    recipe = make_recipe(evaluation=settings)
    prompts = [
        replace(prompt, split="validation" if index < 4 else "held_out")
        for index, prompt in enumerate(make_prompts(9))
    ]
    alone = evaluate(recipe, base_folder, prompts, tmp_path / "alone")
    assert alone.velocity_drift > 0
    as_two_ranks(run_as_rank, evaluate, recipe, base_folder, prompts, tmp_path / "shared")
    assert (tmp_path / "shared.0").read_bytes() == (tmp_path / "alone").read_bytes()
    for rank in range(2):
        assert (tmp_path / f"evaluation-{rank}").read_text() == describe_evaluation(alone)


def generate_until_killed(*inputs: object) -> None:
    """Generate as two ranks of which the second dies in its first round."""
    with pytest.MonkeyPatch.context() as patch:
        generate = rollouts.Diffusers.generate

        def die(self: object, *arguments: object, **options: object) -> object:
            if Ranks.current().rank:
                signal.raise_signal(signal.SIGKILL)
            return generate(self, *arguments, **options)  # type: ignore[arg-type]

        patch.setattr(rollouts.Diffusers, "generate", die)
        run_as_rank(generate_table, *inputs)  # type: ignore[arg-type]


def test_a_killed_rank_fails_the_shard_as_a_whole(
    make_recipe, make_prompts, base_folder: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(offline={"prompts": 6, "shards": 1})
    inputs = (recipe, base_folder, make_prompts(8), tmp_path / "shared")
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        as_two_ranks(generate_until_killed, *inputs)
    assert not (tmp_path / "shared.0").exists(), "a part of a shard would pass for the whole"
