"""Stochastic depth: residual branches left out at random in training (1603.09382)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


def drop_rates(rate: float, num_layers: int) -> list[float]:
    """Probability of each block, on a line from 0 for the first block to `rate` for the last."""
    return [rate * i / max(num_layers - 1, 1) for i in range(num_layers)]


class StochasticDepth(nn.Module):
    """Leaves a residual branch out of single examples: [B, ...] -> [B, ...].

    Each example draws for itself, and each branch (attention and MLP) apart, as timm's DropPath and
    scenic do (the latter says that it follows timm). What is kept is divided by the probability of
    being kept, as in timm, so that evaluation, where nothing is dropped, needs no scaling; scenic
    does not divide.
    """

    @nn.compact
    def __call__(self, x: jax.Array, rate: float | jax.Array, *, train: bool) -> jax.Array:
        """`rate` may be traced: a scan over blocks has it as an input."""
        if not train or (isinstance(rate, float) and rate == 0.0):
            return x
        keep = 1.0 - jnp.asarray(rate, jnp.float32)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)  # [B, 1, ...]
        # The quotient is taken in float32: bfloat16(0.9) would scale all of training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / keep, 0.0).astype(x.dtype)
