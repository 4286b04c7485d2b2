"""Similarity of representations: linear central kernel alignment (CKA, 1905.00414)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError


def linear_cka(x: np.ndarray, y: np.ndarray, *, unbiased: bool = False) -> float:
    """CKA of features of the same n examples, [n, p] and [n, q]; see `cka_of_layers`."""
    return float(cka_of_layers([x], [y], unbiased=unbiased)[0, 0])


def cka_of_layers(
    layers: Sequence[np.ndarray], others: Sequence[np.ndarray], *, unbiased: bool = False
) -> np.ndarray:
    """CKA of every layer of one model with every layer of another.

    tr(K L) / sqrt(tr(K K) tr(L L)) with K = X X^T and L = Y Y^T, both centred (equations 1 to 4):
    1 where the features are the same but for rotation and scale. With fewer examples than features
    even noise comes near to 1.

    Args:
      layers, others: features [n, D] of each layer, of the same n examples in the same order; D
        may differ. Takes n^2 numbers per layer.
      unbiased: with the estimator of Song et al. as in "Do wide and deep networks learn the same
        things?" (2010.15327, equation 3), which is 0 on average for independent features however
        few the examples, and may be negative. At least 4 of them.

    Returns:
      [len(layers), len(others)]; 0 for features that do not vary.

    Raises:
      UserError: numbers of examples differ, or there are too few.
    """
    sizes = {len(features) for features in (*layers, *others)}
    least = 4 if unbiased else 2
    if len(sizes) != 1 or min(sizes) < least:
        raise UserError(
            f"CKA of {sorted(sizes)} examples: give both models the same, at least {least}."
        )
    a, b = ([_kernel(each, unbiased) for each in side] for side in (layers, others))
    return np.array([[np.sum(k * other) for other in b] for k in a])


def _kernel(features: np.ndarray, unbiased: bool) -> np.ndarray:
    """The centred inner products of examples [n, n], with norm 1."""
    features = features.astype(np.float64)
    n = len(features)
    features = features - features.mean(0)  # changes no centred kernel, and saves digits
    kernel = features @ features.T
    if unbiased:
        np.fill_diagonal(kernel, 0.0)
        rows = kernel.sum(0) / (n - 2)
        kernel += rows.sum() / (n - 1) - rows[:, None] - rows[None]
        np.fill_diagonal(kernel, 0.0)
    return kernel / max(float(np.linalg.norm(kernel)), np.finfo(np.float64).tiny)
