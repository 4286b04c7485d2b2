"""A model's tokens on views of an image: crops of several sizes, with masked patches.

The parameters are those for images of one size. For another size the position embeddings are
interpolated in the call, as DINO and DINOv2 do it, so that gradients reach all of them.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.create import family_of
from vit_jax.models.interpolation import repeating_cubic
from vit_jax.models.look import capture
from vit_jax.trees import flatten_names, unflatten_names

# Of roles of `family.Row`: parameters that fit one grid, and cannot be interpolated here.
_OF_ONE_GRID = ("axis_positions", "offsets", "offset_grid")

# As DINO and DINOv2 do it.
_ALONG = functools.partial(repeating_cubic, offset=0.1)

# (params, images [B, H, W, C], train=, rngs=, masked=) -> pooled [B, D], patches [B, P, D] float32
Tokens = Callable[..., tuple[jax.Array, jax.Array]]


def tokens_function(module: Any, image_size: tuple[int, int], *, masks: bool = False) -> Tokens:
    """What computes the head's input and the patches after the last norm, for images in [-1, 1].

    `masked` [B, P] bool: patches whose embedding becomes the model's [mask] embedding.

    Args:
      module: a model without a head (`num_classes=0`), in the loop or the scan form.
      image_size: height and width of the images that the parameters are for.
      masks: whether `masked` will be given.

    Raises:
      UserError: a model without patches, or without a [mask] embedding if `masks`; in the call,
        images of another size than `image_size` for a model that cannot take them.
    """
    family, grid = family_of(module), module.token_grid(image_size)
    if not family.tokens or family.input != "image":
        raise UserError(f"a {family.title} has no tokens of patches; use a Vision Transformer.")
    if masks and all(row.pattern != "mask_embedding" for row in family.rows):
        raise UserError(f"patches of a {family.title} cannot be masked; use a Vision Transformer.")
    prefix = len(module.prefix_tokens)

    def tokens(
        params: Any, images: jax.Array, *, train: bool, rngs: Any = None, masked: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        size = module.token_grid(images.shape[1:3])
        if size != grid:
            params = resize_positions(module, params, grid, size, _ALONG)
        inputs = {} if masked is None else {"corruption": {"masked": masked}}
        name = family.tokens.rpartition("/")[2]
        pooled, captured = capture(module, params, images, {name}, train=train, rngs=rngs, **inputs)
        x = captured[f"{family.tokens}/__call__"][:, prefix:]
        pooled = pooled if pooled.ndim == 2 else jnp.mean(pooled, axis=1)  # of a dense model
        return pooled, jnp.asarray(x, jnp.float32)

    return tokens


def resize_positions(
    module: Any,
    params: Any,
    grid: tuple[int, int],
    size: tuple[int, int],
    along: Callable[[int, int], Any],
) -> Any:
    """The parameters for a grid of `size` tokens, from those for `grid`.

    `along` makes the matrix of an axis, see `interpolation.py`. UserError for positions that cannot
    be interpolated.
    """
    family, prefix = family_of(module), len(module.prefix_tokens)
    rows, columns = (along(old, new) for old, new in zip(grid, size, strict=True))
    fixed, _ = family.sequence or ("", 0)  # unless these are its positions
    leaves = flatten_names(params)
    for name, leaf in leaves.items():
        row = next((row for row in family.rows if re.fullmatch(row.pattern, name)), None)
        if row is None:  # a teacher's
            continue
        if row.role in _OF_ONE_GRID or (
            row.role != "positions" and re.fullmatch(row.pattern, fixed)
        ):
            tokens = f"{grid[0]}x{grid[1]} tokens, not {size[0]}x{size[1]}"
            raise UserError(f"{name} is for {tokens}: images and patches must be of one size.")
        if row.role == "positions":
            first = prefix if row.of_tokens else 0
            cells = jnp.reshape(leaf[..., first:, :], (*leaf.shape[:-2], *grid, leaf.shape[-1]))
            cells = jnp.einsum("Hh,Ww,...hwd->...HWd", rows, columns, cells)
            cells = jnp.reshape(cells, (*leaf.shape[:-2], -1, leaf.shape[-1]))
            leaves[name] = jnp.concatenate([leaf[..., :first, :], cells], axis=-2)
    return unflatten_names(leaves)
