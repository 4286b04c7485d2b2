"""Products of matrices, and patches as one.

A bfloat16 product with a float32 result is a kernel of its own on CPUs with AVX512-BF16, two to
four times as fast as with a bfloat16 result. JAX's rule for its gradient would multiply the float32
cotangent with bfloat16 operands, hence a rule of our own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as saved
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.models.kernels.devices import device_has


def product(equation: str, a: jax.Array, b: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, with a float32 or bfloat16 result."""
    if a.dtype.itemsize >= 4:
        return jnp.einsum(equation, a, b)
    return _product(equation, dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _forward(equation: str, dtype: Any, a: jax.Array, b: jax.Array) -> Any:
    # Not where the input is the wide side, as after GELU: in memory it would stay until backward.
    x = _unfused(a) if b.ndim == 2 and b.shape[0] <= b.shape[1] else a  # of a dense layer
    return _product(equation, dtype, x, b), (a, b)


def _backward(
    equation: str, dtype: Any, residuals: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> Any:
    a, b = residuals
    inputs, out = equation.split("->")
    of_a, of_b = inputs.split(",")
    d_out = d_out.astype(a.dtype)
    d_out = _unfused(d_out) if b.ndim == 2 else d_out
    d_a = _product(f"{out},{of_b}->{of_a}", dtype, d_out, b).astype(a.dtype)
    d_a = _unfused(d_a) if b.ndim == 2 and b.shape[0] <= b.shape[1] else d_a
    # The smaller one first: it is the one that XLA transposes.
    if a.size <= d_out.size:
        d_b = _product(f"{of_a},{out}->{of_b}", dtype, a, d_out)
    else:
        d_b = _product(f"{out},{of_a}->{of_b}", dtype, d_out, a)
    return d_a, d_b.astype(b.dtype)


_product.defvjp(_forward, _backward)


def _unfused(x: jax.Array) -> jax.Array:
    """x, behind a barrier where products are faster without what is around them."""
    return jax.lax.optimization_barrier(x) if device_has("unfused_products") else x


def dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
    """`lax.dot_general` for Flax's dense layers: x W as one product of matrices.

    The last axes of x [B, N, ...] are contracted with the first of the kernel, as many as
    `dimensions` says: one to or between features, two from heads.
    """
    num_axes = len(dimensions[0][0])
    rows, columns = x.shape[:-num_axes], kernel.shape[num_axes:]
    x = jnp.reshape(x, (*rows, -1))
    kernel = jnp.reshape(kernel, (x.shape[-1], -1))
    dtype = x.dtype if device_has("rounded_results") else jnp.promote_types(x.dtype, jnp.float32)
    out = product("bnd,de->bne", x, kernel, dtype).astype(x.dtype)
    return jnp.reshape(saved(out, "dense"), (*rows, *columns))


def convolve_patches(
    images: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **options: Any
) -> jax.Array:
    """`lax.conv_general_dilated` whose windows are patches: [B, H, W, C] -> [B, h, w, D]."""
    if not device_has("patches_as_product"):
        return jax.lax.conv_general_dilated(images, kernel, strides, padding, **options)
    height, width, channels, features = kernel.shape
    rows, columns = images.shape[1] // height, images.shape[2] // width
    windows = (rows, height, columns, width, channels)
    x = jnp.reshape(images[:, : rows * height, : columns * width], (-1, *windows))
    x = jnp.reshape(jnp.swapaxes(x, 2, 3), (-1, rows * columns, height * width * channels))
    x = dot_general(x, jnp.reshape(kernel, (-1, features)), (((2,), (0,)), ((), ())))
    # Else the head's gradient decides: [N, D, B] in all blocks, and transposes around products.
    return in_order(jnp.reshape(x, (-1, rows, columns, features)))


def in_order(x: jax.Array) -> jax.Array:
    """x, in memory in the order of its axes."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
