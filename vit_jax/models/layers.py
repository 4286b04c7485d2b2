"""Flax's layers, with the same constructors, in forms that are fast on every platform.

Products: a bfloat16 product with a float32 result is a kernel of its own on CPUs with AVX512-BF16,
two to four times as fast as with a bfloat16 result; accelerators accumulate in float32 anyway.
On GPUs XLA does not fold the rounding into the product: there it would write and read twice the
bytes. JAX's rule for its gradient would multiply the float32 cotangent with bfloat16 operands,
hence our own rule.

Dropout: threefry takes some hundred operations per 32 bits, and `flax.linen.Dropout` draws that
many for every number that it may drop: with the paper's rate of 0.1 in 25 places, more than half
of the time of a step. Here threefry draws only two words per token, and a hash of these and of the
feature's index makes the rest in nine operations. XLA fuses them into their consumers, forward and
backward, so that no mask is ever in memory.

The speedups are in benchmarks/diary.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as saved
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.errors import UserError

# What the forward pass saves; the backward pass recomputes the rest.
REMAT_POLICIES: dict[str, Any] = {
    "none": None,  # everything is saved
    "full": jax.checkpoint_policies.nothing_saveable,  # only each block's input
    # Outputs of dense layers and attention; scores, norms and activations are cheap to recompute.
    "dots": jax.checkpoint_policies.save_only_these_names("dense", "attention"),
    "dots_with_no_batch_dims": jax.checkpoint_policies.save_only_these_names("dense"),
}


def device_of_program() -> tuple[str, str]:
    """Platform and kind of the device to compile for: the mesh's, else the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # or a platform
    if not mesh.empty:
        device: Any = mesh.abstract_device
    elif default is None or isinstance(default, str):
        device = jax.devices(default)[0]
    else:
        device = default
    return device.platform, device.device_kind


def product(equation: str, a: jax.Array, b: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, with a float32 or bfloat16 result."""
    if a.dtype.itemsize >= 4:
        return jnp.einsum(equation, a, b)
    return _product(equation, dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _apart(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x, on TPU v4 behind a barrier: XLA leaves the product of a dense layer as it is.

    It would fuse the norms and GELU beside it, in tiles so slow that an update of B/16 takes 12 %
    longer, of H/14 28 %. On v3, v5e and v5p it takes as long either way.
    """
    apart = kernel.ndim == 2 and device_of_program()[1] == "TPU v4"
    return jax.lax.optimization_barrier(x) if apart else x


def _narrows(kernel: jax.Array) -> bool:
    """Whether its input is the wide side, as after GELU: in memory it would stay until backward."""
    return kernel.shape[0] > kernel.shape[1]


def _forward(equation: str, dtype: Any, a: jax.Array, b: jax.Array) -> Any:
    x = a if _narrows(b) else _apart(a, b)
    return _product(equation, dtype, x, b), (a, b)


def _backward(
    equation: str, dtype: Any, saved: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> Any:
    a, b = saved
    inputs, out = equation.split("->")
    of_a, of_b = inputs.split(",")
    d_out = _apart(d_out.astype(a.dtype), b)
    d_a = _product(f"{out},{of_b}->{of_a}", dtype, d_out, b).astype(a.dtype)
    d_a = d_a if _narrows(b) else _apart(d_a, b)
    # TPUs add up gradients of weights over all devices as the product gives them: half the bytes.
    dtype = b.dtype if device_of_program()[0] == "tpu" else dtype
    # The smaller one first: it is the one that XLA transposes.
    if a.size <= d_out.size:
        d_b = _product(f"{of_a},{out}->{of_b}", dtype, a, d_out)
    else:
        d_b = _product(f"{out},{of_a}->{of_b}", dtype, d_out, a)
    return d_a, d_b.astype(b.dtype)


_product.defvjp(_forward, _backward)


def _result_dtype(x: jax.Array) -> Any:
    """Of its products, before they are rounded to that of x."""
    return x.dtype if device_of_program()[0] == "gpu" else jnp.promote_types(x.dtype, jnp.float32)


def dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
    """`lax.dot_general` for Flax's dense layers: x W as one product of matrices.

    The last axes of x [B, N, ...] are contracted with the first of the kernel, as many as
    `dimensions` says: one to or between features, two from heads.
    """
    num_axes = len(dimensions[0][0])
    rows, columns = x.shape[:-num_axes], kernel.shape[num_axes:]
    x = jnp.reshape(x, (*rows, -1))
    kernel = jnp.reshape(kernel, (x.shape[-1], -1))
    out = product("bnd,de->bne", x, kernel, _result_dtype(x)).astype(x.dtype)
    return jnp.reshape(saved(out, "dense"), (*rows, *columns))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_with(make: Callable[[Any], jax.Array], x: jax.Array, arrays: Any) -> jax.Array:
    """x W: [B, N, D] -> [B, N, E], where W is make(arrays) [D, E], cast to the dtype of x.

    The backward pass makes W again: what was cast or put together before a product would stay in
    memory until then (192 MiB of L/16), unlike what XLA casts within the product.
    """
    return dot_general(x, make(arrays).astype(x.dtype), (((2,), (0,)), ((), ())))


def _product_with_backward(make: Any, saved: tuple[jax.Array, Any], d_out: jax.Array) -> Any:
    x, arrays = saved
    platform, kind = device_of_program()
    if platform == "tpu":  # else XLA keeps W, or makes it again too soon
        arrays, d_out = jax.lax.optimization_barrier((arrays, d_out))
    kernel, gradient = jax.vjp(lambda arrays: make(arrays).astype(x.dtype), arrays)
    d_x, d_kernel = _backward("bnd,de->bne", _result_dtype(x), (x, kernel), d_out)
    if kind == "TPU v6 lite":  # with a norm's gradient in it the product's tiles are slow there
        d_x = jax.lax.optimization_barrier(d_x)
    return d_x, *gradient(d_kernel)


product_with.defvjp(lambda make, *xs: (product_with.fun(make, *xs), xs), _product_with_backward)


# x W + b, W Xavier uniform as in the official code's blocks.
Dense = functools.partial(
    nn.Dense, kernel_init=nn.initializers.xavier_uniform(), dot_general=dot_general
)


def gelu(x: jax.Array, form: str) -> jax.Array:
    """`tanh` or `exact`, `quick` as x sigmoid(1.702 x), or `silu` as x sigmoid(x), in float32.

    The backward pass recomputes it: a scan would save every intermediate, and on a GPU XLA would
    write tanh in float32.
    """
    platform = device_of_program()[0]
    if form == "tanh" and platform != "cpu":  # there JAX's own gradient has the official bits
        return _tanh_gelu(x)
    return jax.checkpoint(_gelu, prevent_cse=platform == "gpu", static_argnums=1)(x, form)


def _gelu(x: jax.Array, form: str) -> jax.Array:
    y = x.astype(jnp.float32)
    if form in ("quick", "silu"):
        y = y * nn.sigmoid(1.702 * y if form == "quick" else y)
    else:
        y = nn.gelu(y, approximate=form == "tanh")
    return y.astype(x.dtype)


@jax.custom_vjp
def _tanh_gelu(x: jax.Array) -> jax.Array:
    # XLA knows a GELU in the dtype of a product as a part of it, which cuBLAS adds in float32.
    # Apart from the product, as with remat, each operation is rounded: 1.4 times the error.
    dtype = x.dtype if device_of_program()[0] == "gpu" else jnp.float32
    return nn.gelu(x.astype(dtype)).astype(x.dtype)


def _tanh_gelu_backward(x: jax.Array, d_out: jax.Array) -> tuple[jax.Array]:
    """In half of the operations of JAX's gradient: GELU is what an MLP of a TPU v6e waits for."""
    y, c = x.astype(jnp.float32), math.sqrt(2 / math.pi)
    cubic = 0.044715 * c * jnp.square(y)
    tanh, half = jnp.tanh(y * (c + cubic)), 0.5 * y
    slope = 0.5 + 0.5 * tanh + (half - half * jnp.square(tanh)) * (c + 3 * cubic)
    return ((slope * d_out).astype(x.dtype),)


_tanh_gelu.defvjp(lambda x: (_tanh_gelu(x), x), _tanh_gelu_backward)


def _convolve(
    images: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **options: Any
) -> jax.Array:
    """`lax.conv_general_dilated` whose windows are patches: [B, H, W, C] -> [B, h, w, D].

    As the product of equation 1 on GPUs, where cuDNN's convolution takes five times as long, and on
    TPU v4, where XLA's takes twice as long. On v5e both take as long.
    """
    platform, kind = device_of_program()
    if platform != "gpu" and kind != "TPU v4":
        return jax.lax.conv_general_dilated(images, kernel, strides, padding, **options)
    height, width, channels, features = kernel.shape
    rows, columns = images.shape[1] // height, images.shape[2] // width
    windows = (rows, height, columns, width, channels)
    x = jnp.reshape(images[:, : rows * height, : columns * width], (-1, *windows))
    x = jnp.reshape(jnp.swapaxes(x, 2, 3), (-1, rows * columns, height * width * channels))
    x = dot_general(x, jnp.reshape(kernel, (-1, features)), (((2,), (0,)), ((), ())))
    x = jnp.reshape(x, (-1, rows, columns, features))
    # Else the head's gradient decides: [N, D, B] in all blocks, and transposes around products.
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2, 3)))


PatchEmbedding = functools.partial(nn.Conv, padding="VALID", conv_general_dilated=_convolve)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """The backward pass recomputes it: only x is saved."""
    x = x.astype(jnp.float32)
    squared = jnp.square(x)  # before the mean: the gradient is summed in Flax's order
    mean = jnp.mean(x, axis=-1, keepdims=True)
    mean_square = jnp.mean(squared, axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, mean_square - jnp.square(mean))  # negative only by rounding
    features = (*(1,) * (x.ndim - 1), -1)
    factor = jax.lax.rsqrt(variance + epsilon) * jnp.reshape(scale, features)
    return (x - mean) * factor + jnp.reshape(bias, features)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over features: [..., D] -> [..., D].

    In float32, as in Flax's layer of the same name, with one rounding to `dtype` at the end.
    """

    epsilon: float = 1e-6
    dtype: Any = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        zeros = nn.initializers.zeros_init()
        bias = self.param("bias", zeros, (x.shape[-1],)) if self.use_bias else jnp.zeros(())
        return _normalize(x, scale, bias, self.epsilon).astype(self.dtype)


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + epsilon) * scale + bias per channel: [B, ..., C] -> [B, ..., C].

    Training takes mean and variance from the batch, over all devices, and stores their running
    averages as new values of `mean` and `var` in the collection `buffers`, as PyTorch computes
    them; everything else reads these two. They are among the parameters, in rows with
    `is_statistic`, and have no gradient. In float32, with one rounding to `dtype` at the end.

    Attributes:
      train: whether this is training with the statistics of the batch.
      momentum: of the running averages.
      affine: whether there are `scale` and `bias`.
    """

    train: bool
    epsilon: float = 1e-5
    momentum: float = 0.9
    affine: bool = True
    dtype: Any = jnp.float32
    scale_init: Any = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        inits = {"mean": zeros, "var": ones}
        inits |= {"scale": self.scale_init, "bias": zeros} if self.affine else {}
        params = {name: self.param(name, init, x.shape[-1:]) for name, init in inits.items()}
        x = jnp.asarray(x, jnp.float32)
        mean, variance = jax.lax.stop_gradient((params["mean"], params["var"]))
        if self.train and not self.is_initializing():
            running = {"mean": mean, "var": variance}
            axes = tuple(range(x.ndim - 1))
            mean, variance = jnp.mean(x, axes), jnp.var(x, axes)
            self._store(running, mean, variance, x.size // x.shape[-1])
        features = (*(1,) * (x.ndim - 1), -1)
        mean, variance = jnp.reshape(mean, features), jnp.reshape(variance, features)
        x = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.affine:
            scale, bias = (jnp.reshape(params[name], features) for name in ("scale", "bias"))
            x = x * scale + bias
        return x.astype(self.dtype)

    def _store(self, running: Any, mean: jax.Array, variance: jax.Array, count: int) -> None:
        if not self.is_mutable_collection("buffers"):
            raise UserError(
                "this objective does not keep the statistics of the model's batch norms; use "
                "classification or distillation, or model.frozen_norms=True."
            )
        # The average is of the unbiased estimate, as in PyTorch.
        batch = {"mean": mean, "var": variance * (count / max(count - 1, 1))}
        for name, value in jax.lax.stop_gradient(batch).items():
            average = self.momentum * running[name] + (1.0 - self.momentum) * value
            self.put_variable("buffers", name, average)


def random_words(rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint32 of `shape` [..., D], a function of the key only.

    Each token gets 64 bits of its own from threefry. Along the features, a Weyl sequence goes
    through two rounds of multiply and xor-shift (constants of C. Wellons' `lowbias32`), with the
    second half of the key in between. Good enough for dropout, not for keys.
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
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        if deterministic or not self.rate:
            return x
        words = random_words(self.make_rng("dropout"), x.shape)
        kept = words >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        # Divided in float32: rounding 0.9 to bfloat16 would scale training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / (1.0 - self.rate), 0.0).astype(x.dtype)


DEPTH_SHAPES = ("linear", "constant")


def drop_rates(rate: float, num_layers: int, shape: str = "linear") -> np.ndarray | None:
    """Float32 [L]: `linear` from 0 for the first block to `rate` for the last, or `constant`.

    None for rate 0.
    """
    rates = rate * np.arange(num_layers) / max(num_layers - 1, 1)
    rates = np.full(num_layers, rate) if shape == "constant" else rates
    return rates.astype(np.float32) if rate else None


def residual(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y of two arrays [..., D].

    On GPUs as a sum of matrices: in other shapes XLA does not see that x is needed again, lets the
    product that ends in y add to it in place, and so has to copy x first.
    """
    if device_of_program()[0] != "gpu":
        return x + y
    rows = (-1, x.shape[-1])
    return jnp.reshape(jnp.reshape(x, rows) + jnp.reshape(y, rows), x.shape)


class StochasticDepth(nn.Module):
    """Drops a residual branch for single examples (1603.09382): [B, ...] -> [B, ...].

    Each example and each branch (attention and MLP) is drawn separately, as in timm's DropPath and
    scenic. Kept values are divided by the probability of keeping them, as in timm and unlike
    scenic, so that evaluation needs no scaling.
    """

    @nn.compact
    def __call__(self, x: jax.Array, rate: Any, *, deterministic: bool) -> jax.Array:
        """`rate`: a number, possibly traced as under a scan; None disables it."""
        if deterministic or rate is None:
            return x
        keep = 1.0 - jnp.asarray(rate, jnp.float32)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)  # [B, 1, ...]
        # Divided in float32, as above.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / keep, 0.0).astype(x.dtype)


def apply_blocks(
    create_block: Callable[..., nn.Module],
    x: jax.Array,
    *shared: jax.Array,
    name: str,
    num_layers: int,
    stochastic_depth_rate: float,
    stochastic_depth_shape: str = "linear",
    remat: str,
    scan: bool,
    train: bool,
) -> jax.Array:
    """Blocks `NAME_0`, `NAME_1`, ... of the module in whose compact `__call__` this is called.

    With `scan` XLA compiles one block as the body of a loop; its parameters are those of the loop
    form stacked along a leading axis (`parameters.names.stack_blocks`).

    Args:
      create_block: called with `name`; the block as `block(x, drop_rate, *shared, train=train)`.
      x: [B, N, D], like the result.
      shared: the same for all blocks.
      stochastic_depth_rate: of the last block, with its shape see `layers.drop_rates`.
      remat: one of `REMAT_POLICIES`.
    """

    def apply_block(block: nn.Module, x: jax.Array, drop_rate: Any) -> jax.Array:
        return block(x, drop_rate, *shared, train=train)

    if remat != "none":
        # Inside a scan, the loop itself prevents XLA from merging the two forward passes.
        apply_block = nn.remat(apply_block, prevent_cse=not scan, policy=REMAT_POLICIES[remat])
    rates = drop_rates(stochastic_depth_rate, num_layers, stochastic_depth_shape)  # [L], or None
    if not scan:
        for i in range(num_layers):
            block = create_block(name=f"{name}_{i}")
            x = apply_block(block, x, None if rates is None else rates[i])
        return x
    loop = nn.scan(
        lambda block, x, drop_rate: (apply_block(block, x, drop_rate), None),
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=num_layers,
    )
    x, _ = loop(create_block(name=name), x, rates)
    return x


class IdentityLayer(nn.Module):
    """Names a value among the intermediates."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x
