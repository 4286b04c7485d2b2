"""What stands between products: GELU, norms, LayerScale, sums of residuals, words of dropout.

GELU, norms and LayerScale are made again in the backward pass, so that only their input is saved: a
scan would save every intermediate.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.kernels.devices import device_has


def gelu(x: jax.Array, form: str) -> jax.Array:
    """`tanh` or `exact`, `quick` as x sigmoid(1.702 x), or `silu` as x sigmoid(x), in float32."""
    if form == "tanh" and device_has("short_gelu_gradient"):
        return _tanh_gelu(x)
    prevent_cse = device_has("gelu_made_again")
    return jax.checkpoint(_gelu, prevent_cse=prevent_cse, static_argnums=1)(x, form)


def _gelu(x: jax.Array, form: str) -> jax.Array:
    y = x.astype(jnp.float32)
    if form in ("quick", "silu"):
        y = y * nn.sigmoid(1.702 * y if form == "quick" else y)
    else:
        y = nn.gelu(y, approximate=form == "tanh")
    return y.astype(x.dtype)


@jax.custom_vjp
def _tanh_gelu(x: jax.Array) -> jax.Array:
    # Apart from its product, as with remat, each operation in bfloat16 is rounded: 1.4 times the
    # error.
    dtype = x.dtype if device_has("gelu_in_products") else jnp.float32
    return nn.gelu(x.astype(dtype)).astype(x.dtype)


def _tanh_gelu_backward(x: jax.Array, d_out: jax.Array) -> tuple[jax.Array]:
    y, c = x.astype(jnp.float32), math.sqrt(2 / math.pi)
    cubic = 0.044715 * c * jnp.square(y)
    tanh, half = jnp.tanh(y * (c + cubic)), 0.5 * y
    slope = 0.5 + 0.5 * tanh + (half - half * jnp.square(tanh)) * (c + 3 * cubic)
    return ((slope * d_out).astype(x.dtype),)


_tanh_gelu.defvjp(lambda x: (_tanh_gelu(x), x), _tanh_gelu_backward)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over features, in float32: [..., D]."""
    x = x.astype(jnp.float32)
    squared = jnp.square(x)  # before the mean: the gradient is summed in Flax's order
    mean = jnp.mean(x, axis=-1, keepdims=True)
    mean_square = jnp.mean(squared, axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, mean_square - jnp.square(mean))  # negative only by rounding
    factor = jax.lax.rsqrt(variance + epsilon) * per_feature(scale, x.ndim)
    return (x - mean) * factor + per_feature(bias, x.ndim)


@functools.partial(jax.checkpoint, prevent_cse=False)
def scale_features(x: jax.Array, factors: jax.Array) -> jax.Array:
    """x times a factor per feature, in float32 with one rounding to the dtype of x: [..., D].

    Factors rounded to bfloat16 would be off by the same share in every token: with trained weights
    that was a sixth of the error of the tokens.
    """
    return (x.astype(jnp.float32) * per_feature(factors, x.ndim)).astype(x.dtype)


def per_feature(values: jax.Array, ndim: int) -> jax.Array:
    """[D] -> [1, ..., 1, D] of that many axes."""
    return jnp.reshape(values, (*(1,) * (ndim - 1), -1))


def residual(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y of two arrays [..., D]."""
    if not device_has("sums_of_matrices"):
        return x + y
    rows = (-1, x.shape[-1])
    return jnp.reshape(jnp.reshape(x, rows) + jnp.reshape(y, rows), x.shape)


def random_words(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint32 of `shape` [..., D], a function of the key only.

    Threefry takes some hundred operations per 32 bits: with one word for every number that dropout
    may drop, in 25 places, more than half of the time of a step. Here each token gets 64 bits of
    its own from it. Along the features, a Weyl sequence goes through two rounds of multiply and
    xor-shift (constants of C. Wellons' `lowbias32`), with the second half of the key in between.
    XLA fuses them into their consumers, forward and backward, so that no mask is ever in memory.
    Good enough for dropout, not for keys.
    """
    keys = jax.random.bits(rng, (2, *shape[:-1], 1), jnp.uint32)
    feature = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    x = (feature * jnp.uint32(0x9E3779B9)) ^ keys[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B) + keys[1]
    return x ^ (x >> 16)
