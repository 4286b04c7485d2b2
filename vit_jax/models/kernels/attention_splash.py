"""Attention for long sequences on TPUs: JAX's splash kernel, which iterates over blocks of keys.

It computes the softmax block by block, so that the scores [N, N] never exist, however large N is.
For sequences too long for `tpu`: with patches of 16, images of 736 pixels and more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

_LANES = 128
_MAX_BLOCK = 512  # tokens: larger blocks leave no room for the backward pass


def attention(
    head_dim: int, interpret: bool, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Like `tpu.attention`: three times [B, N, H * d], the queries divided by sqrt(d)."""
    batch_size, num_tokens, width = query.shape
    # The largest block that pads the sequence by less than a tenth, if any.
    blocks = range(_MAX_BLOCK, _LANES, -_LANES)
    block = next((b for b in blocks if -num_tokens % b < num_tokens / 10), _LANES)
    rows = -(-num_tokens // block) * block

    def by_head(x: jax.Array) -> jax.Array:
        x = jnp.reshape(x, (batch_size, num_tokens, width // head_dim, head_dim))
        x = jnp.swapaxes(x, 1, 2)  # [B, H, N, d]
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows - num_tokens), (0, 0)))

    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.FullMask((rows, rows))] * (width // head_dim)),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    # Tokens attend only within their segment; the padding is another one.
    segment = (jnp.arange(rows) >= num_tokens).astype(jnp.int32)
    see = splash.SegmentIds(segment, segment)
    out = jax.vmap(lambda q, k, v: kernel(q, k, v, see))(*map(by_head, (query, key, value)))
    return jnp.reshape(jnp.swapaxes(out[:, :, :num_tokens], 1, 2), query.shape)
