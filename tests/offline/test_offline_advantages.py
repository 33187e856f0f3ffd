"""What the advantages table of an offline stage holds."""

from __future__ import annotations

import numpy as np
import pytest
from offline_cases import write_scores

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.data.schema import ADVANTAGES
from ebbflow.offline.advantages import write_advantages
from ebbflow.storage.tables import read_table, read_table_metadata

NAN = float("nan")
KEYS = [[(p, s) for p in prompts for s in range(4)] for prompts in ([0, 2], [1, 3])]
REWARDS = [[0.1, 0.5, 0.2, NAN, 0.3, 0.3, 0.3, 0.3], [0.0, 1.0, 0.5, 0.25, 0.9, NAN, NAN, NAN]]
KEPT = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_advantages_are_over_all_shards_and_leave_out_what_says_nothing(ctx, tmp_path, order):
    scores = [write_scores(tmp_path / f"{i}.parquet", KEYS[i], REWARDS[i]) for i in order]
    metrics = write_advantages(ctx, scores, tmp_path / "advantages.parquet")
    rewards = np.array(REWARDS[0] + REWARDS[1])
    prompt_ids = np.array([p for keys in KEYS for p, _ in keys])
    expected = compute_advantages(
        {"darkness": rewards}, {"darkness": 1.0}, prompt_ids, ctx.config.advantages
    )
    by_key = dict(zip(KEYS[0] + KEYS[1], expected.values, strict=True))
    table = read_table(tmp_path / "advantages.parquet", ADVANTAGES).to_pylist()
    assert {(row["prompt_id"], row["sample"]) for row in table} == KEPT
    for row in table:
        assert row["advantage"] == pytest.approx(by_key[row["prompt_id"], row["sample"]], abs=1e-6)
    assert metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert metrics["group/dropped_samples"] == 9
    assert metrics["group/zero_std_share"] == 0.5
    said = read_table_metadata(tmp_path / "advantages.parquet")
    assert said["metrics"] == metrics
    assert said["seconds"] == {"scoring": 4.0}
