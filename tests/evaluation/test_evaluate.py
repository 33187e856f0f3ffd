from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from ebbflow.data import prompt_windows
from ebbflow.data.images import decode_pngs
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation import drift
from ebbflow.evaluation.evaluate import build_evaluation_keys, evaluate_on_prompts
from ebbflow.evaluation.image_statistics import STATISTICS as PER_IMAGE
from ebbflow.flow.noise import generate_noise
from ebbflow.models import load_model
from ebbflow.models.families.glyph import GlyphModel
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import generate_samples
from ebbflow.storage.tables import read_table, read_table_metadata
from ebbflow.training.policy import Policy
from ebbflow.watchdog import Watchdog
from tests.conftest import Darkness

STATISTICS = [*PER_IMAGE, "diversity_latents", "diversity_pixels", "diversity_across_prompts"]


@pytest.fixture
def run(make_recipe, scorer, prompts, base_folder, tmp_path):
    """Evaluate the base, moved by ``size`` in every parameter."""

    def evaluation(
        size=0.0,
        chosen=prompts,
        path=tmp_path / "samples.parquet",
        config=None,
        micro_batch=64,
        samples=1,
        judge=scorer,
    ):
        model = load_model(base_folder)
        policy = Policy(model, config or PolicyConfig(), 0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter += size * torch.randn(parameter.shape, generator=generator)
        recipe = make_recipe(
            evaluation={
                "steps": 3,
                "micro_batch": micro_batch,
                "samples": samples,
                "repeated_prompts": 4,
            }
        )
        return evaluate_on_prompts(recipe, model, policy, 3, judge, chosen, "the label", path)

    return evaluation


def comparable(evaluation):
    return evaluation.model_copy(update={"seconds": {}})


def test_what_may_hang_in_an_evaluation_is_named(run, monkeypatch):
    names = []
    add_activity = Watchdog.add

    def add_and_remember(watchdog, name):
        names.append(name)
        return add_activity(watchdog, name)

    monkeypatch.setattr(Watchdog, "add", add_and_remember)
    run(micro_batch=64)
    assert "evaluating the label: generating 11 samples" in names


@pytest.mark.parametrize("size", [0.0, 0.02])
def test_the_same_policy_twice_is_the_same_evaluation(run, tmp_path, size):
    one = run(size, path=tmp_path / "1.parquet")
    other = run(size, path=tmp_path / "2.parquet")
    assert comparable(one) == comparable(other)
    assert read_table(tmp_path / "1.parquet").equals(read_table(tmp_path / "2.parquet"))


@pytest.mark.parametrize(
    "config", [PolicyConfig(), PolicyConfig(train="lora", rank=4, alpha=8)], ids=["full", "lora"]
)
def test_the_base_has_no_drift_and_a_changed_policy_has(run, config):
    assert run(0.0, config=config).velocity_drift == 0
    little, more = (run(size, config=config).velocity_drift for size in (0.01, 0.03))
    assert 0 < little < more


def test_the_drift_is_summed_a_micro_batch_at_a_time(run, monkeypatch):
    num_rows = []
    generate_noise = drift.generate_noise

    def count_rows(shape, seed, prompt_ids, *arguments, **options):
        num_rows.append(len(prompt_ids))
        return generate_noise(shape, seed, prompt_ids, *arguments, **options)

    monkeypatch.setattr(drift, "generate_noise", count_rows)
    whole = run(0.02, micro_batch=64).velocity_drift
    num_whole = len(num_rows)
    parts = run(0.02, micro_batch=2).velocity_drift
    assert max(num_rows[num_whole:]) == 2
    assert parts == pytest.approx(whole, rel=1e-4)


def test_prompts_are_encoded_in_windows_and_give_the_same_samples(run, tmp_path, monkeypatch):
    encoded = []
    encode_prompts = GlyphModel.encode_prompts

    def count_prompts(model, prompts):
        encoded.append(len(prompts))
        return encode_prompts(model, prompts)

    monkeypatch.setattr(GlyphModel, "encode_prompts", count_prompts)
    whole = run(0.02, path=tmp_path / "whole", micro_batch=2, samples=3)
    assert encoded == [11]
    encoded.clear()
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 4)
    parts = run(0.02, path=tmp_path / "parts", micro_batch=2, samples=3)
    # Two micro-batches of two, twice; the last three first samples and the further ones of the
    # first held-out prompt; those of the next three.
    assert encoded == [4, 4, 4, 3]
    one, other = (read_table(tmp_path / name) for name in ("whole", "parts"))
    for column in ("prompt_id", "sample", "split", "failure"):
        assert one[column].equals(other[column])
    # The text encoder rounds otherwise with other prompts beside a prompt: a pixel in a thousand
    # may be one of 255 levels off.
    assert other["reward"].to_pylist() == pytest.approx(one["reward"].to_pylist(), abs=1e-5)
    assert parts.velocity_drift == pytest.approx(whole.velocity_drift, rel=1e-3)


def test_another_policy_is_another_evaluation(run):
    assert run(0.0).held_out != run(0.02).held_out


def test_means_are_over_their_own_split(run, prompts, tmp_path):
    evaluation = run()
    table = read_table(
        tmp_path / "samples.parquet",
        build_evaluation_schema(["reward", "brightness", "darkness"], STATISTICS),
    ).to_pylist()
    assert [row["prompt_id"] for row in table] == [prompt.prompt_id for prompt in prompts]
    assert [row["target"] for row in table] == [prompt.target for prompt in prompts]
    darkness = 1 - decode_pngs([row["image"] for row in table]).mean((1, 2, 3)) / 255
    assert [row["reward"] for row in table] == pytest.approx(darkness)
    for means, rows in (
        (evaluation.validation, slice(0, 5)),
        (evaluation.held_out, slice(5, None)),
    ):
        assert means == pytest.approx(
            {
                "reward": darkness[rows].mean(),
                "darkness": darkness[rows].mean(),
                "brightness": 1 - darkness[rows].mean(),
            }
        )
    assert (evaluation.label, evaluation.policy_version, evaluation.coverage) == (
        "the label",
        3,
        1.0,
    )
    assert read_table_metadata(tmp_path / "samples.parquet")["label"] == "the label"
    assert evaluation.seconds.keys() == {"sampling", "scoring"}


def test_means_by_tag_are_of_held_out_prompts_alone(run, prompts, tmp_path):
    def with_tag(prompt):
        return type(prompt)(
            **{
                **vars(prompt),
                "metadata": f'{{"tag": "{"even" if prompt.prompt_id % 2 == 0 else "odd"}"}}',
            }
        )

    evaluation = run(chosen=[with_tag(prompt) for prompt in prompts], samples=2)
    rows = [
        row
        for row in read_table(tmp_path / "samples.parquet").to_pylist()
        if row["split"] == "held_out"
    ]
    for category, odd in zip(
        evaluation.categories, (1, 0), strict=True
    ):  # the first held-out prompt has the id 15
        own = [
            [row["darkness"] for row in rows if row["prompt_id"] == number]
            for number in range(15, 21)
            if number % 2 == odd
        ]
        assert (category.column, category.value, category.prompts) == (
            "tag",
            "odd" if odd else "even",
            3,
        )
        assert category.means["darkness"] == pytest.approx(
            np.mean([np.mean(of_prompt) for of_prompt in own])
        )
    assert evaluation.held_out.keys() == run(chosen=prompts, samples=2).held_out.keys()
    assert run(chosen=prompts).categories == []


def test_images_are_those_of_the_deterministic_sampler(run, prompts, model, tmp_path):
    run()
    conditioning = model.encode_prompts(prompts)
    latents = generate_samples(
        model, conditioning, build_evaluation_keys(prompts), SamplerConfig(name="ode", steps=3)
    ).latents
    stored = decode_pngs(read_table(tmp_path / "samples.parquet")["image"].to_pylist())
    assert np.abs(stored.astype(int) - model.decode_latents(latents)).max() <= 1


def test_noise_belongs_to_the_prompt_whoever_else_is_evaluated(run, prompts, tmp_path):
    run(path=tmp_path / "all.parquet")
    run(chosen=prompts[3:7][::-1], path=tmp_path / "some.parquet")
    every = {row["prompt_id"]: row for row in read_table(tmp_path / "all.parquet").to_pylist()}
    for row in read_table(tmp_path / "some.parquet").to_pylist():
        assert row["reward"] == pytest.approx(every[row["prompt_id"]]["reward"], abs=1e-3)
    keys = build_evaluation_keys(prompts)
    draws = generate_noise((8,), keys.seed, keys.prompt_ids, keys.samples)
    assert len({tuple(draw.tolist()) for draw in draws}) == len(prompts)


def test_prompts_that_were_not_scored_lower_the_coverage_and_stay_out_of_the_means(
    run, prompts, tmp_path
):
    broken = [
        type(p)(**{**vars(p), "target": "FAIL"}) if p.prompt_id in (10, 17, 18, 19) else p
        for p in prompts
    ]
    evaluation = run(chosen=broken)
    rewards = [row["reward"] for row in read_table(tmp_path / "samples.parquet").to_pylist()]
    assert evaluation.coverage == 0.5
    assert [index for index, reward in enumerate(rewards) if reward is None] == [0, 7, 8, 9]
    assert evaluation.held_out["reward"] == pytest.approx(np.mean([rewards[i] for i in (5, 6, 10)]))
    assert evaluation.validation["reward"] == pytest.approx(np.mean(rewards[1:5]))


def test_samples_are_decoded_and_scored_in_batches(run, tmp_path, monkeypatch):
    whole = run(0.02, path=tmp_path / "whole.parquet")
    sizes = []
    decode = GlyphModel.decode_latents
    monkeypatch.setattr(
        GlyphModel,
        "decode_latents",
        lambda self, latents: sizes.append(len(latents)) or decode(self, latents),
    )
    parts = run(0.02, path=tmp_path / "parts.parquet", micro_batch=4)
    assert sizes == [4, 4, 3]
    assert parts.held_out == pytest.approx(whole.held_out, abs=1e-3)
    one, other = (read_table(tmp_path / f"{name}.parquet") for name in ("whole", "parts"))
    assert one["prompt_id"].equals(other["prompt_id"])
    images = [decode_pngs(table["image"].to_pylist()).astype(int) for table in (one, other)]
    assert np.abs(images[0] - images[1]).max() <= 1


def test_videos_are_stored_whole_and_scored_over_their_frames(run, tmp_path, monkeypatch):
    decode = GlyphModel.decode_latents

    def fading(self, latents):
        images = decode(self, latents)
        return np.stack([images, images // 2, images // 4, images // 4], 1)

    run(path=tmp_path / "images.parquet")
    monkeypatch.setattr(GlyphModel, "decode_latents", fading)
    evaluation = run(path=tmp_path / "videos.parquet")
    images, videos = (
        decode_pngs(read_table(tmp_path / f"{name}.parquet")["image"].to_pylist())
        for name in ("images", "videos")
    )
    assert np.array_equal(videos, np.stack([images, images // 2, images // 4, images // 4], 1))
    darkness = 1 - videos.mean((1, 2, 3, 4)) / 255
    assert read_table(tmp_path / "videos.parquet")["reward"].to_pylist() == pytest.approx(darkness)
    assert evaluation.held_out["reward"] == pytest.approx(darkness[5:].mean())
    assert evaluation.coverage == 1


def test_further_samples_leave_the_first_ones_as_they_are(run, tmp_path):
    """Micro-batches of 4 do not divide the 11 first samples: the further ones must not fill the
    last one up.
    """
    run(0.02, path=tmp_path / "one.parquet", micro_batch=4)
    run(0.02, path=tmp_path / "three.parquet", micro_batch=4, samples=3)
    one, three = (read_table(tmp_path / f"{name}.parquet") for name in ("one", "three"))
    assert three.num_rows == 11 + 2 * 4
    first = three.slice(0, 11)
    columns = [name for name in one.column_names if not name.startswith("statistic/diversity")]
    assert first.select(columns).equals(one.select(columns))
    assert three["sample"].to_pylist()[11:] == [1, 2] * 4
    assert three["prompt_id"].to_pylist()[11:] == [id for id in (15, 16, 17, 18) for _ in range(2)]


def test_statistics_and_distributions_are_those_of_the_samples(run, tmp_path):
    evaluation = run(0.02, samples=3)
    rows = [
        row
        for row in read_table(tmp_path / "samples.parquet").to_pylist()
        if row["split"] == "held_out"
    ]
    by_prompt = [[row for row in rows if row["prompt_id"] == id] for id in range(15, 21)]
    assert [len(group) for group in by_prompt] == [3, 3, 3, 3, 1, 1]
    rewards = [np.mean([row["reward"] for row in group]) for group in by_prompt]
    found = evaluation.distributions["reward"]
    assert evaluation.held_out["reward"] == pytest.approx(np.mean(rewards))
    assert found.spread == pytest.approx(np.std(rewards))
    assert found.worst_tenth == pytest.approx(min(rewards))
    assert found.best_of == pytest.approx(
        np.mean([max(row["reward"] for row in group) for group in by_prompt[:4]])
    )
    brightness = [np.mean([row["statistic/brightness"] for row in group]) for group in by_prompt]
    assert evaluation.statistics["brightness"] == pytest.approx(np.mean(brightness))
    images = [decode_pngs([row["image"] for row in group]) / 255 for group in by_prompt]
    apart = [
        np.mean([np.sqrt(((a - b) ** 2).mean()) for a, b in combinations(group, 2)])
        for group in images[:4]
    ]
    assert evaluation.statistics["diversity_pixels"] == pytest.approx(np.mean(apart), abs=1e-5)
    first = [group[0] for group in images]
    nearest = [
        min(np.sqrt(((one - other) ** 2).mean()) for other in first if other is not one)
        for one in first
    ]
    assert evaluation.statistics["diversity_across_prompts"] == pytest.approx(
        np.mean(nearest), abs=1e-5
    )
    assert "diversity_features" not in evaluation.statistics


def test_one_sample_of_a_prompt_has_no_diversity(run):
    evaluation = run(0.02)
    assert not {"diversity_latents", "diversity_pixels"} & set(evaluation.statistics)
    assert evaluation.distributions["reward"].best_of is None


class Embedding(Reward):
    """A guardrail with features: the mean colour."""

    has_features = True

    name = "embedding"

    def __call__(self, images, prompts):
        return RewardResult(np.zeros(len(images)))

    def compute_features(self, images):
        return images.mean((1, 2)).astype(np.float32)


def test_diversity_is_also_that_of_features_where_a_reward_has_some(run, scorer, tmp_path):
    evaluation = run(0.02, samples=2, judge=replace(scorer, guardrails=(Embedding(),)))
    rows = [
        row
        for row in read_table(tmp_path / "samples.parquet").to_pylist()
        if row["prompt_id"] in range(15, 19)
    ]
    colours = {
        (row["prompt_id"], row["sample"]): decode_pngs([row["image"]])[0].mean((0, 1))
        for row in rows
    }
    apart = [np.sqrt(((colours[id, 0] - colours[id, 1]) ** 2).mean()) for id in range(15, 19)]
    assert evaluation.statistics["diversity_features"] == pytest.approx(np.mean(apart), rel=1e-4)


class Doubled(Darkness):
    name = "of_signs"

    def __call__(self, images, prompts):
        return RewardResult(2 * super().__call__(images, prompts).values)


def test_a_reward_of_a_prompt_set_counts_its_own_prompts_alone(run, prompts, tmp_path):
    """Prompts of ``signs`` are scored by another reward; the means of both, and the coverage, are
    of their own prompts.
    """
    mixed = [
        replace(prompt, source="signs" if prompt.prompt_id % 2 else "words") for prompt in prompts
    ]
    words = Darkness()
    signs = Doubled()
    of_sets = {
        "darkness": configure_reward("ocr", prompts=["words"]),
        "of_signs": configure_reward("ocr", prompts=["signs"]),
    }
    found = run(
        0.0,
        chosen=mixed,
        judge=Scorer(((words, 1.0), (signs, 1.0)), of_sets=of_sets),
        micro_batch=4,
    )
    rows = read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["source"] for row in rows] == [prompt.source for prompt in mixed]
    assert [row["darkness"] is None for row in rows] == [
        prompt.source == "signs" for prompt in mixed
    ]
    assert {row["failure"] for row in rows} == {None}
    held_out = [row for row in rows if row["split"] == "held_out"]
    for name in ("darkness", "of_signs"):
        assert found.held_out[name] == pytest.approx(
            np.mean([row[name] for row in held_out if row[name] is not None])
        )
    assert found.held_out["reward"] == pytest.approx(
        np.mean([row["darkness"] or row["of_signs"] for row in held_out])
    )
    assert found.coverage == 1.0


class LatentDarkness(Reward):
    """``Darkness``, from the latents."""

    scores = "latents"

    name = "of_latents"

    def __call__(self, latents, prompts):
        grey = GlyphModel.decode_with_gradient(None, torch.from_numpy(latents)).mean((1, 2, 3))
        return RewardResult(1 - grey.numpy().astype(float))


def test_a_reward_of_latents_scores_those_that_were_decoded(run):
    found = run(
        0.01, judge=Scorer(((Darkness(), 1.0),), (LatentDarkness(),)), micro_batch=4
    ).held_out
    assert found["of_latents"] == pytest.approx(found["darkness"], abs=2e-3)
    assert found["of_latents"] != found["darkness"]
