"""Axial-ViT (appendix D.6 of 2010.11929): attention along the rows, then along the columns.

Each block of a Vision Transformer becomes two: row attention and an MLP, then column attention and
an MLP ("Axial Attention in Multidimensional Transformers", 1912.12180). A token attends to the
others of its row or column only. A class token is in neither, and the paper does not say what
became of it: here the classifier pools.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import vit
from vit_jax.models.family import Shapes


class LineBlock(vit.Encoder1DBlock):
    """A Transformer layer within each row, or each column: [B, h*w, D] -> [B, h*w, D]."""

    of_columns: bool = False

    def _attend(self, x: jax.Array, bias: Any, lengths: Any, *, train: bool) -> jax.Array:
        """MSA of each line of tokens: [B, h*w, D] -> [B, h*w, D]."""
        shape, (height, width) = x.shape, self.config.grid
        x = jnp.reshape(x, (-1, height, width, shape[-1]))  # [B, h, w, D]
        x = jnp.swapaxes(x, 1, 2) if self.of_columns else x
        lines = jnp.reshape(x, (-1, *x.shape[2:]))  # [B*h, w, D] or [B*w, h, D]
        x = jnp.reshape(super()._attend(lines, bias, lengths, train=train), x.shape)
        return jnp.reshape(jnp.swapaxes(x, 1, 2) if self.of_columns else x, shape)


class AxialBlock(nn.Module):
    """A layer of rows, then one of columns: [B, h*w, D] -> [B, h*w, D]; drop rate as in a ViT's."""

    config: vit.BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array, drop_rate: Any = None, *, train: bool) -> jax.Array:
        x = LineBlock(self.config, name="row")(x, drop_rate, train=train)
        return LineBlock(self.config, of_columns=True, name="column")(x, drop_rate, train=train)


class AxialVisionTransformer(vit.VisionTransformer):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes are those of `VisionTransformer`; `num_layers` counts pairs of a row and a column
    block.
    """

    classifier: str = "gap"

    kind = "axial_vit"
    block: ClassVar[type[nn.Module]] = AxialBlock


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    return {**vit.infer(shapes), **vit.infer_blocks(shapes, vit.BLOCKS, "/row")}


_BLOCK = rf"{vit.BLOCKS}(?:_(?P<block>\d+))?/(?:row|column)"

FAMILY = dataclasses.replace(
    vit.FAMILY,
    module=AxialVisionTransformer,
    any_shape=False,
    title="Axial-ViT (arXiv 2010.11929, appendix D.6)",
    acronym="Axial",
    rows=(*vit.FAMILY.rows, *vit.attention_rows(_BLOCK)),
    infer=infer,
    choices={
        **vit.FAMILY.choices,
        "classifier": ("gap", "map", "unpooled", "dense"),
        "position_embedding": ("learned", "learned2d", "sincos2d", "none"),
    },
    attention="",  # it has one matrix of weights for each line, not one
)
