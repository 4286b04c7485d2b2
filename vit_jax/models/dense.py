"""Dense layers and matrix products, in the form that has a fast kernel on every platform.

A bfloat16 product with a float32 result is a kernel of its own on CPUs with AVX512-BF16, two to
four times as fast as one with a bfloat16 result; accelerators sum in float32 anyway. JAX's rule for
its gradient would multiply the float32 cotangent with bfloat16 operands, hence the rule here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, with a float32 result."""
    if a.dtype == jnp.float32:
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


class Dense(nn.Module):
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
            return out.astype(self.dtype), jnp.reshape(bias, (1, -1))
        out = (out + jnp.reshape(bias, (1, 1, -1))).astype(self.dtype)
        return jnp.reshape(out, (*x.shape[:-1], *self.bias_shape))
