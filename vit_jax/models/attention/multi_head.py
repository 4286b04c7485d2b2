"""Multi-head attention around each implementation of `choose.py`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.attention.choose import AttentionFn
from vit_jax.models.layers import dot_general


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Flax's module of equations 5 to 8: [B, N, D] -> [B, N, D].

    Where our kernel for TPUs attends, queries, keys and values are one product, as in equation 5.
    """

    attention_fn: Any = AttentionFn("auto", train=False)
    kernel_init: Any = nn.initializers.xavier_uniform()
    broadcast_dropout: bool = False
    qkv_dot_general: Any = dot_general
    out_dot_general: Any = dot_general

    def __call__(self, x: jax.Array, *others: jax.Array, **options: Any) -> jax.Array:  # type: ignore[override]
        dropped = self.dropout_rate and not self.deterministic
        if not (others or dropped or self.is_initializing()):
            x, params = jnp.asarray(x, self.dtype), self.variables["params"]
            heads = self.attention_fn.of_tokens(x, params, self.num_heads)  # [B, N, H, d]
            if heads is not None:
                with jax.named_scope("out"):
                    kernel, bias = (
                        jnp.asarray(params["out"][name], x.dtype) for name in ("kernel", "bias")
                    )
                    out = dot_general(heads, kernel, (((2, 3), (0, 1)), ((), ())))
                    return out + jnp.reshape(bias, (1, 1, -1))
        return super().__call__(x, *others, **options)
