"""How alike two models, or two layers, represent the same images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """Linear central kernel alignment (Kornblith et al., 1905.00414): features [N, D], [N, E].

    1 for features that a rotation and one scale turn into each other; near 0 for unrelated ones,
    if there are many more images than features.
    """
    x, y = (np.asarray(each, np.float64) - np.mean(each, axis=0) for each in (x, y))
    scale = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(np.linalg.norm(x.T @ y) ** 2 / max(scale, np.finfo(float).tiny))


def cka_between_layers(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    """`cka` of every layer of one model with every layer of another: [L, M]."""
    return np.array([[cka(x, y) for y in second] for x in first])
