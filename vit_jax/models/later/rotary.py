"""Rotary position embeddings of an image's patches.

Patch (y, x) turns pair k of each query and key by an angle, so that scores depend on differences of
positions ("RoFormer", 2104.09864). d: width of a head; f_k = base^(-4 k / d), k < d / 4.

| `model.rope` | angle of pair k and of pair k + d / 4                                             |
|--------------|-----------------------------------------------------------------------------------|
| `grid`       | y f_k and x f_k, with rows and columns numbered from `rope_offset` and, if there  |
|              | is a `rope_grid`, scaled to it (EVA-02, 2303.11331; RoPE-ViT, 2403.13298; PE)     |
| `centered`   | 2 pi y f_k and 2 pi x f_k, with centres of patches in [-1, 1] (DINOv3, 2508.10104)|
| `mixed`      | x u + y v with learned u, v for each pair, head and block (2403.13298, section    |
|              | 3.3)                                                                              |

Pair k is features k and k + d / 2. Others pair neighbours, or put x first: their loader permutes
the features of queries and keys, which no score sees. The tokens before the grid do not turn.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.patches import Layout

ROPES = ("none", "grid", "centered", "mixed")


def coordinates(grid: tuple[int, int], config: Any, layout: Layout | None = None) -> Any:
    """Of the patches in raster order, (y, x): [1, h*w, 2], or of each image [B, N, 2] float32."""
    if layout is not None:
        sizes = layout.grid[:, :1], layout.grid[:, 1:]
        cells = zip(layout.cells(), sizes, strict=True)
        axes = [_coordinate(index, length, i, config) for i, (index, length) in enumerate(cells)]
        return jnp.stack(axes, axis=-1).astype(jnp.float32)
    axes = [_coordinate(np.arange(n, dtype=np.float32), n, i, config) for i, n in enumerate(grid)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(1, -1, 2).astype(np.float32)


def _coordinate(index: Any, length: Any, axis: int, config: Any) -> Any:
    """Of cells along an axis of so many."""
    if config.rope == "centered":
        return 2 * math.pi * (2 * ((index + 0.5) / length) - 1)
    index = index + config.rope_offset
    return index / length * config.rope_grid[axis] if config.rope_grid else index


def frequencies(head_dim: int, base: float) -> np.ndarray:
    """f_k, [d / 4] float32."""
    return (base ** (-np.arange(head_dim // 4) / (head_dim // 4))).astype(np.float32)


def axial_angles(
    grid: tuple[int, int], head_dim: int, config: Any, layout: Layout | None = None
) -> Any:
    """Of `grid` and `centered`: [B or 1, N, 1, d / 2] float32; all heads and blocks share them."""
    f = frequencies(head_dim, config.rope_base).reshape(1, 1, 1, -1)
    angles = coordinates(grid, config, layout)[..., None] * f  # [B, N, 2, d / 4]
    return angles.reshape(*angles.shape[:2], 1, head_dim // 2)


class MixedAngles(nn.Module):
    """Of `mixed`: the shape of queries [B, N, H, d] -> angles [B or 1, N, H, d / 2].

    The start is that of `grid`, turned by a random angle for each head (RoPE-ViT's code).
    """

    config: Any

    @nn.compact
    def __call__(self, num_heads: int, head_dim: int, layout: Layout | None = None) -> jax.Array:
        def init(key: jax.Array) -> jax.Array:
            turn = jax.random.uniform(key, (num_heads, 1), maxval=2 * math.pi)
            turns = jnp.concatenate([turn, turn + math.pi / 2], axis=1)[..., None]  # [H, 2, 1]
            parts = [jnp.cos(turns), jnp.sin(turns)]
            f = frequencies(head_dim, self.config.rope_base)[None, None]
            return jnp.stack([jnp.reshape(part * f, (num_heads, -1)) for part in parts])

        uv = self.param("frequencies", init)  # [2, H, d / 2]
        places = coordinates(self.config.grid, self.config, layout)[..., None, None]
        y, x = places[:, :, 0], places[:, :, 1]  # [B, N, 1, 1] each
        return x * uv[None, :1] + y * uv[None, 1:]


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the features of the last tokens, by angles [B or 1, h*w, 1 or H, d / 2].

    [B, N, H, d] -> [B, N, H, d].
    """
    prefix = x.shape[1] - angles.shape[1]
    angles = jnp.pad(jnp.asarray(angles), ((0, 0), (prefix, 0), (0, 0), (0, 0)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [B or 1, N, 1 or H, d / 2]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
