import numpy as np
import pytest
from reward_cases import as_prompt, as_rgb

from ebbflow.models.glyph_training.lettering import render_text
from ebbflow.rewards.built_in import similarity
from ebbflow.rewards.built_in.similarity import Similarity


def score(grey: np.ndarray, target: str | None = "WXYZ") -> float:
    return float(Similarity()(as_rgb(grey[None]), [as_prompt(0, target)]).values[0])


def test_a_rendering_scores_high_whatever_its_contrast_and_place():
    clean = render_text("WXYZ", 16, 32)
    assert score(clean) > 0.98
    assert score(clean // 2 + 60) > 0.98
    shifted = np.full_like(clean, 255)
    shifted[2:, 1:] = clean[:-2, :-1]
    assert score(shifted) > 0.95
    assert score(255 - clean) < 0.7


def test_damage_and_other_letters_cost_similarity(clean):
    images, prompts = clean
    rng = np.random.default_rng(0)
    noisy = np.clip(images + rng.normal(0, 80, images.shape), 0, 255).astype(np.uint8)
    own = Similarity()(images, prompts).values
    damaged = Similarity()(noisy, prompts).values
    other = Similarity()(images, prompts[1:] + prompts[:1]).values
    assert own.min() > 0.95
    assert (damaged < own).all()
    assert own.mean() > damaged.mean() + 0.02
    assert own.mean() > other.mean() + 0.3


def test_one_wrong_letter_costs_its_share():
    right = score(render_text("WXYZ", 16, 32))
    wrong = score(render_text("WXOZ", 16, 32))
    assert 0.05 < right - wrong < 0.25


def test_flat_images_score_zero_and_noise_low(empty):
    values = Similarity()(empty, [as_prompt(index, "WXYZ") for index in range(len(empty))]).values
    assert np.all(values[:3] == 0)
    assert np.abs(values[3:]).max() < 0.6


def test_what_cannot_be_rendered_is_a_failure():
    prompts = [as_prompt(0, None), as_prompt(1, "A" * 40), as_prompt(2, "A")]
    result = Similarity()(np.full((3, 16, 32, 3), 255, np.uint8), prompts)
    assert np.isnan(result.values).tolist() == [True, True, False]
    assert "names no text" in result.failures[0]
    assert "16x32" in result.failures[1]


def test_similarity_is_always_available():
    assert Similarity().explain_unavailable() is None


def test_letters_whose_opposite_is_drawn_score_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (32, 128), np.uint8)
    monkeypatch.setattr(similarity, "_find_best_match", lambda *arguments: -0.5)
    assert similarity.match_letters(grey, "OPEN") == 0
