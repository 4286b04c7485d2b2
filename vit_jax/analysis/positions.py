"""Similarity of position embeddings (figure 7, centre; figure 10)."""

from __future__ import annotations

import numpy as np


def position_similarity(embeddings: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Cosine similarity of the embedding of each place with those of all places.

    Args:
      embeddings: [N, D], those of other tokens first.
      grid: rows and columns of places.

    Returns:
      [rows, columns, rows, columns]
    """
    rows, columns = grid
    places = np.asarray(embeddings, np.float64)[len(embeddings) - rows * columns :]
    places = places / np.maximum(np.linalg.norm(places, axis=1, keepdims=True), 1e-12)
    return (places @ places.T).reshape(rows, columns, rows, columns)
