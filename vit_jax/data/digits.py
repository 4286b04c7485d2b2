"""The 1,797 real handwritten digits that come with scikit-learn.

Scans of 8 x 8 pixels with 17 grey levels (UCI, "Optical Recognition of Handwritten Digits", its
test part), in scikit-learn's order: the last 300 were written by other people than the first ones,
so `test` is an honest test set, while a random split would flatter by several points.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import missing_package

NUM_TRAIN = 1497


@dataclasses.dataclass(frozen=True)
class DigitSource:
    """Scans, uint8 [N, 8, 8, 1] with 16 scaled to 255, and labels, int [N]."""

    images: np.ndarray
    labels: np.ndarray
    class_names = tuple("0123456789")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}


def digit_splits() -> dict[str, DigitSource]:
    """`train`, the first 1,497 scans, and `test`, the last 300."""
    # The file alone: importing scikit-learn takes longer than a small model's first update.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing_package("dataset.name='digits'", "scikit-learn", "embedded")
    path = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    rows = np.loadtxt(path, np.int64, delimiter=",")  # 64 pixels from 0 to 16, and the label
    images = np.round(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    parts = {"train": slice(NUM_TRAIN), "test": slice(NUM_TRAIN, None)}
    return {name: DigitSource(images[part], rows[part, -1]) for name, part in parts.items()}
