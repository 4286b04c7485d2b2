"""Making loaded parameters fit another model: head, representation layer, position embeddings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from vit_jax.errors import UserError

POSEMB = "Transformer/posembed_input/pos_embedding"


def _interpolation_matrix(size_in: int, size_out: int) -> np.ndarray:
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


def interpolate_posembed(
    posemb: np.ndarray,
    grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    source_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """2-D interpolation of position embeddings by location in the image (paper, section 3.2).

    Bilinear with aligned corners, the official code's method. An unchanged grid gives back the
    same values.

    Args:
      posemb: [1, P + h*w, D], with the P embeddings of class tokens first.
      grid: rows and columns of tokens wanted.
      num_prefix_tokens: P; these rows are kept as they are.
      source_grid: rows and columns of `posemb`; by default as many tokens as wanted are taken to
        be in the grid wanted, and any other number must be a square.

    Returns:
      [1, P + grid[0] * grid[1], D], of the type of `posemb`.

    Raises:
      UserError: the source is no square and `source_grid` is not given, or does not match.
    """
    posemb = np.asarray(posemb)
    if posemb.ndim != 3 or posemb.shape[0] != 1:
        raise UserError(f"position embeddings must have shape [1, N, D], not {posemb.shape}.")
    if min(grid) < 1:
        raise UserError(f"a grid of {grid} tokens is empty.")
    num_tokens = posemb.shape[1] - num_prefix_tokens
    if source_grid is None and num_tokens == grid[0] * grid[1]:
        return posemb  # as many as wanted: whatever their grid was, there is nothing to resize
    if source_grid is None:
        side = math.isqrt(max(num_tokens, 0))
        if side * side != num_tokens or not side:
            raise UserError(
                f"{posemb.shape[1]} position embeddings less {num_prefix_tokens} for class tokens "
                "are no square; give the rows and columns they stand for (pretrained.grid)."
            )
        source_grid = (side, side)
    if source_grid[0] * source_grid[1] != num_tokens:
        raise UserError(
            f"pretrained.grid={tuple(source_grid)} asks for {source_grid[0] * source_grid[1]} "
            f"position embeddings; there are {num_tokens}, besides {num_prefix_tokens} for class "
            "tokens."
        )
    if tuple(source_grid) == tuple(grid):
        return posemb
    prefix, cells = posemb[0, :num_prefix_tokens], posemb[0, num_prefix_tokens:]
    cells = cells.reshape(*source_grid, -1).astype(np.float64)  # [h, w, D]
    rows = _interpolation_matrix(source_grid[0], grid[0])
    columns = _interpolation_matrix(source_grid[1], grid[1])
    cells = np.einsum("ab,bcd->acd", rows, cells)  # [H, w, D]
    cells = np.einsum("ab,cbd->cad", columns, cells)  # [H, W, D]
    cells = cells.reshape(grid[0] * grid[1], -1).astype(posemb.dtype)  # [H*W, D]
    return np.concatenate([prefix, cells])[None]  # [1, P + H*W, D]


@dataclasses.dataclass(frozen=True)
class AdaptReport:
    """What became of every leaf, as flat names."""

    loaded: tuple[str, ...]
    adapted: tuple[str, ...]
    reset: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} arrays loaded"]
        for verb, names in (("interpolated", self.adapted), ("reset", self.reset)):
            if names:
                parts.append(f"{verb}: {', '.join(names)}")
        if self.dropped:
            parts.append(f"dropped: {', '.join(self.dropped)}")
        return "; ".join(parts)


def adapt_params(
    loaded: dict[str, Any],
    like: dict[str, Any],
    *,
    grid: tuple[int, int],
    source_grid: tuple[int, int] | None = None,
    reset_head: bool = True,
) -> tuple[dict[str, Any], AdaptReport]:
    """Fits `loaded` to the names and shapes of `like` for fine-tuning (paper, section 3.2).

    The head is that of `like` (zeros, in a new model) unless `reset_head` is False. `pre_logits`
    is dropped where `like` has none, and kept where it has. Position embeddings are interpolated.

    Args:
      loaded: flat names to arrays, loop form of the blocks.
      like: flat names to arrays of a freshly initialised model, loop form.
      grid: rows and columns of tokens of the new model.
      source_grid: those of `loaded`, where it is not a square.
      reset_head: take the head from `like`.

    Returns:
      (flat names to arrays, report). Every name of `like` is in the result, with its shape.

    Raises:
      UserError: a leaf is missing, unexpected or of another shape; all are named.
    """
    loaded = dict(loaded)
    dropped = [
        name
        for name in loaded
        if (name.startswith("head/") and (reset_head or name not in like))
        or (name.startswith("pre_logits/") and name not in like)
    ]
    for name in dropped:
        del loaded[name]
    reset = [name for name in like if name.startswith("head/") and reset_head]
    _check_class_token(loaded, like)

    adapted = []
    if POSEMB in loaded and POSEMB in like:
        before = loaded[POSEMB]
        num_prefix_tokens = int("cls" in loaded)
        loaded[POSEMB] = interpolate_posembed(before, grid, num_prefix_tokens, source_grid)
        if loaded[POSEMB] is not before:
            adapted.append(POSEMB)

    problems = [f"missing {name}" for name in like if name not in loaded and name not in reset]
    problems += [f"unexpected {name}" for name in loaded if name not in like]
    problems += [
        f"{name} is {tuple(array.shape)}, the model needs {tuple(like[name].shape)}"
        for name, array in loaded.items()
        if name in like and tuple(array.shape) != tuple(like[name].shape)
    ]
    if problems:
        more = f", and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise UserError(
            f"the pre-trained parameters do not fit the model: {'; '.join(problems[:6])}{more}. "
            "Check model.* against the checkpoint's sizes."
        )
    report = AdaptReport(
        loaded=tuple(name for name in loaded if name not in adapted),
        adapted=tuple(adapted),
        reset=tuple(reset),
        dropped=tuple(name for name in dropped if name not in reset),
    )
    return {name: like[name] if name in reset else loaded[name] for name in like}, report


def _check_class_token(loaded: dict[str, Any], like: dict[str, Any]) -> None:
    if ("cls" in loaded) != ("cls" in like):
        has, needs = ("a", "none") if "cls" in loaded else ("no", "one")
        raise UserError(
            f"the pre-trained parameters have {has} class token and the model needs {needs}; set "
            f"model.classifier to {'token' if 'cls' in loaded else 'gap or map'}."
        )
