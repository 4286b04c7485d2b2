"""Adapts parameters to other images: position embeddings, patch embedding, input channels.

Resizing along two axes multiplies by two small matrices, in float64. For channels, `M` is
a mixing matrix [C, C']: the new convolution of an image x' with C' channels is the old one of M x'.

* `sum`: M = 1 / C'. A grey image (all channels equal) gives the same tokens.
* `mean`: M = 1 / C. Grey images appear C' / C times as bright.
* `tile`: M[k, c] = C / C' where c mod C = k, else 0. If C' is a multiple of C, an image repeated
  along its channels gives the same tokens. With C' < C the last C - C' channels are lost.

A hybrid's `conv_root` is standardised at every call: `sum` and `mean` are the same there, with
features similar to the old ones, not equal.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.interpolation import (
    antialiased_cubic,
    corner_aligned_linear,
    geometric_linear,
    half_pixel_linear,
    patch_resize,
    repeating_cubic,
)

Grid = tuple[int, int]  # rows and columns
CHANNEL_METHODS = ("sum", "mean", "tile")


def _resize(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[h, w, ...] -> [H, W, ...] of the same dtype, by `rows` [H, h] and `columns` [W, w]."""
    height, width, *features = x.shape
    cells = rows @ x.astype(np.float64).reshape(height, -1)  # [H, w * ...]
    cells = columns @ cells.reshape(len(rows), width, -1)  # [H, W, ...]
    return cells.reshape(len(rows), len(columns), *features).astype(x.dtype)


class Method(NamedTuple):
    """How a library interpolates: the matrix along one axis."""

    positions: Callable[[int, int], np.ndarray]
    # Of BEiT's relative positions, which transformers and timm alone resize.
    offsets: Callable[[int, int], np.ndarray] = half_pixel_linear


METHODS = {
    "bilinear": Method(corner_aligned_linear),
    "bicubic": Method(antialiased_cubic, geometric_linear),
    "transformers": Method(repeating_cubic),
    "dinov2": Method(functools.partial(repeating_cubic, offset=0.1)),
    "siglip2": Method(functools.partial(half_pixel_linear, antialias=True)),
}


def interpolate_posembed(
    posemb: np.ndarray,
    grid: Grid,
    num_prefix_tokens: int = 1,
    source_grid: Grid | None = None,
    method: str = "bilinear",
) -> np.ndarray:
    """2-D interpolation of position embeddings by location in the image (paper, section 3.2).

    From [1, P + h*w, D] to [1, P + grid[0] * grid[1], D], the same array for the same grid; the
    first P rows, of the class and distillation tokens, are kept. `bilinear` aligns corners, as the
    official code; `bicubic` is antialiased, as timm's `resample_abs_pos_embed`; `transformers` and
    `dinov2` are not, as these do it; `siglip2` is bilinear and antialiased. For `source_grid` and
    errors see `find_source_grid`.
    """
    source_grid = find_source_grid(posemb.shape, grid, num_prefix_tokens, source_grid)
    if source_grid == grid:
        return posemb
    prefix, cells = posemb[0, :num_prefix_tokens], posemb[0, num_prefix_tokens:]
    along = METHODS[method].positions
    cells = interpolate_grid(cells.reshape(*source_grid, -1), grid, along)  # [H, W, D]
    return np.concatenate([prefix, cells.reshape(grid[0] * grid[1], -1)])[None]  # [1, P + H*W, D]


def interpolate_grid(
    cells: np.ndarray, shape: Grid, along: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """2-D interpolation of embeddings of cells or offsets: [h, w, d] -> [*shape, d]."""
    return _resize(cells, *(along(*n) for n in zip(cells.shape[:2], shape, strict=True)))


def interpolate_offsets(x: np.ndarray, grid: Grid, source_grid: Grid, method: str) -> np.ndarray:
    """2-D interpolation of relative embeddings by location, as in `models/positions.py`.

    From [2 * (P + h*w) - 1, d] to [2 * (P + grid[0] * grid[1]) - 1, d], the same array for the same
    grid. In raster order an offset stands for several pairs of rows and columns; it is interpolated
    as the one with the fewest columns. The first and last P, between the P tokens before the grid
    and the last patches, are kept.
    """
    (height, width), (new_height, new_width) = source_grid, grid
    num_prefix_tokens = (len(x) + 1) // 2 - height * width
    ends = num_prefix_tokens, len(x) - num_prefix_tokens
    first, x, last = np.split(x, ends)  # [P, d], [2*h*w - 1, d], [P, d]
    rows, columns = np.ogrid[1 - height : height, 1 - width : width]
    cells = x[rows * width + columns + height * width - 1]  # [2h - 1, 2w - 1, d]
    shape = 2 * new_height - 1, 2 * new_width - 1
    cells = interpolate_grid(cells, shape, METHODS[method].positions)  # [2H - 1, 2W - 1, d]
    offsets = np.arange(1 - new_height * new_width, new_height * new_width)
    rows = np.rint(offsets / new_width).astype(int).clip(1 - new_height, new_height - 1)
    cells = cells[rows + new_height - 1, offsets - rows * new_width + new_width - 1]
    return np.concatenate([first, cells, last])


def find_source_grid(
    shape: tuple[int, ...], grid: Grid, num_prefix_tokens: int, source_grid: Grid | None = None
) -> Grid:
    """Rows and columns of tokens for position embeddings of `shape` [1, P + h*w, D].

    `source_grid` if given; else a square; else `grid` if the count matches; else UserError.
    """
    if len(shape) != 3 or shape[0] != 1:
        raise UserError(f"position embeddings must have shape [1, N, D], not {tuple(shape)}.")
    num_tokens = shape[1] - num_prefix_tokens
    side = math.isqrt(max(num_tokens, 0))
    square = (side, side) if side * side == num_tokens else grid
    if source_grid is not None and len(source_grid) != 2:
        raise UserError(f"pretrained.grid={tuple(source_grid)} must be (rows, columns).")
    height, width = source_grid or square
    if min(height, width) >= 1 and height * width == num_tokens:
        return height, width
    if source_grid is None:
        text = f"{num_tokens} positions of patches are not a square; give their rows and columns"
        raise UserError(f"{text} (pretrained.grid, --grid).")
    text = f"pretrained.grid={(height, width)} needs {height * width} positions of patches"
    raise UserError(f"{text}; the file has {num_tokens}.")


def resize_patch_kernel(kernel: np.ndarray, patch: Grid) -> np.ndarray:
    """Patch embedding kernel for another patch size, [h, w, C, D] to [*patch, C, D].

    See `interpolation.patch_resize`.
    """
    rows, columns = (patch_resize(*n) for n in zip(kernel.shape[:2], patch, strict=True))
    return _resize(kernel, rows, columns)


def mix_channels(kernel: np.ndarray, new_channels: int, method: str) -> np.ndarray:
    """Adapts a kernel to images of `new_channels` channels: [h, w, C, D] -> [h, w, C', D]."""
    channels = kernel.shape[2]
    total = new_channels if method == "sum" else channels
    mixing = np.full((channels, new_channels), 1.0 / total)
    if method == "tile":
        repeated = np.arange(new_channels)[None, :] % channels == np.arange(channels)[:, None]
        mixing = repeated * (channels / new_channels)
    return (mixing.T @ kernel.astype(np.float64)).astype(kernel.dtype)  # [h, w, C', D]
