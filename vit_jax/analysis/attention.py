"""How far attention reaches (figure 7, right; D.7), and what it looks at (figure 6; D.8).

L: blocks, B: images, H: heads, N: tokens, of which those of the grid come last.
"""

from __future__ import annotations

import numpy as np


def mean_distance(
    attention: np.ndarray, grid: tuple[int, int], pixels: tuple[int, int]
) -> np.ndarray:
    """Mean distance between a query's place and the places it attends to, in pixels.

    Weights on other tokens (class, distillation) have no place: they are left out, and those on
    the grid scaled to sum to 1. All queries of the grid and all images count alike.

    Args:
      attention: [L, B, H, N, N].
      grid: rows and columns of tokens.
      pixels: height and width of a token.

    Returns:
      [L, H]
    """
    weights = _on_grid(attention, grid)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    found = np.einsum("lbhqk,qk->lh", weights, _distances(grid, pixels))
    return found / (weights.shape[1] * weights.shape[3])


def uniform_distance(grid: tuple[int, int], pixels: tuple[int, int]) -> float:
    """`mean_distance` of a head that looks everywhere alike."""
    return float(np.mean(_distances(grid, pixels)))


def rollout(
    attention: np.ndarray, grid: tuple[int, int], *, head_fusion: str = "mean"
) -> np.ndarray:
    """How much of each place reaches the output (Abnar & Zuidema, 2005.00928): [B, rows, columns].

    Weights of the heads are fused, half of each row is the residual connection, and the blocks are
    multiplied. Seen from the first token if it has no place (the class token), else the mean over
    all.

    Args:
      attention: [L, B, H, N, N].
      grid: rows and columns of tokens.
      head_fusion: `mean`, as in the paper, or `max`.
    """
    num_tokens = attention.shape[-1]
    flow = np.eye(num_tokens)
    for block in np.asarray(attention, np.float64):
        fused = block.max(axis=1) if head_fusion == "max" else block.mean(axis=1)  # [B, N, N]
        fused = fused + np.eye(num_tokens)
        flow = fused / fused.sum(axis=-1, keepdims=True) @ flow
    others = num_tokens - grid[0] * grid[1]
    seen = flow[:, 0] if others else flow.mean(axis=1)  # [B, N]
    return seen[:, others:].reshape(-1, *grid)


def class_token_attention(attention: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """What each head of the last block looks at from the class token: [B, H, rows, columns].

    Without a class token the mean over all queries.
    """
    last = np.asarray(attention[-1], np.float64)  # [B, H, N, N]
    others = last.shape[-1] - grid[0] * grid[1]
    seen = last[:, :, 0] if others else last.mean(axis=2)
    return seen[..., others:].reshape(*seen.shape[:2], *grid)


def _on_grid(attention: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    others = attention.shape[-1] - grid[0] * grid[1]
    return np.asarray(attention[..., others:, others:], np.float64)


def _distances(grid: tuple[int, int], pixels: tuple[int, int]) -> np.ndarray:
    """Between all places: [N, N] pixels."""
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 2)
    return np.linalg.norm((places[:, None] - places[None]) * np.asarray(pixels), axis=-1)
