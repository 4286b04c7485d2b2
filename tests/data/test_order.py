from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vit_jax.data.order import example_rng, order

STABLE = ([233, 979, 241, 977, 396, 386], [15092, 36275, 40929, 45539, 18933, 761])


@pytest.mark.parametrize("num_examples", [1, 2, 3, 5, 16, 17, 300, 1797, 65536, 65537])
def test_every_epoch_holds_every_example_once(num_examples):
    indices = order(0, num_examples, np.arange(2 * num_examples))
    for epoch in indices.reshape(2, num_examples):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_examples))


def test_is_the_same_whatever_is_asked_together():
    positions = np.arange(250, 850)
    together = order(3, 300, positions)
    assert together.dtype == np.int64
    np.testing.assert_array_equal([order(3, 300, p) for p in positions], together)
    shuffled = np.random.default_rng(0).permutation(600)
    np.testing.assert_array_equal(order(3, 300, positions[shuffled]), together[shuffled])


def test_stays_what_it_is():
    """A change of these numbers changes every run, also one that is resumed."""
    assert order(0, 1000, np.arange(6)).tolist() == STABLE[0]
    assert order(7, 50000, np.arange(10**12, 10**12 + 6)).tolist() == STABLE[1]


def test_no_epoch_of_a_seed_is_an_epoch_of_another():
    """seed + epoch, a usual shortcut, makes epoch 1 of seed 0 out of epoch 0 of seed 1."""
    size = 500
    epochs = np.concatenate(
        [order(seed, size, np.arange(4 * size)).reshape(4, size) for seed in (0, 1, 2, -1)]
    )
    for i, one in enumerate(epochs):
        for other in epochs[:i]:
            # Two random permutations agree at one place on average.
            assert np.sum(one == other) < 10


@pytest.mark.parametrize("num_examples", [50000, 65536])
def test_neighbours_are_independent(num_examples):
    """Grain's shuffle has a correlation of -0.06 and +0.09 at these sizes."""
    epochs = order(0, num_examples, np.arange(4 * num_examples)).reshape(4, num_examples)
    for epoch in epochs:
        for lag in (1, 2, 128):
            assert abs(np.corrcoef(epoch[:-lag], epoch[lag:])[0, 1]) < 5 / np.sqrt(num_examples)
        assert abs(np.corrcoef(epoch, np.arange(num_examples))[0, 1]) < 5 / np.sqrt(num_examples)


@pytest.mark.parametrize("num_examples", [3, 10])
def test_every_example_is_equally_likely_at_every_place(num_examples):
    num_epochs = 2000
    epochs = order(0, num_examples, np.arange(num_epochs * num_examples))
    first = epochs.reshape(num_epochs, num_examples)[:, [0, num_examples // 2, -1]]
    for place in first.T:
        # Chance alone exceeds this once in a thousand seeds; the seed is fixed.
        assert stats.chisquare(np.bincount(place, minlength=num_examples)).pvalue > 1e-3


def test_example_rng_is_philox_with_seed_and_position_as_key():
    expected = np.random.Generator(np.random.Philox(key=np.array([5, 9], np.uint64)))
    np.testing.assert_array_equal(example_rng(5, 9).random(8), expected.random(8))
    draws = {example_rng(s, p).random() for s in (0, 1, -1, 2**40) for p in (0, 1, 2, 2**40)}
    assert len(draws) == 16
