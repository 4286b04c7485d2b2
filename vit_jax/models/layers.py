"""Layers in the form that is fast on every platform: products, dense layers, norms, dropout.

Products: a bfloat16 product with a float32 result is a kernel of its own on CPUs with AVX512-BF16,
two to four times as fast as one with a bfloat16 result; accelerators sum in float32 anyway. JAX's
rule for its gradient would multiply the float32 cotangent with bfloat16 operands, hence the rule
here.

Dropout: threefry takes some hundred operations for each 32 bits, and `flax.linen.Dropout` draws
so many for every number that it may drop: with the paper's rate of 0.1 at 25 places that is more
than half of the time of a step. Here threefry draws two words per token only, and a hash of these
and of the number of the feature makes the rest in nine operations, which XLA computes wherever they
are read, forward and backward, so that no mask is ever in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jax.ad_checkpoint import checkpoint_name as saved


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, with a float32 result."""
    if a.dtype.itemsize >= 4:
        return jnp.einsum(equation, a, b)
    return _product(equation, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _forward(equation: str, a: jax.Array, b: jax.Array) -> Any:
    return _product(equation, a, b), (a, b)


def _backward(equation: str, saved: tuple[jax.Array, jax.Array], d_out: jax.Array) -> Any:
    a, b = saved
    inputs, out = equation.split("->")
    of_a, of_b = inputs.split(",")
    d_out = d_out.astype(a.dtype)
    d_a = _product(f"{out},{of_b}->{of_a}", d_out, b)
    # The smaller one first: that is the one which XLA transposes.
    if a.size <= d_out.size:
        d_b = _product(f"{of_a},{out}->{of_b}", a, d_out)
    else:
        d_b = _product(f"{out},{of_a}->{of_b}", d_out, a)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


_product.defvjp(_forward, _backward)


class _KnownShapes(nn.Module):
    """A parameter that exists is compared with the shape that the module states.

    Flax traces the initialiser to learn that shape, at every call and for every parameter: half of
    the time of tracing a forward pass.
    """

    @nn.nowrap
    def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """`nn.Module.param(name, initialiser, shape, ...)`.

        Raises:
          ScopeParamShapeError: as Flax does, where it is another.
        """
        if not self.has_variable("params", name):
            return super().param(name, *args, **kwargs)
        value: Any = self.get_variable("params", name)
        found, stated = jnp.shape(value), tuple(args[1])
        if found != stated:
            assert self.scope is not None
            raise ScopeParamShapeError(name, self.scope.path_text, found, stated)
        return value


class Conv(_KnownShapes, nn.Conv):
    """Flax's convolution."""


class GroupNorm(_KnownShapes, nn.GroupNorm):
    """Flax's group normalisation: mean and variance are float32 for any `dtype`."""


class Dense(_KnownShapes):
    """A dense layer x W + b, to or from heads as well: [B, N, D] -> [B, N, *bias_shape].

    Whatever the shape of W, it is one product of matrices. Sums are float32, the result is rounded
    once.

    Attributes:
      kernel_shape: of W; with heads (D, H, d) or (H, d, D), as Flax's DenseGeneral has it.
      bias_shape: of b, the end of `kernel_shape`.
      dtype: of factors and result.
      bias_init: of b; W is Xavier uniform.
    """

    kernel_shape: tuple[int, ...]
    bias_shape: tuple[int, ...]
    dtype: Any
    bias_init: Callable[..., jax.Array] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array, *, apart: bool = False) -> Any:
        """`apart`: x W [B, N, E] and b [1, E], for a kernel that adds them itself."""
        matrix = (x.shape[-1], math.prod(self.bias_shape))

        def init(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.reshape(nn.initializers.xavier_uniform()(rng, matrix), shape)

        kernel = self.param("kernel", init, self.kernel_shape)
        bias = self.param("bias", self.bias_init, self.bias_shape)
        x, kernel, bias = (jnp.asarray(each, self.dtype) for each in (x, kernel, bias))
        out = product("bnd,de->bne", x, jnp.reshape(kernel, matrix))
        if apart:
            return saved(out.astype(self.dtype), "dense"), jnp.reshape(bias, (1, -1))
        out = saved((out + jnp.reshape(bias, (1, 1, -1))).astype(self.dtype), "dense")
        return jnp.reshape(out, (*x.shape[:-1], *self.bias_shape))


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


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """The backward pass computes it again: x is all that is saved."""
    x = x.astype(jnp.float32)
    squared = jnp.square(x)  # before the mean: the gradient is summed in Flax's order
    mean = jnp.mean(x, axis=-1, keepdims=True)
    mean_square = jnp.mean(squared, axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, mean_square - jnp.square(mean))  # negative by rounding alone
    factor = jax.lax.rsqrt(variance + epsilon) * jnp.reshape(scale, (1, 1, -1))
    return (x - mean) * factor + jnp.reshape(bias, (1, 1, -1))


class LayerNorm(_KnownShapes):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over features: [B, N, D] -> [B, N, D].

    In float32, as Flax's of the same name computes it, with one rounding to `dtype` at the end.
    """

    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],))
        return _normalize(x, scale, bias, self.epsilon).astype(self.dtype)


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
        kept = words >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        # Divided in float32: bfloat16(0.9) would scale all of training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / (1.0 - self.rate), 0.0).astype(x.dtype)
