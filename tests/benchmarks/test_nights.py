"""The simulated nights of a schedule: what the page claims of thirty holds for the first five."""

from __future__ import annotations

from pathlib import Path

from benchmarks import nights


def test_nights_have_seeds_of_their_own_and_end_without_a_change(tmp_path: Path) -> None:
    simulated = nights.simulate_nights(5, tmp_path)
    seeds = [night.seed for night in simulated if night.seed is not None]
    assert len(set(seeds)) == len(seeds)
    # On the fourth night nobody changed the file; the champion of the third may still be new.
    fourth = simulated[3]
    moved = simulated[2].champion != simulated[1].champion
    assert (fourth.seed is None) != moved
    if not moved:
        assert fourth.outcome.startswith("nothing changed since run nightly-seed")
    promoted = len({night.champion for night in simulated} - {"none"})
    bound = nights.compute_bound(5, promoted)
    assert max(night.megabytes for night in simulated) < bound


def test_the_committed_page_has_thirty_nights_below_its_bound() -> None:
    rows = [line.split(" | ") for line in nights.RESULTS.read_text().splitlines()]
    table = [row for row in rows if row[0].removeprefix("| ").isdigit()]
    assert len(table) == 30
    seeds = [row[1] for row in table if row[1] != "–"]
    assert len(set(seeds)) == len(seeds) >= 20
    promoted = len({row[3] for row in table} - {"none"})
    assert max(float(row[4]) for row in table) < nights.compute_bound(30, promoted)
