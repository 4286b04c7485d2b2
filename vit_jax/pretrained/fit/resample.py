"""Resizing along two axes as a product with two small matrices, in float64."""

from __future__ import annotations

import numpy as np


def corner_aligned_linear(size_in: int, size_out: int) -> np.ndarray:
    """Linear, corner-aligned: output i sits at i * (size_in - 1) / (size_out - 1). [out, in]."""
    scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    positions = np.arange(size_out) * scale
    lower = np.clip(np.floor(positions).astype(int), 0, max(size_in - 2, 0))
    fraction = positions - lower
    matrix = np.zeros((size_out, size_in))
    rows = np.arange(size_out)
    matrix[rows, lower] = 1.0 - fraction
    matrix[rows, np.minimum(lower + 1, size_in - 1)] += fraction
    return matrix


def half_pixel_linear(size_in: int, size_out: int) -> np.ndarray:
    """Linear between pixel centres, not antialiased: output i sits at (i + 1/2) * in / out - 1/2.

    The matrix of `jax.image.resize(..., "bilinear", antialias=False)` along one axis, [out, in].
    """
    offsets = _half_pixel_offsets(size_in, size_out)
    return _normalised(np.maximum(0.0, 1.0 - np.abs(offsets)))


def antialiased_cubic(size_in: int, size_out: int) -> np.ndarray:
    """Keys' cubic with a = -1/2, widened by in / out where it shrinks, [out, in].

    What PyTorch does for `mode="bicubic", antialias=True, align_corners=False`, and PIL: weights
    that would fall outside are left out and the others scaled to sum to 1.
    """
    x = np.abs(_half_pixel_offsets(size_in, size_out)) / max(size_in / size_out, 1.0)
    near = (1.5 * x - 2.5) * x**2 + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return _normalised(np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0)))


def _half_pixel_offsets(size_in: int, size_out: int) -> np.ndarray:
    """Distances, in input pixels, from every output's centre to every input's. [out, in]."""
    centres = (np.arange(size_out) + 0.5) * (size_in / size_out)
    return (np.arange(size_in) + 0.5)[None, :] - centres[:, None]


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=1, keepdims=True)


def apply_along_rows_and_columns(
    x: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """[h, w, ...] -> [H, W, ...] float64, by `rows` [H, h] and `columns` [W, w]."""
    height, width, *rest = x.shape
    cells = rows @ x.astype(np.float64).reshape(height, -1)  # [H, w * ...]
    cells = columns @ cells.reshape(len(rows), width, -1)  # [H, W, ...]
    return cells.reshape(len(rows), len(columns), *rest)
