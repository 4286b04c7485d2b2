"""Implementations of scaled dot-product attention, and its weights for inspection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class _Sown:
    """Sows the weights into a collection of their own, kept only on request."""

    module: nn.Module

    def sow(self, _collection: str, name: str, value: jax.Array) -> bool:
        if self.module.is_initializing():  # `init` returns parameters alone
            return False
        return self.module.sow("attention", name, value)


@functools.wraps(nn.dot_product_attention)
def reference(
    query: Any, key: Any, value: Any, *, module: nn.Module | None = None, **kwargs: Any
) -> jax.Array:
    sown: Any = None if module is None else _Sown(module)
    return nn.dot_product_attention(query, key, value, module=sown, **kwargs)


# softmax(q k^T / sqrt(d)) v (equations 6, 7): three times [B, N, H, d] -> [B, N, H, d].
ATTENTIONS: dict[str, Callable[..., jax.Array]] = {"reference": reference}


def attention_weights(model: Any, params: Any, images: jax.Array) -> jax.Array:
    """The attention weights of every block: [B, H, W, C] -> [L, B, heads, N, N].

    Args:
      model: a Vision Transformer, loop or scan form, `attention="reference"`.
      params: its parameters.
      images: as the model takes them.
    """
    _, state = model.apply({"params": params}, images, train=False, mutable=["attention"])
    blocks = state["attention"]["Transformer"]

    def weights(block: Any) -> jax.Array:
        return block["MultiHeadDotProductAttention_0"]["attention_weights"][0]

    if "encoderblock" in blocks:  # scan form: stacked already
        return weights(blocks["encoderblock"])
    return jnp.stack([weights(blocks[f"encoderblock_{i}"]) for i in range(model.num_layers)])
