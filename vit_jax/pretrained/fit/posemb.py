"""Position embeddings for another grid of tokens, or for other tokens before the grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.errors import UserError, check_known
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
      UserError: unknown method; no position embeddings; see also `find_source_grid`.
    """
    check_known("pretrained.posemb", method, METHODS)
    posemb = np.asarray(posemb)
    grid = (int(grid[0]), int(grid[1]))
    source_grid = find_source_grid(posemb.shape, grid, num_prefix_tokens, source_grid)
    if source_grid == grid:
        return posemb
    hidden_size = posemb.shape[-1]
    prefix, cells = posemb[0, :num_prefix_tokens], posemb[0, num_prefix_tokens:]
    cells = apply_along_rows_and_columns(
        cells.reshape(*source_grid, hidden_size),
        METHODS[method](source_grid[0], grid[0]),
        METHODS[method](source_grid[1], grid[1]),
    )  # [H, W, D]
    cells = cells.reshape(grid[0] * grid[1], hidden_size).astype(posemb.dtype)  # [H*W, D]
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
    if min(grid) < 1:
        raise UserError(f"a grid of {tuple(grid)} tokens is empty.")
    num_tokens = shape[1] - num_prefix_tokens
    if source_grid is None:
        side = math.isqrt(max(num_tokens, 0))
        if side and side * side == num_tokens:
            return side, side
        if num_tokens == grid[0] * grid[1]:
            return grid
        raise UserError(
            f"{shape[1]} position embeddings less {num_prefix_tokens} for class tokens are no "
            "square; give the rows and columns they stand for (pretrained.grid, --grid)."
        )
    source_grid = (int(source_grid[0]), int(source_grid[1]))
    if min(source_grid) < 1 or source_grid[0] * source_grid[1] != num_tokens:
        raise UserError(
            f"pretrained.grid={source_grid} asks for {source_grid[0] * source_grid[1]} position "
            f"embeddings; there are {num_tokens}, besides {num_prefix_tokens} for class tokens."
        )
    return source_grid


def replace_prefix(
    posemb: np.ndarray, tokens: Sequence[str], new_tokens: Sequence[str]
) -> np.ndarray:
    """Rows for other tokens before the grid: [1, P + N, D] -> [1, P' + N, D].

    Args:
      posemb: its first P rows belong to `tokens`, in this order.
      tokens: names, such as ("cls", "dist").
      new_tokens: names of the result's first P' rows. Those that are not in `tokens` are zero.
    """
    zero = np.zeros_like(posemb[:, :1])  # [1, 1, D]
    rows = [
        posemb[:, tokens.index(token)][:, None] if token in tokens else zero for token in new_tokens
    ]
    return np.concatenate([*rows, posemb[:, len(tokens) :]], axis=1)  # [1, P' + N, D]
