"""Classes drawn more equally than they are stored, as a function of (seed, position) alone.

A pass has a fixed number of slots for each class, in an order that the pipeline draws. The slots of
a class take its examples in turn, from pass to pass: none comes again before all others have come.
"""

from __future__ import annotations

import logging

import numpy as np

from vit_jax.errors import counted


class Balance:
    """Which example a slot of a pass stands for.

    Args:
      labels: classes, int [N], one per example.
      exponent: 0 to 1: a class of n examples has n^(1 - exponent) shares of a pass, rounded to
        whole slots; 0 is once per example, 1 equally many per class.
      seed: in which order a class's examples are taken.

    Attributes:
      num_slots: of a pass, about N.
    """

    def __init__(self, labels: np.ndarray, exponent: float, seed: int):
        present, counts = np.unique(labels, return_counts=True)
        shares = counts ** (1.0 - exponent)
        slots = np.rint(shares / shares.sum() * len(labels)).astype(np.int64)  # at least 1
        self.num_slots = int(slots.sum())
        self._counts, self._slots = counts, slots
        self._first_slot = np.cumsum(slots) - slots
        self._first_member = np.cumsum(counts) - counts
        shuffled = np.random.default_rng(seed).permutation(len(labels)).astype(np.int32)
        self._members = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class
        logging.getLogger(__name__).info(
            "dataset.balance=%g: %s of %d to %d examples come %d to %d times in a pass of %d.",
            exponent,
            counted(len(present), "class"),
            *(counts.min(), counts.max(), slots.min(), slots.max(), self.num_slots),
        )

    def examples(self, passes: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The examples, int64 [P], of slots [P] in passes [P]."""
        number = np.searchsorted(self._first_slot, slots, side="right") - 1  # of the class
        turn = passes * self._slots[number] + slots - self._first_slot[number]
        member = self._first_member[number] + turn % self._counts[number]
        return self._members[member].astype(np.int64)
