import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.flow.noise import INITIAL, generate_noise
from ebbflow.seeding import Stream, derive_seed, iterate_generators, make_generator

SHAPE = (1, 4, 6)
natural = st.integers(0, 2**63 - 1)


def draw(seed=1, prompt_id=2, sample=3, step=4, stream=Stream.ROLLOUT):
    return generate_noise(SHAPE, seed, [prompt_id], [sample], step, stream)[0]


def test_the_same_key_gives_the_same_noise():
    assert torch.equal(draw(), draw())
    assert draw().dtype == torch.float32
    assert torch.equal(generate_noise(SHAPE, 1, [2], [3])[0], draw(step=INITIAL))


def test_batch_and_order_do_not_matter():
    keys = [(5, 0), (5, 1), (9, 0), (0, 7)]
    together = generate_noise(SHAPE, 1, *zip(*keys, strict=True), step=2)
    for order in ([3, 1, 0, 2], [2], [1, 1]):
        again = generate_noise(
            SHAPE, 1, [keys[i][0] for i in order], [keys[i][1] for i in order], step=2
        )
        assert torch.equal(again, together[order])


def test_torch_and_numpy_seeds_do_not_matter():
    before = draw()
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(draw(), before)


def in_common(here, there):
    """How many values two draws share, wherever they are: a draw must not go on where another one
    started.
    """
    return len(set(here.flatten().tolist()) & set(there.flatten().tolist()))


@given(natural, natural, natural, natural, st.sampled_from(Stream))
def test_every_part_of_the_key_changes_the_noise(seed, prompt_id, sample, step, stream):
    key = {"seed": seed, "prompt_id": prompt_id, "sample": sample, "step": step, "stream": stream}
    here = draw(**key)
    for name in ("seed", "prompt_id", "sample", "step"):
        there = draw(**key | {name: key[name] ^ 1})
        assert in_common(here, there) <= 1
    assert in_common(here, draw(**key | {"stream": Stream((stream + 1) % len(Stream))})) <= 1


def test_swapping_parts_of_the_key_changes_the_noise():
    draws = [draw(*key) for key in [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3)]]
    for first in range(4):
        for second in range(first):
            assert not torch.equal(draws[first], draws[second])


@given(natural, st.lists(natural, min_size=2, max_size=20, unique=True))
def test_no_two_draws_of_a_grid_are_alike(seed, prompt_ids):
    first = {
        make_generator(seed, prompt_id, sample, step).random()
        for prompt_id in prompt_ids
        for sample in (0, 1)
        for step in (0, 1)
    }
    assert len(first) == 4 * len(prompt_ids)


def test_neighbouring_keys_are_independent_standard_normal():
    draws = generate_noise(
        (64,),
        0,
        [p for p in range(40) for _ in range(40)],
        [s for _ in range(40) for s in range(40)],
    ).double()
    count = draws.numel()
    assert abs(draws.mean().item()) < 4 / count**0.5
    assert abs(draws.var().item() - 1) < 4 * (2 / count) ** 0.5
    assert abs((draws**4).mean().item() - 3) < 4 * (96 / count) ** 0.5
    # Rows are samples: neighbours in sample (1 apart) and in prompt (40 apart) are uncorrelated.
    for apart in (1, 40):
        product = draws[:-apart] * draws[apart:]
        assert abs(product.mean().item()) < 4 / product.numel() ** 0.5


def test_generators_draw_as_new_ones_whatever_was_drawn_before():
    def drawn(random, count):
        return random.random(dtype=np.float32), random.standard_normal(count, dtype=np.float32)

    shared = iterate_generators(3, [5, 5, 9], [0, 1, 0], 2, Stream.TRAINING)
    for count, found, key in zip((7, 1, 4), shared, [(5, 0), (5, 1), (9, 0)], strict=True):
        uniform, normal = drawn(found, count)
        expected = drawn(make_generator(3, *key, 2, Stream.TRAINING), count)
        assert uniform == expected[0]
        assert (normal == expected[1]).all()


@pytest.mark.parametrize("key", [{"seed": -1}, {"prompt_id": -1}, {"sample": -1}, {"step": -1}])
def test_negative_keys_are_errors(key):
    with pytest.raises((OverflowError, ValueError)):
        draw(**key)


def test_keys_and_samples_go_together():
    with pytest.raises(ValueError, match="zip"):
        generate_noise(SHAPE, 0, [1, 2], [1])


def test_derived_seeds_differ_by_run_and_place():
    places = [("stage", r, s) for r in range(20) for s in range(20)] + [
        ("evaluation",),
        ("stage", 0),
        ("base",),
    ]
    seeds = {derive_seed(run, *path) for run in range(20) for path in places}
    assert len(seeds) == 20 * len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, "stage", 1, 2) == derive_seed(3, "stage", 1, 2)


@given(
    st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=6)), max_size=4),
    st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=6)), max_size=4),
)
def test_derived_seeds_differ_for_any_two_places(one, other):
    assert (derive_seed(0, *one) == derive_seed(0, *other)) == (one == other)


def test_a_place_inside_a_place_has_its_own_seed():
    assert len({derive_seed(5), derive_seed(5, 0), derive_seed(5, 0, 0), derive_seed(5, "")}) == 4
