"""A reward model from labels to the reward ``model``: trained, resumed, registered, compared,
loaded.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from reward_label_cases import (
    HEIGHT,
    WIDTH,
    build_recipe,
    draw_text,
    encode,
    make_answers,
    make_texts,
    write_rows,
)

from ebbflow.cli import main
from ebbflow.data.labels import LabelFileError, Labels, read_labels
from ebbflow.data.prompts import Prompt
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.registry import configure_reward
from ebbflow.registry.model_version import RegistryError
from ebbflow.registry.promotion import REPLACES
from ebbflow.registry.reward_models import find_champion_reward_model, pin_reward_models
from ebbflow.reward_training import folder, train
from ebbflow.reward_training.decide import RewardModelDecision
from ebbflow.reward_training.folder import train_reward_folder
from ebbflow.reward_training.run import train_and_register
from ebbflow.reward_training.train import score_pictures, train_network
from ebbflow.rewards.base import RewardError
from ebbflow.rewards.built_in.model import list_unpinned_models
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.reward_networks import build_reward_network
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from tests.rewards.network_cases import write_clip


def as_prompt(text: str) -> Prompt:
    return Prompt(0, f'"{text}"', "", text, "test", "train", "{}")


@pytest.fixture
def labels(tmp_path):
    return write_rows(tmp_path / "labels.parquet", make_answers(120, ("ann", "ben")))


def test_a_reward_model_learns_what_raters_prefer(tmp_path, labels):
    recipe = build_recipe(tmp_path, labels)
    record = train_reward_folder(recipe, read_labels([labels]), tmp_path / "f", tmp_path / "c")
    measurement = record.measurement
    assert measurement.agreement.low > 0.8
    assert (measurement.rater_agreement, measurement.krippendorff_alpha) == (1, 1)
    assert record.decision.promote
    assert record.answers == 240 > record.trained_answers + 40
    # The folder alone is a reward, on bytes and with gradient.
    reward = load_reward(configure_reward("model", uri=str(tmp_path / "f")))
    texts = make_texts(20, seed=99)
    images = np.stack([draw_text(text) for text in texts])
    # Scores of one prompt are compared: those of two have no common origin.
    right = reward(images, [as_prompt(text) for text in texts]).values
    wrong = reward(np.roll(images, 1, axis=0), [as_prompt(text) for text in texts]).values
    assert (right > wrong).mean() > 0.8
    pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    pixels.requires_grad_()
    scores = reward.score_with_gradient(pixels, [as_prompt(text) for text in texts])
    assert scores.detach().numpy() == pytest.approx(right, abs=1e-5)
    (gradient,) = torch.autograd.grad(scores.sum(), pixels)
    assert gradient.abs().sum() > 0
    assert (
        "names no text" in reward(images[:1], [Prompt(0, "x", "", None, "", "", "{}")]).failures[0]
    )
    page = (tmp_path / "f" / "report.html").read_text()
    assert "<svg" in page
    assert f"{measurement.agreement.mean:.3f}" in page


def test_a_killed_training_resumes_with_the_same_weights(tmp_path, labels, monkeypatch):
    config = build_recipe(tmp_path, labels, epochs=3).reward_model
    answers = read_labels([labels])
    whole = train_network(config, answers, 5, tmp_path / "whole").trained_weights()
    save = train._save_checkpoint

    def save_and_die(*arguments):
        save(*arguments)
        if arguments[-1] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "_save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_network(config, answers, 5, tmp_path / "killed")
    monkeypatch.setattr(train, "_save_checkpoint", save)
    resumed = train_network(config, answers, 5, tmp_path / "killed").trained_weights()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_versions_replace_each_other_by_the_gate_and_recipes_pin_them(tmp_path, labels):
    recipe = build_recipe(tmp_path, labels)
    store = resolve_tracking_uri(recipe)
    first = train_and_register(recipe)
    assert first.version.uri == "models:/legible/1"
    # Nothing has changed: nothing is trained.
    assert train_and_register(recipe).version == first.version
    # Not better than the champion on the same answers: registered and not promoted.
    again = train_and_register(recipe.model_copy(update={"seed": 1}))
    assert (again.version.version, again.record.compared_with) == ("2", "1")
    assert not again.record.decision.promote
    champion = find_champion_reward_model(store, "legible")
    assert champion == first.version
    data = recipe.model_dump(exclude_unset=True)
    data["rewards"] = [{"name": "model", "uri": "models:/legible@champion"}]
    unpinned = Recipe.model_validate(data)
    assert list_unpinned_models(unpinned) == ["models:/legible@champion"]
    pinned = pin_reward_models(unpinned)
    (reward,) = pinned.rewards
    assert (reward.uri, reward.digest) == ("models:/legible/1", first.version.digest)
    assert list_unpinned_models(pinned) == []
    assert pin_reward_models(pinned) == pinned
    assert pin_reward_models(recipe) is recipe
    score = load_reward(reward)(draw_text("ABCD")[None], [as_prompt("ABCD")]).values[0]
    assert np.isfinite(score)
    other = reward.model_copy(update={"digest": "0" * 64})
    with pytest.raises(RewardError, match="the recipe says 000"):
        load_reward(other)(draw_text("ABCD")[None], [as_prompt("ABCD")])
    # Never replaced by the digest of what has the name now.
    with pytest.raises(RegistryError, match="the recipe says 000"):
        pin_reward_models(unpinned.model_copy(update={"guardrails": [other]}))
    # Without the store, tasks could not find the version.
    unplaced = unpinned.model_copy(update={"rewards": [reward.model_copy(update={"store": None})]})
    assert list_unpinned_models(unplaced) == [reward.uri]
    assert pin_reward_models(unplaced).rewards == [reward]
    # A recipe that is sent to another machine: that one adds its own address of the store.
    (sent,) = pin_reward_models(unpinned, with_store=False).rewards
    assert (sent.uri, sent.digest, sent.store) == (reward.uri, reward.digest, None)


def test_a_champion_that_a_person_chose_stays_until_a_better_one(tmp_path, labels):
    recipe = build_recipe(tmp_path, labels, epochs=1, lr=1e-9)
    store = resolve_tracking_uri(recipe)
    client = connect_to_store(store)
    promote = RewardModelDecision(promote=True, reasons=[], difference=1.0, low=1.0, high=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "decide_reward_model", lambda *_: promote)
        first = train_and_register(recipe)
        second = train_and_register(recipe.model_copy(update={"seed": 1}))
        assert find_champion_reward_model(store, "legible") == second.version
        # The alias was set, and the tag was not: the attempt was killed between the two.
        client.delete_model_version_tag("legible", "2", REPLACES)
        train_and_register(recipe.model_copy(update={"seed": 1}))
        assert client.get_model_version("legible", "2").tags[REPLACES] == "1"
        client.set_registered_model_alias("legible", "champion", "1")
        # Of the same labels: the version that was champion is found, and not promoted again.
        again = train_and_register(recipe.model_copy(update={"seed": 1}))
        assert again.version == second.version
        assert find_champion_reward_model(store, "legible") == first.version
        # A new one is compared with the person's choice, and takes its place.
        third = train_and_register(recipe.model_copy(update={"seed": 2}))
        assert third.record.compared_with == "1"
        assert find_champion_reward_model(store, "legible") == third.version


def test_a_model_that_rewards_hacked_pictures_is_not_promoted(tmp_path, labels):
    # The "honest" pictures are those that raters reject: the same as labels turned around.
    rows = [
        {"prompt": f'"{text}"', "chosen": encode(draw_text(other)), "kind": "swapped"}
        | {"rejected": encode(draw_text(text))}
        for text, other in zip(make_texts(40, 7), make_texts(40, 8), strict=True)
    ]
    hacked = write_rows(tmp_path / "hacked.parquet", rows)
    recipe = build_recipe(tmp_path, labels, hacked=str(hacked))
    outcome = train_and_register(recipe)
    assert outcome.record.measurement.hacked["swapped"].high < 0.5
    assert not outcome.record.decision.promote
    assert find_champion_reward_model(resolve_tracking_uri(recipe), "legible") is None


@pytest.mark.parametrize("layout", ["one prompt", "ratings"])
def test_hacked_pairs_that_give_no_interval_are_named_before_the_training(tmp_path, labels, layout):
    picture = encode(draw_text("ABCD"))
    row = {"prompt": '"ABCD"', "chosen": picture, "rejected": picture, "kind": "blur"}
    if layout == "ratings":
        row = {"prompt": '"ABCD"', "image": picture, "rating": 1.0}
    hacked = write_rows(tmp_path / "hacked.parquet", [row])
    recipe = build_recipe(tmp_path, labels, hacked=str(hacked))
    with pytest.raises(LabelFileError, match="at least 2 prompts"):
        train_reward_folder(recipe, read_labels([labels]), tmp_path / "f", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_ratings_train_a_reward_in_their_own_units(tmp_path, monkeypatch):
    texts = make_texts(80, seed=3)
    rows = []
    for text, other in zip(texts, texts[1:] + texts[:1], strict=True):
        rows.append({"prompt": f'"{text}"', "image": encode(draw_text(text)), "rating": 9.0})
        rows.append({"prompt": f'"{text}"', "image": encode(draw_text(other)), "rating": 2.0})
    path = write_rows(tmp_path / "ratings.parquet", rows)
    recipe = build_recipe(tmp_path, path)
    record = train_reward_folder(recipe, read_labels([path]), tmp_path / "f", tmp_path / "c")
    assert record.measurement.agreement.low > 0.6
    reward = load_reward(configure_reward("model", uri=str(tmp_path / "f")))
    held = texts[:40]
    values = reward(
        np.stack([draw_text(text) for text in held]), [as_prompt(text) for text in held]
    ).values
    assert 5.5 < values.mean() < 11


@pytest.mark.parametrize("mode", ["head", "lora"])
def test_a_clip_starts_as_its_own_score_and_is_trained(tmp_path, mode):
    write_clip(tmp_path / "clip")
    rows = [
        {
            "prompt": text,
            "chosen": encode(draw_text("AAAA", 40, 48)),
            "rejected": encode(draw_text("WWWW", 40, 48)),
        }
        for text in ("a red cat", "a dog", "ocean", "night", "waves", "birds")
    ]
    path = write_rows(tmp_path / "pairs.parquet", rows)
    network = {"name": "clip", "path": str(tmp_path / "clip"), "train": mode, "rank": 2}
    recipe = build_recipe(tmp_path, path, network=network, epochs=6, held_out=0.4)
    config = recipe.reward_model
    answers: Labels = read_labels([path])
    untrained = build_reward_network(config.network, 0)
    clipscore = load_reward(configure_reward("pickscore", path=str(tmp_path / "clip")))
    images = np.stack(answers.decode_pictures([0, 1]))
    expected = clipscore.score_with_gradient(
        torch.tensor(images).permute(0, 3, 1, 2).float() / 255, answers.build_prompts([0, 1])
    )
    scores = score_pictures(untrained, answers, [0, 1])
    assert scores.detach().numpy() == pytest.approx(26 * expected.detach().numpy(), rel=1e-5)
    names = set(untrained.trained_weights())
    assert {"text_weights", "image_weights"} <= names
    assert any("lora" in name for name in names) == (mode == "lora")
    record = train_reward_folder(recipe, answers, tmp_path / "f", tmp_path / "c")
    assert record.measurement.agreement.mean > 0.5
    reward = load_reward(configure_reward("model", uri=str(tmp_path / "f")))
    assert np.isfinite(reward(images, answers.build_prompts([0, 1])).values).all()
    # Other weights under the same path would be another reward.
    (tmp_path / "clip" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "clip" / "config.json").read_text()) | {"x": 1})
    )
    with pytest.raises(RewardError, match="trained from other weights"):
        load_reward(configure_reward("model", uri=str(tmp_path / "f")))(
            images, answers.build_prompts([0, 1])
        )


def draw_flaws(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The picture with what a broken generator leaves: a band of noise and a block in one grey."""
    flawed = image.copy()
    top = rng.integers(HEIGHT - 6)
    left = rng.integers(WIDTH - 8)
    flawed[top : top + 6] = rng.integers(0, 256, flawed[top : top + 6].shape)
    flawed[:, left : left + 8] = rng.integers(60, 200)
    return flawed


def test_a_detector_of_artefacts_is_trained_on_pairs_of_clean_and_flawed_pictures(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for text in make_texts(160):
        clean = draw_text(text)
        flawed = draw_flaws(clean, rng)
        rows.append({"prompt": f'"{text}"', "chosen": encode(clean), "rejected": encode(flawed)})
    labels = write_rows(tmp_path / "pairs.parquet", rows)
    write_clip(tmp_path / "clip")
    network = {"name": "clip", "path": str(tmp_path / "clip"), "train": "head"}
    recipe = build_recipe(tmp_path, labels, network=network, epochs=12, lr=0.05)
    outcome = train_and_register(recipe)
    assert outcome.record.decision.promote, outcome.record.decision.reasons
    reward = load_reward(
        configure_reward(
            "model", uri=outcome.version.uri, store=outcome.version.store, label="artefacts"
        )
    )
    # Texts that no pair has.
    texts = make_texts(40, seed=99)
    clean = np.stack([draw_text(text) for text in texts])
    flawed = np.stack([draw_flaws(picture, rng) for picture in clean])
    prompts = [as_prompt(text) for text in texts]
    # A guess is right on half of the 40 pairs: the bar is two standard errors above it.
    found = reward(clean, prompts).values > reward(flawed, prompts).values
    assert found.mean() > 0.5 + 2 * 0.5 / np.sqrt(len(texts)), found.mean()


def test_a_picture_that_the_network_cannot_score_is_named(tmp_path):
    picture = encode(draw_text("ABCD"))
    row = {"prompt": "a word without quotes", "chosen": picture, "rejected": picture}
    path = write_rows(tmp_path / "pairs.parquet", [row])
    config = build_recipe(tmp_path, path).reward_model
    network = build_reward_network(config.network, 0)
    with pytest.raises(LabelFileError, match="a word without quotes.*names no text"):
        score_pictures(network, read_labels([path]), [0])


def test_the_command_reports_the_outcome_and_explains_a_missing_section(tmp_path, labels):
    recipe = build_recipe(tmp_path, labels, epochs=3)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    result = CliRunner().invoke(main, ["train-reward", str(file)])
    assert result.exit_code == 0, result.output
    assert "models:/legible/1" in result.output
    file.write_text("name: other\n")
    failed = CliRunner().invoke(main, ["train-reward", str(file)])
    assert failed.exit_code == 1
    assert "reward_model" in failed.output
    with pytest.raises(RecipeError):
        train_and_register(Recipe())
