"""The benchmark of the offline path at tiny size: what it runs, measures and reports."""

from __future__ import annotations

import pytest

from benchmarks import scale

ON = {"machine": {"cpu": "a processor", "cores": 2, "python": "3.11"}}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"SHARD": 32, "SD3": (2, 4, 8), "SD3_SHARD": 64, "SD3_BATCH": 16}.items():
        monkeypatch.setattr(scale, name, value)


def test_a_stage_goes_through_all_its_phases(tmp_path):
    found = scale.run_stage(tmp_path, 70)
    assert found["samples"] == 96
    assert (
        len(list(tmp_path.glob("rollouts-*.parquet")))
        == len(list(tmp_path.glob("scores-*.parquet")))
        == 3
    )
    assert all(found[f"{phase} seconds"] > 0 for phase in scale.PHASES)
    assert all(found[f"{phase} MiB"] >= 0 for phase in scale.PHASES)


@pytest.mark.parametrize(
    ("precision", "size"),
    [pytest.param("float32", 4, marks=pytest.mark.exhaustive), ("bfloat16", 2)],
)
def test_latents_are_stored_and_read_in_their_precision(tmp_path, precision, size):
    found = scale.measure_latents(tmp_path, precision)
    assert found["KiB"] > 0.9 * size * 2 * 4 * 8 / 1024
    assert found["read ms"] > 0


def test_the_report_has_a_row_for_each_measurement():
    latents = {"KiB": 99.4, "write ms": 0.5, "read ms": 0.25, "epoch, shards": 1.42} | ON
    phases = {f"{phase} {unit}": 2.0 for phase in scale.PHASES for unit in ("seconds", "MiB")}
    text = scale.format_report(
        {"now latents float32": latents, "now stage 2000": {"samples": 2000, **phases} | ON}
    )
    assert "| now, float32 | 99 | 0.50 | 0.25 | 1.4 |" in text
    assert "| now | 2,000 | 1.000 | 1.000 | 1.000 | 1.000 | 4.000 | 2 | 2 | 2 | 2 | 1024 |" in text
    assert "a processor, one of 2 cores" in text
