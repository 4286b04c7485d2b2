"""Attention as XLA operations, in forms that are faster than the reference."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.kernels.products import product

_CACHE_BYTES = 2**20  # of float32 scores that `chunked` holds at a time, twice


def xla(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bias: jax.Array | None = None
) -> jax.Array:
    """Products over [B, H, N, d]; softmax in float32, the weights in the dtype of the values.

    `bias` [B, H, N, N] is added to the scores.
    """
    query = query / math.sqrt(query.shape[-1])
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B, H, N, d]
    scores = product("bhqd,bhkd->bhqk", query, key)
    scores = scores if bias is None else scores + bias
    weights = jax.nn.softmax(scores).astype(value.dtype)
    out = product("bhqk,bhkd->bhqd", weights, value).astype(value.dtype)
    return jnp.swapaxes(out, 1, 2)


def chunked(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Like `xla`, a few heads at a time: their scores stay in the cache of a CPU.

    The backward pass recomputes them. On a mesh each device would compute the heads of all.
    """
    batch, num_queries, num_heads, width = query.shape
    num_products = batch * num_heads
    fit = max(_CACHE_BYTES // (4 * num_queries * key.shape[1]), 2)
    chunk = max(n for n in range(1, min(fit, num_products) + 1) if num_products % n == 0)

    def chunks(x: jax.Array) -> jax.Array:  # [B * H / chunk, chunk, N, d]
        return jnp.reshape(jnp.swapaxes(x, 1, 2), (-1, chunk, x.shape[1], width))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def heads(_: None, qkv: Any) -> tuple[None, jax.Array]:
        query, key, value = qkv
        weights = jax.nn.softmax(product("hqd,hkd->hqk", query, key)).astype(value.dtype)
        return None, product("hqk,hkd->hqd", weights, value).astype(value.dtype)

    query = query / math.sqrt(width)
    # Two at a time: the softmax of one overlaps with the products of the other.
    _, out = jax.lax.scan(heads, None, (chunks(query), chunks(key), chunks(value)), unroll=2)
    return jnp.swapaxes(jnp.reshape(out, (batch, num_heads, num_queries, width)), 1, 2)
