"""Dropout whose random numbers are nearly free.

Threefry takes some hundred operations for each 32 bits. `flax.linen.Dropout` draws so many for
every number that it may drop: with the paper's rate of 0.1 at 25 places more than half of the time
of a step. Here threefry draws two words per token only, and a hash of these and of the number of
the feature makes the rest in nine operations, which XLA computes wherever they are read, forward
and backward, so that no mask is ever in memory.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


def random_words(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint32 of `shape` [..., D], a function of the key alone.

    Each token has 64 bits of its own from threefry. Along the features a Weyl sequence goes through
    two rounds of multiply and xor-shift (constants of C. Wellons' `lowbias32`), the second half of
    the key between them. Good enough to drop, not for keys.
    """
    keys = jax.random.bits(rng, (2, *shape[:-1], 1), jnp.uint32)
    feature = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    x = (feature * jnp.uint32(0x9E3779B9)) ^ keys[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B) + keys[1]
    return x ^ (x >> 16)


class Dropout(nn.Module):
    """Sets features to 0 with probability `rate` in training, and divides the others by 1 - rate.

    [..., D] -> [..., D]; needs the random stream `dropout`.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        if not train or not self.rate:
            return x
        words = random_words(self.make_rng("dropout"), x.shape)
        kept = words >= jnp.uint32(round(self.rate * 2**32))
        # Divided in float32: bfloat16(0.9) would scale all of training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / (1.0 - self.rate), 0.0).astype(x.dtype)
