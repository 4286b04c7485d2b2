"""Implementations of scaled dot-product attention, and a look at what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# softmax(q k^T / sqrt(d)) v (equations 6, 7): three times [B, N, H, d] -> [B, N, H, d].
ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": nn.dot_product_attention,  # gives its weights on request
}


def attention_weights(model: Any, params: Any, images: jax.Array) -> jax.Array:
    """The attention weights of every block: [B, H, W, C] -> [L, B, heads, N, N].

    Args:
      model: a Vision Transformer, loop or scan form, `attention="reference"`.
      params: its parameters.
      images: as the model takes them.
    """
    _, state = model.apply({"params": params}, images, train=False, mutable=["intermediates"])
    blocks = state["intermediates"]["Transformer"]

    def weights(block: Any) -> jax.Array:
        return block["MultiHeadDotProductAttention_0"]["attention_weights"][0]

    if "encoderblock" in blocks:  # scan form: stacked already
        return weights(blocks["encoderblock"])
    return jnp.stack([weights(blocks[f"encoderblock_{i}"]) for i in range(model.num_layers)])
