"""Position embeddings for another grid of tokens, or for other tokens before the grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.fit.resample import (
    antialiased_cubic,
    apply_along_rows_and_columns,
    corner_aligned_linear,
)

POSEMB = POSITIONS

# The resize matrix of each method.
METHODS: dict[str, Callable[[int, int], np.ndarray]] = {
    "bilinear": corner_aligned_linear,
    "bicubic": antialiased_cubic,
}


def interpolate_posembed(
    posemb: np.ndarray,
    grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    source_grid: tuple[int, int] | None = None,
    method: str = "bilinear",
) -> np.ndarray:
    """2-D interpolation of position embeddings by location in the image (paper, section 3.2).

    `bilinear` has aligned corners, as the official code (scipy's zoom of order 1). `bicubic` is
    antialiased and has pixel centres, as timm's `resample_abs_pos_embed`. Both are computed in
    float64. An unchanged grid gives back the same array.

    Args:
      posemb: [1, P + h*w, D], with the P embeddings of class and distillation token first.
      grid: rows and columns of tokens wanted.
      num_prefix_tokens: P; these rows are kept as they are.
      source_grid: rows and columns of `posemb`; see `find_source_grid` for the default.
      method: a key of `METHODS`.

    Returns:
      [1, P + grid[0] * grid[1], D], of the type of `posemb`.

    Raises:
      UserError: see `find_source_grid`.
    """
    source_grid = find_source_grid(posemb.shape, grid, num_prefix_tokens, source_grid)
    if source_grid == grid:
        return posemb
    prefix, cells = posemb[0, :num_prefix_tokens], posemb[0, num_prefix_tokens:]
    rows, columns = (METHODS[method](old, new) for old, new in zip(source_grid, grid, strict=True))
    cells = cells.reshape(*source_grid, -1)  # [h, w, D]
    cells = apply_along_rows_and_columns(cells, rows, columns)  # [H, W, D]
    cells = cells.reshape(grid[0] * grid[1], -1).astype(posemb.dtype)  # [H*W, D]
    return np.concatenate([prefix, cells])[None]  # [1, P + H*W, D]


def find_source_grid(
    shape: tuple[int, ...],
    grid: tuple[int, int],
    num_prefix_tokens: int,
    source_grid: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Rows and columns of tokens that position embeddings of `shape` [1, P + h*w, D] stand for.

    Those given; else a square; else `grid`, where it has as many tokens.

    Raises:
      UserError: `shape` is no such shape, is no square, or does not match `source_grid`.
    """
    if len(shape) != 3 or shape[0] != 1:
        raise UserError(f"position embeddings must have shape [1, N, D], not {tuple(shape)}.")
    num_tokens = shape[1] - num_prefix_tokens
    if source_grid is None:
        side = math.isqrt(max(num_tokens, 0))
        source_grid = (side, side) if side * side == num_tokens else grid
        if not num_tokens or math.prod(source_grid) != num_tokens:
            raise UserError(
                f"{shape[1]} position embeddings less {num_prefix_tokens} for class tokens are no "
                "square; give the rows and columns they stand for (pretrained.grid, --grid)."
            )
    if min(source_grid) < 1 or math.prod(source_grid) != num_tokens:
        raise UserError(
            f"pretrained.grid={tuple(source_grid)} asks for {math.prod(source_grid)} position "
            f"embeddings; there are {num_tokens}, besides {num_prefix_tokens} for class tokens."
        )
    return source_grid[0], source_grid[1]


def replace_prefix(
    posemb: np.ndarray, tokens: Sequence[str], new_tokens: Sequence[str]
) -> np.ndarray:
    """Rows for other tokens before the grid: [1, P + N, D] -> [1, P' + N, D].

    The first P rows belong to `tokens`; rows of tokens that are not among these are zero.
    """
    zero = np.zeros_like(posemb[:, 0])  # [1, D]
    rows = [posemb[:, tokens.index(t)] if t in tokens else zero for t in new_tokens]
    return np.concatenate([*(row[:, None] for row in rows), posemb[:, len(tokens) :]], axis=1)
