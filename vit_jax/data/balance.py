"""Draws classes more evenly than they are stored, as a function of (seed, position) alone.

A pass has a fixed number of slots per class, in an order drawn by the pipeline. The slots of a
class take its examples in turn across passes: none repeats before all others have been used.
"""

import numpy as np


class Balance:
    """Maps the `num_slots` slots of a pass, about N, to examples.

    A class of n among the `labels`, int [N], gets n^(1 - exponent) shares of a pass, rounded to
    whole slots: 0 is once per example, 1 the same number per class.
    """

    def __init__(self, labels: np.ndarray, exponent: float, seed: int):
        counts = np.unique(labels, return_counts=True)[1]
        shares = counts ** (1.0 - exponent)
        slots = np.rint(shares / shares.sum() * len(labels)).astype(np.int64)  # at least 1
        self.num_slots = int(slots.sum())
        self._counts, self._slots = counts, slots
        self._first_slot = np.cumsum(slots) - slots
        self._first_member = np.cumsum(counts) - counts
        shuffled = np.random.default_rng(seed).permutation(len(labels)).astype(np.int32)
        self._members = shuffled[np.argsort(labels[shuffled], kind="stable")]  # grouped by class

    def examples(self, passes: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The examples, int64 [P], of slots [P] in passes [P]."""
        number = np.searchsorted(self._first_slot, slots, side="right") - 1  # class number
        turn = passes * self._slots[number] + slots - self._first_slot[number]
        member = self._first_member[number] + turn % self._counts[number]
        return self._members[member].astype(np.int64)
