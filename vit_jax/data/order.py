"""The order of the examples: a pure function of (seed, epoch), computed where it is needed.

Position i of a run shows the example `order(seed, num_examples, i)`: epoch i // num_examples is a
permutation of the examples. It is a Feistel network, a bijection of any power of two that needs no
memory, restricted to the examples by walking on until the image is one (cycle walking). Eight
rounds: with the four that Grain's own shuffle has, neighbours are correlated at sizes such as
50,000 (-0.06). Its keys are hashes of (seed, epoch), so that no epoch of one seed is an epoch of
another, and the order does not depend on the version of any library.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

_ROUNDS = 8


def order(seed: int, num_examples: int, position: np.ndarray) -> np.ndarray:
    """Which examples are at the positions of a run; each epoch holds every example once.

    Positions are ints [P] from 0 on, over all epochs; gives int64 [P] in [0, num_examples).
    """
    position = np.asarray(position, np.int64)
    epochs, within = np.divmod(position, num_examples)
    index = np.empty_like(position)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        index[chosen] = _permute(within[chosen], num_examples, _keys(seed, int(epoch)))
    return index  # [P]


@functools.lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"vit_jax order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS)
    return np.frombuffer(digest.digest(), "<u8")  # [_ROUNDS]


def _permute(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, size), applied to each of `values` [P]."""
    bits = max(2, (size - 1).bit_length())
    values = _feistel(values.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):  # less than half of the domain is outside: few turns
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)  # [P]


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 2^bits), on uint64 [P]; the halves may differ by one bit."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for key in keys:
        # Swap the halves; the one that is changed keeps its width.
        high, low = low, high ^ (_mix(low ^ key) >> np.uint64(64 - high_bits))
        high_bits, low_bits = low_bits, high_bits
    return high << np.uint64(low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit changes every output bit half of the time."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def example_rng(seed: int, position: int) -> np.random.Generator:
    """Random numbers for the example at one position of a run.

    Philox with the key (seed, position), 64 bits each: no two pairs share a stream.
    """
    key = np.array([seed % 2**64, position], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
