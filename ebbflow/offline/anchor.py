r"""The data anchor of a stage (DDRL, 2512.04332): a flow-matching loss on captioned data beside the
loss of the algorithm.

    L = L_algorithm + weight mean((v - u)^2),   u = eps - x0 of pictures, not of samples

In expectation the second term is, up to a constant, the forward KL from the data to the policy
(with the weights of the noise levels that are drawn): it holds wherever there is data, while a
penalty on the policy's own samples says nothing where the reference has never been.

Deviations from the published code (nvidia-cosmos/cosmos-rl, ``wfm_trainer.py``), whose recipes have
the same weight .01 (``data_beta``): pictures have noise and noise levels of their own, where that
code takes those of the rollout (``use_rl_sigma_and_noise``); pictures are drawn from all of the
data, where it takes the picture of the same row; the loss is the plain mean, without the
``loss_scale`` of Cosmos. Its exponential advantages (``exp_reward``, off by default) are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import compute_flow_matching_error
from ebbflow.algorithms.built_in.sft import SFTConfig
from ebbflow.data import prompt_windows
from ebbflow.data.prompt_windows import PromptWindow, split_into_windows
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import Model, Size, device_of, generate_in_size, predict
from ebbflow.models.encoding import PromptWindows
from ebbflow.offline.batches import drop_caption
from ebbflow.offline.shards import DATA_DIGEST, read_latent_parts
from ebbflow.recipe.data import AnchorConfig
from ebbflow.seeding import Stream, derive_seed, make_generator
from ebbflow.stage import AnchorFiles, StageContext
from ebbflow.storage.tables import TableError, read_column, read_table_metadata
from ebbflow.training.batches import (
    ForwardBatch,
    build_forward_batch,
    count_shared_micro_batches,
    shard_for_rank,
    split_into_passes,
)
from ebbflow.training.distributed import sum_over_processes
from ebbflow.training.shared_prompts import encode_windows_together
from ebbflow.training.update import PolicyUpdater

SCHEDULE_STEPS = 1000
"""Noise levels of the family's schedule, as those of a stage with ``data``."""


@dataclass(frozen=True)
class AnchorShard:
    """The rows of a shard that may be trained on, and the prompts of their pictures."""

    path: Path
    rows: np.ndarray
    prompt_ids: np.ndarray
    size: Size | None


class DataAnchor:
    """Adds the gradient of the loss on data to that of each optimiser step.

    Which pictures a step sees, their noise and whether a caption is dropped depend on the seed of
    the stage and the number of the step alone, so a stage that resumes sees the same.
    """

    def __init__(self, ctx: StageContext, model: Model, files: AnchorFiles) -> None:
        """Encode the captions where one window has all of them; every process of a group calls it.

        Raises:
            TableError: the shards are not of this data.
        """
        assert ctx.config.anchor
        self.config: AnchorConfig = ctx.config.anchor
        self.seed = derive_seed(ctx.stage_seed, "anchor")
        self.micro_batch = ctx.config.micro_batch
        self.guided = ctx.config.reference.needs_guidance
        prompts = read_prompts(files.prompts, "train")
        self.prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self.shards = _list_shards(files)
        self.hyper = SFTConfig(noise_levels=1, sigma=self.config.sigma)
        # Of more captions only those of the next steps are encoded; how many steps the stage takes,
        # an offline stage knows later.
        self.embeddings: PromptWindows | None = None
        if len(prompts) < prompt_windows.PROMPTS_PER_WINDOW:  # and the empty caption
            captions = [*prompts, *map(drop_caption, prompts)]
            self.embeddings = PromptWindows([PromptWindow(range(sys.maxsize), lambda: captions)])
            encode_windows_together(model, self.embeddings, range(1), self.guided)

    def encode_captions(self, updater: PolicyUpdater) -> None:
        """As ``ebbflow.training.update.Anchor``."""
        if self.embeddings is None:
            assert updater.num_updates is not None, "stages that train an anchor count their steps"
            self.embeddings = PromptWindows(self._list_windows(updater.num_updates))
        step = range(updater.updates, updater.updates + 1)
        encode_windows_together(updater.policy.model, self.embeddings, step, self.guided)

    def _list_windows(self, num_updates: int) -> list[PromptWindow]:
        """List the runs of optimiser steps whose captions are encoded together."""
        ids_of_updates = []
        for update in range(num_updates):
            shard, rows = self.choose_rows(update)
            ids_of_updates.append(shard.prompt_ids[rows].tolist())

        def list_captions(updates: range) -> list[Prompt]:
            return [
                caption
                for update in updates
                for caption in self._choose_captions(ids_of_updates[update], update)
            ]

        return [
            PromptWindow(updates, partial(list_captions, updates))
            for updates in split_into_windows(ids_of_updates)
        ]

    def add_gradient(self, updater: PolicyUpdater, scale: float) -> Tensor:
        """As ``ebbflow.training.update.Anchor``."""
        policy = updater.policy
        shard, rows = self.choose_rows(updater.updates)
        row_ranks = policy.row_ranks
        groups = list(rows[:, None])  # every picture by itself
        mine = np.concatenate(shard_for_rank(groups, row_ranks))
        with generate_in_size(policy.model, shard.size):
            batch = self._build_batch(policy.model, shard, mine, updater.updates)
            device = batch.clean.device
            total = int(sum_over_processes(torch.tensor(len(mine), device=device)))
            # As in ``PolicyUpdater``: of the mean over the rows of all processes.
            factor = scale * self.config.weight * policy.gradient_factor / total
            loss_sum = torch.zeros((), device=device)
            passes = count_shared_micro_batches(groups, row_ranks.world, 1, self.micro_batch)
            for part in split_into_passes(batch.group_index, passes):
                velocity = predict(policy.model, *batch.inputs.model_arguments(part))
                errors = compute_flow_matching_error(batch.build_rows(part, velocity, {}), velocity)
                (errors.sum() * factor).backward()
                loss_sum += errors.detach().sum()
        mean_loss: Tensor = sum_over_processes(loss_sum) / total
        return mean_loss

    def choose_rows(self, update: int) -> tuple[AnchorShard, np.ndarray]:
        """Choose the pictures of an optimiser step, over all processes: a shard by its share of the
        pictures, and neighbours in it, so that one or two row groups are read.
        """
        draw = make_generator(self.seed, 0, update, 0, Stream.ANCHOR)
        ends = np.cumsum([len(shard.rows) for shard in self.shards])
        number = int(np.searchsorted(ends, draw.random() * ends[-1], side="right"))
        shard = self.shards[min(number, len(self.shards) - 1)]
        count = min(self.config.batch_size, len(shard.rows))
        start = int(draw.random() * (len(shard.rows) - count + 1))
        return shard, np.arange(start, start + count)

    def _build_batch(
        self, model: Model, shard: AnchorShard, rows: np.ndarray, update: int
    ) -> ForwardBatch:
        (latents,) = read_latent_parts(shard.path, [shard.rows[rows]])
        prompt_ids = shard.prompt_ids[rows].tolist()
        device = device_of(model)
        assert self.embeddings is not None, "the captions of a step are encoded before it"
        captions = self._choose_captions(prompt_ids, update)
        return build_forward_batch(
            latents.float().to(device),
            self.embeddings(update, captions).to(device),
            torch.zeros(len(rows), device=device),
            SampleKeys(self.seed, prompt_ids, [0] * len(rows)),
            np.arange(len(rows)),
            self.hyper,
            model.compute_sigmas(SCHEDULE_STEPS),
            visit=update,
        )

    def _choose_captions(self, prompt_ids: Sequence[int], update: int) -> list[Prompt]:
        """Return the captions of some pictures in an optimiser step, some of them dropped."""
        return [
            drop_caption(self.prompts[i]) if self._is_dropped(i, update) else self.prompts[i]
            for i in prompt_ids
        ]

    def _is_dropped(self, prompt_id: int, update: int) -> bool:
        draw = make_generator(self.seed, prompt_id, update, 0, Stream.CAPTIONS).random()
        return bool(draw < self.config.data.caption_dropout)


def open_anchor(ctx: StageContext, model: Model, files: AnchorFiles | None) -> DataAnchor | None:
    """Open the anchor of a stage; None for a stage without one."""
    if ctx.config.anchor is None:
        return None
    assert files, "who opens a stage with an anchor gives it the data"
    return DataAnchor(ctx, model, files)


def _list_shards(files: AnchorFiles) -> list[AnchorShard]:
    """List the rows of each shard whose captions the run is not evaluated on."""
    digest = read_table_metadata(files.advantages)[DATA_DIGEST]
    trained = read_column(files.advantages, "prompt_id").to_numpy()
    shards = []
    for path in files.latents:
        about = read_table_metadata(path)
        if about.get(DATA_DIGEST) != digest:
            raise TableError(f"{path} has the latents of other data; encode them again")
        prompt_ids = read_column(path, "prompt_id").to_numpy()
        rows = np.flatnonzero(np.isin(prompt_ids, trained))
        size = about["image_size"]
        if len(rows):
            shards.append(
                AnchorShard(path, rows, prompt_ids[rows], (size[0], size[1]) if size else None)
            )
    if not shards:
        raise TableError(f"{files.advantages}: no picture of the anchor is left to train on")
    return shards
