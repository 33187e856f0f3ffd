"""What holds for every reward with a network of its own."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import TEXTS, as_prompts, make_reward, some_images

from ebbflow.models import hub
from ebbflow.models.hub import HubError
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import templates
from ebbflow.rewards.built_in import hpsv3
from ebbflow.rewards.combine import RewardError, load_reward, load_scorer
from ebbflow.rewards.network import PretrainedRewardConfig
from ebbflow.rewards.weights import read_weights

NAMES = ["pickscore", "clipscore", "aesthetic", "hps", "hpsv3", "imagereward"]
PINNED = {"path": "team/model", "revision": "1" * 40}
PARTS = {
    "aesthetic": {"head": PINNED},
    "hps": {"processor": PINNED},
    "hpsv3": {"processor": PINNED},
    "imagereward": {"tokenizer": PINNED},
}
"""What a reward needs besides its own path."""
ROUNDING = {"rtol": 0, "atol": 3e-6}
"""A few float32 roundings of scores near 1: another batch size is another order of summation."""
IMAGES = some_images()
PROMPTS = as_prompts(*TEXTS)


@pytest.fixture(scope="module", autouse=True)
def short_inputs():
    """Few tokens for the rewards that are language models; their own tests have the published
    pixels and texts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hpsv3, "PIXELS", 4 * 28 * 28)
        patch.setattr(templates, "read_template", lambda name: "{prompt} <|Reward|>")
        yield


@pytest.fixture(scope="module", params=NAMES)
def config(request, tmp_path_factory) -> PretrainedRewardConfig:
    """A tiny reward of each kind. Never write into its folder."""
    return make_reward(request.param, tmp_path_factory.mktemp(request.param), batch=2)


@pytest.fixture(scope="module")
def made(config):
    return load_reward(config)


def score(made, rows=slice(None), prompts=None) -> np.ndarray:
    prompts = PROMPTS if prompts is None else prompts
    return made(IMAGES[rows], [prompts[row] for row in np.arange(len(IMAGES))[rows]]).values


def test_scores_are_finite_numbers_that_differ(made):
    result = made(IMAGES, PROMPTS)
    assert result.values.dtype == np.float64
    assert result.values.shape == (5,)
    assert not result.failures
    assert len(set(result.values)) == 5
    assert np.array_equal(score(made), result.values)


def test_the_size_of_a_batch_does_not_count(config, made):
    for batch in (1, 3, 16):
        other = load_reward(config.model_copy(update={"batch": batch}))
        assert np.allclose(score(other), score(made), **ROUNDING)


def test_scores_go_with_their_images(made):
    order = np.array([4, 2, 0, 3, 1])
    assert np.allclose(score(made, order), score(made)[order], **ROUNDING)


def test_every_image_meets_its_own_prompt(config, made):
    others = as_prompts("3 dogs", *TEXTS[1:])
    changed = ~np.isclose(score(made, prompts=others), score(made), **ROUNDING)
    assert changed.tolist() == [config.name != "aesthetic", False, False, False, False]


def test_no_images_have_no_scores(made):
    assert made(IMAGES[:0], []).values.shape == (0,)


def test_the_network_is_frozen_and_nothing_is_recorded(made, monkeypatch):
    recorded = []
    inner = made._score_function
    monkeypatch.setattr(
        made,
        "_score_function",
        lambda images, texts: recorded.append(inner(images, texts)) or recorded[-1],
    )
    assert torch.is_grad_enabled()
    score(made)
    assert recorded
    assert not any(scores.requires_grad for scores in recorded)


def test_it_is_loaded_at_the_first_image_and_kept(config, tmp_path, monkeypatch):
    fresh = load_reward(make_reward(config.name, tmp_path / "own"))
    assert fresh.explain_unavailable() is None
    assert fresh(IMAGES[:0], []).values.shape == (0,)
    assert "_score_function" not in vars(fresh)
    first = score(fresh)
    shutil.rmtree(tmp_path / "own")
    assert np.array_equal(score(fresh), first)


def test_a_number_that_is_none_is_a_failure(made, monkeypatch):
    monkeypatch.setattr(
        made,
        "_score_function",
        lambda images, texts: torch.tensor([1.0, float("nan"), float("inf")])[: len(images)],
    )
    result = made(IMAGES[:2], PROMPTS[:2])
    assert np.array_equal(result.values, [1, np.nan], equal_nan=True)
    assert result.failures == {1: "the network gave nan"}


def test_every_file_it_needs_is_missed(config, tmp_path):
    own = load_reward(make_reward(config.name, tmp_path / "own"))
    needed = [(files, pattern) for files in own.list_files() for pattern in files.patterns]
    assert needed
    for files, pattern in needed:
        folder = Path(files.source.path)
        (file,) = folder.glob(pattern)
        hidden = file.rename(tmp_path / "hidden")
        reason = own.explain_unavailable()
        assert reason is not None
        assert str(folder) in reason
        assert pattern in reason
        with pytest.raises(RewardError, match="is trained on and cannot run here"):
            load_scorer([own.config], [])
        with pytest.raises(RewardError, match="holds no"):
            score(load_reward(own.config))
        hidden.rename(file)
    assert own.explain_unavailable() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_is_fetched_at_its_commit_and_no_sooner_than_needed(name, monkeypatch):
    asked = []

    def refuse(pretrained, patterns=None):
        asked.append((pretrained.path, pretrained.revision))
        raise HubError("no hub in this test")

    monkeypatch.setattr(hub, "locate_pretrained", refuse)
    pinned = load_reward(configure_reward(name, **PINNED, **PARTS.get(name, {})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_scorer([pinned.config], [])
    assert not asked
    with pytest.raises(HubError, match="no hub in this test"):
        score(pinned)
    assert asked == [("team/model", "1" * 40)]


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_without_its_commit_is_not_fetched(name):
    path = configure_reward(name, **PARTS.get(name, {})).path
    reason = load_reward(configure_reward(name, **PARTS.get(name, {}))).explain_unavailable()
    assert (
        reason
        == f"path = {path!r} is not a folder here; for a Hugging Face repository give the commit as"
        " 'revision'"
    )


class Trap:
    """What a hostile pickle would do: run something when it is read."""

    sprung = False

    def __reduce__(self):
        return (_spring, ())


def _spring() -> None:
    Trap.sprung = True


@pytest.mark.parametrize(
    "saved",
    [
        {"layers.0.weight": torch.ones(2), "more": Trap()},
        [torch.ones(2)],
        {"state_dict": {"epoch": 3}},
        {},
    ],
    ids=["code", "no_table", "no_weights", "nothing"],
)
def test_a_file_that_holds_more_or_less_than_weights_is_refused(saved, tmp_path):
    torch.save(saved, tmp_path / "weights.pt")
    with pytest.raises(RewardError, match=r"weights\.pt is .*take the published file"):
        read_weights(tmp_path / "weights.pt")
    assert not Trap.sprung


def test_a_damaged_file_is_refused(tmp_path):
    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(b"<html>404</html>")
        with pytest.raises(RewardError, match=f"{name} is damaged"):
            read_weights(tmp_path / name)


def test_the_gradient_is_that_of_the_score(made):
    """Of numbers instead of bytes, so up to the rounding of the resized image."""
    assert made.has_gradient
    images = IMAGES // 2 + 64  # so that resizing clips nothing
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).requires_grad_()
    scores = made.score_with_gradient(pixels, PROMPTS)
    bytewise = made(images, PROMPTS).values
    assert scores.detach().numpy() == pytest.approx(bytewise, abs=0.05 * np.ptp(bytewise))
    (gradient,) = torch.autograd.grad(scores.sum(), pixels)
    norm = gradient.flatten(1).norm(dim=1)
    with torch.no_grad():
        step = 0.02 * gradient / norm.view(-1, 1, 1, 1)
        up, down = (made.score_with_gradient(pixels + sign * step, PROMPTS) for sign in (1, -1))
    torch.testing.assert_close((up - down) / 0.04, norm, rtol=0.05, atol=0.02 * float(norm.max()))
