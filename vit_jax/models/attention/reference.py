"""Attention as the paper writes it, which every other implementation is tested against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    module: Any = None,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
) -> jax.Array:
    """Equations 6 and 7 for all heads: three times [B, N, H, d] -> [B, N, H, d].

    Equation 5 (queries, keys and values) and equation 8 (the product with all heads) are the dense
    layers of Flax's `MultiHeadDotProductAttention` around it. Scores and softmax are float32, as in
    the official code, with its bits.

    Args:
      module: sows the weights [B, H, N, N] as the intermediate `attention_weights`.
      dropout_rng, dropout_rate: of the weights.
    """
    dtype, head_dim = query.dtype, query.shape[-1]
    query = query / jnp.sqrt(head_dim).astype(dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)  # [B, H, N, N]
    weights = jax.nn.softmax(scores.astype(jnp.float32))  # equation 6
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, weights.shape)
        weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)  # equation 7
