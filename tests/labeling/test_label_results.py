"""The pairs file is what an offline stage trains on; the evidence says what was compared and what
came of it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from label_cases import grey, level, make_comparison, opened, rate, write_evaluation, write_rollouts

from ebbflow.data.images import encode_pngs
from ebbflow.data.pairs import IMAGES, LATENTS, read_pairs
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import ADVANTAGES
from ebbflow.labeling.results import build_evidence, render_markdown, write_pairs, write_results
from ebbflow.labeling.sources import load_comparison, load_rollouts
from ebbflow.offline.pairs import import_pairs
from ebbflow.offline.shards import read_latents
from ebbflow.offline.training import train_epochs
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import read_table
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

WINS = [True, False, True, True, False, True]


def test_the_preferred_picture_is_the_chosen_one(tmp_path):
    task = make_comparison(tmp_path, WINS)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna")
        write_results(session)
    pairs = list(read_pairs(tmp_path / "a" / "pairs.parquet"))
    assert [pair.prompt for pair in pairs] == [f"prompt {index}" for index in range(6)]
    assert {pair.columns for pair in pairs} == {IMAGES}
    for index, (pair, won) in enumerate(zip(pairs, WINS, strict=True)):
        levels = [200 if won else 60, 120 + index]
        assert [pair.chosen[0, 0, 0], pair.rejected[0, 0, 0]] == (levels if won else levels[::-1])


def test_the_majority_of_the_raters_chooses_and_ties_choose_nothing(tmp_path):
    with opened(make_comparison(tmp_path, [True] * 3), tmp_path / "a", all_pairs=True) as session:
        for rater, wanted in {
            "anna": (1, 1, 1),
            "ben": (1, 0, None),
            "cleo": (0, None, None),
            "dan": (1, None, 0),
        }.items():
            for key in session.order_of_pairs(rater):
                side = wanted[int(key.split("-")[0])]
                left = session.picture_on_left(rater, key)
                session.record_answer(
                    rater, key, "tie" if side is None else "left" if side == left else "right"
                )
        assert write_pairs(session, tmp_path / "pairs.parquet") == 1
    (row,) = read_table(tmp_path / "pairs.parquet").to_pylist()
    assert (row["pair"], row["votes_chosen"], row["votes_rejected"]) == ("0-0", 3, 1)
    assert (level(row["chosen"]), level(row["rejected"])) == (200, 120)


def test_without_a_decided_pair_there_is_no_file(tmp_path):
    task = make_comparison(tmp_path, WINS)
    with opened(task, tmp_path / "a") as session:
        write_results(session)
        assert not (tmp_path / "a" / "pairs.parquet").exists()
        rate(session, "anna", 1)
        write_results(session)
        assert (tmp_path / "a" / "pairs.parquet").exists()
        session.undo_last_answer("anna")
        session.record_answer("anna", session.order_of_pairs("anna")[0], "tie")
        write_results(session)
        assert not (tmp_path / "a" / "pairs.parquet").exists()


def test_videos_without_latents_make_no_pairs_file(tmp_path, monkeypatch):
    def video(value, **size):
        frames = np.stack([np.full((16, 32, 3), value + step, np.uint8) for step in range(3)])
        return encode_pngs(frames[None])[0]

    monkeypatch.setattr("label_cases.grey", video)
    paths = [
        write_evaluation(tmp_path / f"{name}.parquet", name, [value])
        for name, value in (("a", 10), ("b", 90))
    ]
    with opened(load_comparison(*paths, max_pairs=9, seed=0), tmp_path / "a") as session:
        rate(session, "anna")
        assert write_pairs(session, tmp_path / "pairs.parquet") == 0
    assert not (tmp_path / "pairs.parquet").exists()
    assert video(3) != grey(3)


@pytest.fixture
def ctx(make_recipe):
    offline = {"shards": 1, "micro_batch": 8, "algorithm": {"name": "diffusion_dpo"}, "epochs": 1}
    return StageContext(make_recipe(offline=offline), round=0, stage=1)


@pytest.mark.parametrize("kind", ["rollouts", "comparison"])
def test_an_offline_stage_trains_on_the_preferences_of_people(ctx, model, tmp_path, kind):
    """From pictures over two raters' answers to updates of DPO."""
    if kind == "rollouts":
        task = load_rollouts(
            *write_rollouts(tmp_path, groups=4, group_size=4), max_pairs=100, seed=0
        )
    else:
        task = make_comparison(tmp_path, [True, False] * 4, [f'"P{index}"' for index in range(8)])
    with opened(task, tmp_path / "a") as session:
        for rater in ("anna", "ben"):
            rate(session, rater)
        write_results(session)
    source = tmp_path / "a" / "pairs.parquet"
    imported = import_pairs(ctx, model, source, tmp_path / "imported")
    assert (imported.pairs, imported.ties, imported.ignored) == (
        8,
        0,
        ["pair", "votes_chosen", "votes_rejected"],
    )
    assert {pair.columns for pair in read_pairs(source)} == {
        LATENTS if kind == "rollouts" else IMAGES
    }
    (shard,) = imported.rollouts
    brightness = read_latents(shard).numpy().mean(axis=(1, 2, 3))
    samples = read_table(shard)["sample"]
    assert samples.to_pylist() == [0, 1] * 8
    assert np.all(
        brightness[::2] > brightness[1::2]
    )  # chosen first: the raters prefer the brighter one
    assert read_table(imported.advantages, ADVANTAGES)["advantage"].to_pylist() == [1, -1] * 8

    recorder = MetricsRecorder()
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    updater = PolicyUpdater(policy, ctx.offline_config)
    prompts = read_prompts(imported.prompts, "train")
    record = train_epochs(
        ctx, model, updater, prompts, imported.rollouts, imported.advantages, recorder
    )
    assert (record.samples, record.optimizer_steps) == (16, 2)
    assert all(np.isfinite(metrics["loss"]) for metrics in recorder.metrics_rows)
    assert any(not value.equal(before[name]) for name, value in policy.parameters.items())


def test_the_evidence_says_who_was_preferred_and_how_sure_it_is(tmp_path):
    wins = [True] * 40
    task = make_comparison(tmp_path, wins)
    with opened(task, tmp_path / "a") as session:
        rate(session, "anna", 4)
        rate(session, "ben")
        write_results(session)
    found = json.loads((tmp_path / "a" / "evidence.json").read_text())
    assert found["decision"] == "candidate"
    assert found["policies"] == {"champion": "before", "candidate": "1.1 online"}
    assert (
        found["test"]["candidate"],
        found["test"]["champion"],
        found["test"]["decided_after"],
    ) == (8, 0, 8)
    assert found["test"]["low"] > 0.5
    assert set(found["raters"]) == {"anna", "ben"}
    assert found["raters"]["anna"]["candidate"] == 4
    assert found["sha256"] == {
        "champion": sha256_of_file(tmp_path / "champion.parquet"),
        "candidate": sha256_of_file(tmp_path / "candidate.parquet"),
        "answers": sha256_of_file(tmp_path / "a" / "answers.jsonl"),
    }
    page = (tmp_path / "a" / "evidence.md").read_text()
    assert (
        "**Raters prefer the candidate.** Of the pairs that were no ties, the candidate was"
        " preferred in 8 of 8" in page
    )
    assert "| anna | 0 | 4 | 0 |" in page


@pytest.mark.parametrize(
    ("wins", "said"),
    [([False] * 30, "**Raters prefer the champion.**"), ([True, False] * 9, "**Undecided.**")],
)
def test_the_champion_can_win_and_nobody_can(tmp_path, wins, said):
    with opened(make_comparison(tmp_path, wins), tmp_path / "a") as session:
        rate(session, "anna")
        assert said in render_markdown(build_evidence(session))


def test_pairs_of_one_policy_have_evidence_without_a_test(tmp_path):
    task = load_rollouts(*write_rollouts(tmp_path, groups=4, group_size=2), max_pairs=100, seed=0)
    with opened(task, tmp_path / "a") as session:
        for rater in ("anna", "ben"):
            rate(session, rater)
        found = build_evidence(session)
    assert (found["decision"], found["test"], found["krippendorff_alpha"]) == (None, None, 1)
    assert found["answers"]["first"] + found["answers"]["second"] == 8
    assert "Pairs of one policy: nothing is tested." in render_markdown(found)


@pytest.mark.parametrize("label", ["<script>x</script>", "a | b", "![x](http://e)", "`x`\n# y"])
def test_names_of_policies_are_no_markup_in_the_evidence(tmp_path, label):
    champion = write_evaluation(tmp_path / "a.parquet", label, [1, 2])
    candidate = write_evaluation(tmp_path / "b.parquet", "b", [3, 4])
    with opened(load_comparison(champion, candidate, 9, 0), tmp_path / "a") as session:
        found = build_evidence(session)
    assert found["policies"]["champion"] == label
    page = render_markdown(found)
    (line,) = [line for line in page.splitlines() if line.startswith("| champion")]
    assert line.count("|") == 3
    assert not set(line.split("|")[2]) & set("<>`![]")
    assert "\n# y" not in page
