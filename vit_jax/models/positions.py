"""Position embeddings that are computed instead of learned."""

from __future__ import annotations

import numpy as np

from vit_jax.errors import UserError


def sincos2d(grid: tuple[int, int], hidden_size: int, temperature: float = 10_000.0) -> np.ndarray:
    """Fixed position embeddings of "Better plain ViT baselines" (2205.01580): [1, h*w, D] float32.

    For cell (x, y) of the grid: sin(x w), cos(x w), sin(y w), cos(y w), D/4 values each, with
    w_k = temperature^(-k / (D/4 - 1)).

    Raises:
      UserError: D is no multiple of 4, or 4.
    """
    quarter, rest = divmod(hidden_size, 4)
    if rest or quarter < 2:
        raise UserError(
            f"model.hidden_size={hidden_size} must be a multiple of 4, and at least 8, for "
            "model.position_embedding='sincos2d'."
        )
    y, x = np.mgrid[: grid[0], : grid[1]].astype(np.float32).reshape(2, -1, 1)  # [h*w, 1] each
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter - 1)
    omega = (np.float32(1.0) / np.float32(temperature) ** exponents)[None]  # [1, D/4]
    parts = [np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)]
    return np.concatenate(parts, axis=1)[None]
