"""The position embeddings of appendix D.4 (table 8), and fixed ones (2205.01580).

| `model.position_embedding`           | what tells one token from another                        |
|--------------------------------------|----------------------------------------------------------|
| `learned`                            | 1-D: a vector for each token, added at the stem (eq. 1)  |
| `learned2d`                          | 2-D: one of D/2 for the column, beside one for the row   |
| `learned_layers`, `learned2d_layers` | the same, other vectors at the beginning of each block   |
| `learned_shared`, `learned2d_shared` | the same vectors at the beginning of each block          |
| `relative`                           | r of the offset p_q - p_k in the sequence of tokens, for |
|                                      | each block: the scores are q (k + r) / sqrt(d)           |
| `sincos2d`                           | sines and cosines of column and row, added at the stem   |
| `none`                               | nothing: the image is a bag of patches                   |

For images in shapes of their own (`vit_jax/patches.py`) the positions of a grid, learned or fixed,
are interpolated for each image; relative ones are not.

The paper does not say what becomes of the class token. In 1-D and relative attention it is a token
like others, as in equation 1: without offsets from it, it would see a bag of patches. In 2-D it has
no position. Relative embeddings are those of a block, for all of its heads: also our choice.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.family import FIRST, Row, Shapes
from vit_jax.models.interpolation import weights_at
from vit_jax.models.kernels.attention import BIASED
from vit_jax.models.kernels.products import in_order, product
from vit_jax.models.tokens import sincos2d
from vit_jax.patches import Layout

POSITION_EMBEDDINGS = (
    "learned",
    "learned_layers",
    "learned_shared",
    "learned2d",
    "learned2d_layers",
    "learned2d_shared",
    "relative",
    "sincos2d",
    "none",
)
AT_STEM, SHARED, RELATIVE = "posembed_input", "posembed_shared", "relative_positions"


class AddPositionEmbs(nn.Module):
    """Adds a learned embedding per token, E_pos of equation 1: [B, N, D] -> [B, N, D].

    Attributes:
      grid: (rows, columns) of the last tokens, or of those that a `layout` interpolates.
      by_axis: it consists of that of the column and that of the row, D/2 numbers each.
      resize: of `POSITION_RESIZES`.
    """

    stddev: float = 0.02
    dtype: Any = jnp.float32
    grid: tuple[int, int] = (0, 0)
    by_axis: bool = False
    resize: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        init = nn.initializers.normal(self.stddev)
        (height, width), (num_tokens, hidden_size) = self.grid, x.shape[1:]
        if layout is not None:
            num_tokens += height * width - layout.num_patches
        if self.by_axis:
            columns = self.param("x_embedding", init, (width, hidden_size // 2))
            rows = self.param("y_embedding", init, (height, hidden_size // 2))
            cells = jnp.concatenate([jnp.tile(columns, (height, 1)), jnp.repeat(rows, width, 0)], 1)
            positions = jnp.pad(cells, ((num_tokens - height * width, 0), (0, 0)))[None]
        else:
            positions = self.param("pos_embedding", init, (1, num_tokens, hidden_size))
        positions = jnp.asarray(positions, self.dtype)
        if layout is not None:
            positions = interpolate(positions, self.grid, layout, self.resize)
            x = in_order(x)  # else [N, B, D] in all blocks of TPUs, a tenth slower
        return x + positions


def interpolate(
    positions: jax.Array, grid: tuple[int, int], layout: Layout, kind: str | None
) -> jax.Array:
    """Positions of a grid, the last of [1, T, D], for each image: [B, T', D].

    T' is T for the patches of `layout` in place of those of the grid.
    """
    (height, width), (rows, columns) = grid, layout.cells()  # [B, N] each
    sizes = layout.grid[:, :1], layout.grid[:, 1:]
    longer = jnp.maximum(*sizes)
    of_rows = weights_at(kind, rows, sizes[0], longer, height)  # [B, N, h]
    of_columns = weights_at(kind, columns, sizes[1], longer, width)  # [B, N, w]
    weights = of_rows[..., None] * of_columns[:, :, None]  # [B, N, h, w]
    weights = jnp.reshape(weights, (*rows.shape, height * width)).astype(positions.dtype)
    prefix, cells = jnp.split(positions[0], [positions.shape[1] - height * width])
    cells = jnp.einsum("bnp,pd->bnd", weights, cells, precision="highest")
    prefix = jnp.broadcast_to(prefix[None], (cells.shape[0], *prefix.shape))
    return jnp.concatenate([prefix, cells], axis=1)


def relative_scores(query: jax.Array, embedding: jax.Array) -> jax.Array:
    """q_i r_(i - j) / sqrt(d): [B, N, H, d] -> [B, H, N, N].

    `embedding` [2 N - 1, d] has r of the offsets 1 - N to N - 1 between all tokens, the class token
    among them.
    """
    index = np.arange(query.shape[1])
    offsets = index[:, None] - index + len(index) - 1
    keys = jnp.asarray(embedding, query.dtype)[offsets]  # [N, N, d]
    return product("bqhd,qkd->bhqk", query / math.sqrt(query.shape[-1]), keys)


def _add(config: Any, name: str) -> AddPositionEmbs:
    by_axis, resize = config.position_embedding.startswith("learned2d"), config.position_resize
    sizes = config.position_stddev, config.dtype, config.grid
    return AddPositionEmbs(*sizes, by_axis, resize, name=name)


def add_at_stem(
    config: Any, x: jax.Array, positions: Any = None, layout: Layout | None = None
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Tokens [B, N, D] with the positions of the stem, and ([1, N, D],) if blocks share theirs.

    Called in the encoder's compact `__call__`; `config` is a `BlockConfig`, and `positions`
    [1, N, D], if given, are added instead of its own.
    """
    kind, _, place = config.position_embedding.partition("_")
    if positions is None and kind == "sincos2d":
        table = sincos2d(config.grid, x.shape[-1])  # [1, h*w, D]
        prefix = x.shape[1] - (layout.num_patches if layout else table.shape[1])
        positions = np.pad(table, ((0, 0), (prefix, 0), (0, 0)))  # [1, N, D]
        if layout is not None:
            arguments = config.grid, layout, config.position_resize
            positions = interpolate(jnp.asarray(positions, config.dtype), *arguments)
    if positions is not None:
        return x + jnp.asarray(positions, config.dtype), ()
    if place == "shared":
        zeros = jnp.zeros((1, *x.shape[1:]), config.dtype)
        return x, (_add(config, SHARED)(zeros, layout),)
    return (_add(config, AT_STEM)(x, layout) if kind.startswith("learned") and not place else x), ()


def add_in_block(
    config: Any, x: jax.Array, shared: jax.Array | None, layout: Layout | None = None
) -> tuple[jax.Array, Any]:
    """Tokens [B, N, D] with the positions of a block, and what gives its relative scores or None.

    Called in the block's compact `__call__`; `shared` [1, N, D] is from `add_at_stem`.
    """
    if config.position_embedding == "relative":
        sizes = 2 * x.shape[1] - 1, x.shape[-1] // config.num_heads
        init = nn.initializers.normal(1 / math.sqrt(sizes[1]))  # as in Tensor2Tensor
        embed = nn.Embed(*sizes, embedding_init=init, name=RELATIVE)
        return x, functools.partial(relative_scores, embedding=embed.embedding)  # [2 N - 1, d]
    if config.position_embedding.endswith("_layers"):
        return _add(config, AT_STEM)(x, layout), None
    return (x if shared is None else x + shared), None


def position_rows(encoder: str, block: str) -> tuple[Row, ...]:
    """Parameters of the modules above, below the names of the encoder and of its blocks."""
    stem, axes = f"{encoder}/(?:{AT_STEM}|{SHARED})", (None, None, "embed")
    return (
        Row(f"{stem}/pos_embedding", axes, FIRST, role="positions"),
        Row(f"{stem}/[xy]_embedding", axes[1:], FIRST, role="axis_positions"),
        Row(f"{block}/{AT_STEM}/pos_embedding", axes, role="positions"),
        Row(f"{block}/{AT_STEM}/[xy]_embedding", axes[1:], role="axis_positions"),
        Row(f"{block}/{RELATIVE}/embedding", (None, None), role="offsets"),
    )


def infer_positions(shapes: Shapes, encoder: str, blocks: str) -> str:
    """The kind that the names of a file determine; `sincos2d` if there are no such parameters."""
    places = {"": f"{encoder}/{AT_STEM}", "_shared": f"{encoder}/{SHARED}"}
    for place, name in {**places, "_layers": f"{blocks}_0/{AT_STEM}"}.items():
        for kind, parameter in (("learned", "pos_embedding"), ("learned2d", "x_embedding")):
            if f"{name}/{parameter}" in shapes:
                return f"{kind}{place}"
    return "relative" if f"{blocks}_0/{RELATIVE}/embedding" in shapes else "sincos2d"


def check_positions(model: Any) -> None:
    """Raises UserError if the model's other attributes do not go with its positions."""
    kind = model.position_embedding
    if kind == "relative" and model.attention not in BIASED:
        raise UserError(
            f"model.attention={model.attention!r} does not support model.position_embedding="
            f"'relative'; use {', '.join(map(repr, BIASED))}."
        )
    if kind.startswith("learned2d") and model.hidden_size % 2:
        raise UserError(
            f"model.hidden_size={model.hidden_size} must be even for "
            f"model.position_embedding={kind!r}."
        )
