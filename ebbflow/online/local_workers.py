"""The workers of a stage in one process: training and rollouts take turns, rewards are scored in
threads meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbflow.online.messages import Handle
from ebbflow.online.reward_worker import RewardWorker
from ebbflow.online.rollout_worker import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import (
    LocalWorker,
    RewardPool,
    RolloutPool,
    ThreadWorker,
    TrainingGroup,
    Worker,
)
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.engine import Diffusers
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.training.update import PolicyUpdater


class LocalWorkers:
    """``StageWorkers`` of this process; handles are the values themselves.

    Args:
        rollout_worker: left out, it generates with the trainer's own weights, so that none are
            sent.
        index: of this process among those of the stage, for the numbers of its workers.
    """

    def __init__(
        self,
        trainer: TrainingWorker,
        scorer: Scorer,
        rollout_worker: RolloutWorker | None = None,
        index: int = 0,
    ) -> None:
        ctx = trainer.ctx
        policy = trainer.updater.policy
        self.trainer = trainer
        self.shares_weights = rollout_worker is None
        engine = Diffusers(
            ctx,
            policy,
            trainer.updater.algorithm.generates,
            ctx.online_config.reuse_rollout_forward,
        )
        self.rollout_worker = rollout_worker or RolloutWorker(engine, index)
        self.reward_weights = scorer.reward_weights
        self.reads_rollouts = scorer.reads_latents or scorer.reads_sounds
        self.steps_before = trainer.updater.before.steps

        async def start_rollout_worker(index: int) -> Worker:
            return LocalWorker(self.rollout_worker, index)

        async def start_reward_worker(index: int) -> Worker:
            return ThreadWorker(RewardWorker(scorer, index), index)

        config = ctx.online_config
        num_rewards = config.resources.reward.count
        rewards = [
            ThreadWorker(RewardWorker(scorer, number), number)
            for number in range(index * num_rewards, (index + 1) * num_rewards)
        ]
        # One rank and one rollout worker, which take turns. Rewards run in threads, so that images
        # are scored while the next request generates and the policy trains.
        self.training = TrainingGroup([LocalWorker(trainer, index)])
        self.rollout = RolloutPool([LocalWorker(self.rollout_worker, index)], start_rollout_worker)
        self.reward = RewardPool(rewards, start_reward_worker, config.scoring)

    async def publish_weights(self, version: int, copy: str | None = None) -> WeightsVersion:
        # Even in one process another engine gets copies of the weights, with their digest.
        if not self.shares_weights:
            return self.trainer.publish(version, copy)
        engine = self.rollout_worker.engine
        assert isinstance(engine, Diffusers), (
            "only the engine of this process shares the trainer's weights"
        )
        # Nothing is sent. Choosing the copy is all there is to publish.
        engine.generates = copy or self.trainer.updater.algorithm.generates
        return WeightsVersion(version)

    async def fetch_value(self, handle: Handle) -> Any:
        return handle

    def put_value(self, value: Any) -> Handle:
        return value

    async def save_policy(self, folder: Path, *arguments: Any) -> None:
        self.trainer.save(folder, *arguments)

    async def save_checkpoint(self, folder: Path) -> None:
        self.trainer.save_checkpoint(folder)

    async def load_checkpoint(self, folder: Path) -> None:
        self.trainer.load_checkpoint(folder)

    def close(self) -> None:
        self.rollout_worker.close()


def open_local_workers(ctx: StageContext, updater: PolicyUpdater, scorer: Scorer) -> LocalWorkers:
    """Workers around a policy of this process, which generates and trains."""
    return LocalWorkers(TrainingWorker(ctx, updater, scorer=scorer), scorer)
