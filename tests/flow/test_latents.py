"""Samples of several latents: their rows, parts and noise."""

from __future__ import annotations

import pickle

import pytest
import torch

from ebbflow.flow.latents import NamedLatents, get_picture_shape
from ebbflow.flow.noise import SampleKeys, generate_noise, generate_shared_noise
from ebbflow.flow.sampler import compute_log_prob, compute_transition, sample_next_latents
from ebbflow.seeding import derive_seed

VIDEO = (4, 2, 3, 3)
SOUND = (2, 5, 4)
SHAPE = NamedLatents({"video": VIDEO, "sound": SOUND})
KEYS = SampleKeys(7, [3, 3, 9], [0, 1, 0])


def test_the_shape_of_several_latents_is_that_of_their_row():
    assert SHAPE == (72 + 40,)
    assert get_picture_shape(SHAPE) == VIDEO
    assert get_picture_shape((16, 8, 8)) == (16, 8, 8)


def test_rows_are_split_into_latents_and_joined_again():
    rows = torch.randn(3, *SHAPE)
    parts = SHAPE.split(rows)
    assert {name: part.shape for name, part in parts.items()} == {
        "video": (3, *VIDEO),
        "sound": (3, *SOUND),
    }
    assert torch.equal(SHAPE.join(dict(reversed(parts.items()))), rows)
    for name, part in SHAPE.slice_parts().items():
        assert torch.equal(rows[:, part], parts[name].flatten(1))


def test_a_shape_that_another_process_gets_has_its_parts():
    copy = pickle.loads(pickle.dumps(SHAPE))
    assert copy == SHAPE
    assert copy.parts == SHAPE.parts


def test_the_first_latent_has_the_noise_that_it_has_alone():
    noise = SHAPE.split(generate_shared_noise(SHAPE, KEYS, index=2))
    assert torch.equal(noise["video"], generate_shared_noise(VIDEO, KEYS, index=2))


def test_another_latent_has_noise_of_a_key_with_its_name():
    noise = SHAPE.split(generate_shared_noise(SHAPE, KEYS, index=2))
    own_seed = derive_seed(KEYS.seed, "latent", "sound")
    assert torch.equal(
        noise["sound"], generate_noise(SOUND, own_seed, KEYS.prompt_ids, KEYS.samples, step=2)
    )
    # The size of the video does not change the noise of its sound, and its name does.
    larger = NamedLatents({"video": (4, 2, 6, 6), "sound": SOUND})
    assert torch.equal(
        larger.split(generate_shared_noise(larger, KEYS, index=2))["sound"], noise["sound"]
    )
    renamed = NamedLatents({"video": VIDEO, "speech": SOUND})
    speech = renamed.split(generate_shared_noise(renamed, KEYS, index=2))["speech"]
    assert not torch.equal(speech, noise["sound"])


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde", "cps"])
def test_a_step_of_a_row_is_that_of_each_of_its_latents(sampler):
    latents, velocity, noise = (torch.randn(3, *SHAPE) for _ in range(3))
    sigmas = torch.tensor([1.0, 0.8, 0.5, 0.0])

    def take_step(part):
        step = compute_transition(sampler, latents[:, part], velocity[:, part], sigmas, 1)
        reached = sample_next_latents(step, noise[:, part])
        return reached, compute_log_prob(step, reached)

    together, log_prob = take_step(slice(None))
    parts = SHAPE.slice_parts()
    total = 0
    for part in parts.values():
        reached, part_log_prob = take_step(part)
        assert torch.equal(together[:, part], reached)
        total = total + part_log_prob * (part.stop - part.start)
    # The mean over all elements: each latent counts by its size.
    torch.testing.assert_close(log_prob, total / SHAPE[0])
