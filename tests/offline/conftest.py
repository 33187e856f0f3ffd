"""Shards whose rows can be recognised, and training on them that only says what it was given."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from offline_cases import Watched, write_rollouts

from ebbflow.data.schema import ADVANTAGES
from ebbflow.models.encoding import embed_prompts
from ebbflow.offline import batches
from ebbflow.offline.training import train_epochs
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import write_table
from ebbflow.training import shared_prompts
from ebbflow.training.distributed import Ranks


@pytest.fixture
def ctx(make_recipe):
    return StageContext(make_recipe(), round=0, stage=1)


@pytest.fixture
def stored(tmp_path):
    """``stored(sizes)``: shards of that many rows, two samples a prompt, and advantages for all
    rows but every fifth.
    """

    def store(*sizes, precision="float32"):
        keys = [(row // 2, row % 2) for row in range(sum(sizes))]
        parts = np.split(np.array(keys), np.cumsum(sizes)[:-1])
        rollouts = [
            write_rollouts(tmp_path / f"r{i}.parquet", part.tolist(), precision=precision)
            for i, part in enumerate(parts)
        ]
        kept = [key for row, key in enumerate(keys) if row % 5]
        columns = [pa.array([p for p, _ in kept]), pa.array([s for _, s in kept])]
        columns.append(pa.array([100.0 * p + s for p, s in kept], pa.float32()))
        about = {"seconds": {"scoring": 1.0}}
        write_table(
            tmp_path / "a.parquet", ADVANTAGES, [pa.record_batch(columns, schema=ADVANTAGES)], about
        )
        return rollouts, tmp_path / "a.parquet", kept

    return store


@pytest.fixture
def run(make_prompts, model):
    """Train on stored shards with the updates watched; returns (record, what they were given)."""

    def train(ctx, rollouts, advantages, recorder=None):
        updater = Watched(ctx.config.hyper_parameters)
        return train_epochs(
            ctx,
            model,
            updater,
            make_prompts(40),
            rollouts,
            advantages,
            recorder or MetricsRecorder(),
        ), updater.calls

    return train


@pytest.fixture
def pretend(monkeypatch):
    """``pretend(rank, world)``: be one of several processes."""

    def one_of(rank, world):
        monkeypatch.setattr(batches.Ranks, "current", staticmethod(lambda: Ranks(rank, world)))
        monkeypatch.setattr(
            shared_prompts,
            "encode_prompts_together",
            lambda model, prompts, negatives: embed_prompts(model, prompts, negatives),
        )

    return one_of
