"""SigLIP's loss over all devices, a chunk of the texts at a time (2303.15343, section 3.3).

A device computes the logits of its own images with b texts, b x b of B x B. The texts go around the
devices, in the backward pass with their gradients: memory does not grow with the number of devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


@jax.custom_vjp
def sigmoid_losses(
    scale: jax.Array, bias: jax.Array, images: jax.Array, texts: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of each image the sum over all texts of -log sigmoid(z (scale * cosine + bias)).

    z is 1 for its own text and -1 for the others. And 1 if its own fits better than all others,
    else 0.

    Args:
      scale, bias: scalars.
      images, texts: unit vectors, float32 [B, D].
      mask: [B], 1 for real pairs: other texts do not count.

    Returns:
      float32 [B] twice; the second has no gradient.
    """
    return _on_each_device(_forward, "bb", scale, bias, images, texts, mask)


def _with_inputs(*inputs: jax.Array) -> Any:
    return sigmoid_losses(*inputs), inputs


def _gradients(inputs: Any, cotangents: Any) -> Any:
    return *_on_each_device(_backward, "..bb", *inputs, cotangents[0]), jnp.zeros_like(inputs[-1])


sigmoid_losses.defvjp(_with_inputs, _gradients)


def _on_each_device(
    function: Callable[..., Any], outputs: str, scale: Any, bias: Any, *arrays: jax.Array
) -> Any:
    """`outputs`: b for what is split as the batch is, `.` for scalars."""
    mesh = jax.sharding.get_abstract_mesh()
    spec: Any = () if mesh.empty else nn.logical_to_mesh_axes(("batch",))[0] or ()
    axes = (spec,) if isinstance(spec, str) else spec
    count = math.prod(mesh.shape[axis] for axis in axes)
    if count == 1 or len(arrays[0]) % count:
        return function((), 1, scale, bias, *arrays)
    rows, whole = PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(
        functools.partial(function, axes, count),
        in_specs=(whole, whole, *(rows for _ in arrays)),
        out_specs=tuple(rows if output == "b" else whole for output in outputs),
        check_vma=False,
    )(scale, bias, *arrays)


def _numbers(axes: tuple[str, ...], count: int) -> jax.Array:
    """Of this device's pairs in the batch, int32 [1, b]."""
    return (jax.lax.axis_index(axes) * count if axes else 0) + jnp.arange(count)[None]


def _pass_on(tree: Any, axes: tuple[str, ...], count: int) -> Any:
    """To the next device, in a ring."""
    ring = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, ring), tree) if axes else tree


def _forward(
    axes: tuple[str, ...],
    count: int,
    scale: jax.Array,
    bias: jax.Array,
    images: jax.Array,
    texts: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    numbers = _numbers(axes, len(mask))

    def meet(carry: Any, _: None) -> tuple[Any, None]:
        (texts, mask, columns), (own, losses, is_beaten) = carry
        logits = scale * (images @ texts.T) + bias  # [b, b]
        # Its own texts are the first that a device meets.
        own = jnp.where(columns == numbers, jnp.diagonal(logits)[None], own)  # [1, b]
        signs = jnp.where(columns == numbers.T, 1.0, -1.0)
        losses += jnp.sum(-jax.nn.log_sigmoid(signs * logits) * mask, axis=1)
        is_as_good = (logits >= own.T) & (mask > 0) & (columns != numbers.T)
        is_beaten |= jnp.any(is_as_good, axis=1)
        around = _pass_on((texts, mask, columns), axes, count)
        return (around, (own, losses, is_beaten)), None

    zeros = jnp.zeros(len(mask))
    start = (texts, mask[None], numbers), (zeros[None], zeros, zeros > 0)
    (_, (_, losses, is_beaten)), _ = jax.lax.scan(meet, start, length=count)
    return losses, 1.0 - is_beaten


def _backward(
    axes: tuple[str, ...],
    count: int,
    scale: jax.Array,
    bias: jax.Array,
    images: jax.Array,
    texts: jax.Array,
    mask: jax.Array,
    d_losses: jax.Array,
) -> tuple[jax.Array, ...]:
    """The gradients of scale, bias, images and texts."""
    numbers = _numbers(axes, len(mask))

    def meet(carry: Any, _: None) -> tuple[Any, None]:
        (texts, mask, columns, d_texts), (d_scale, d_bias, d_images) = carry
        cosines, signs = images @ texts.T, jnp.where(columns == numbers.T, 1.0, -1.0)
        slopes = -signs * jax.nn.sigmoid(-signs * (scale * cosines + bias))
        d_logits = slopes * mask * d_losses[:, None]  # [b, b]
        here = d_scale + jnp.sum(d_logits * cosines), d_bias + jnp.sum(d_logits)
        here = *here, d_images + scale * (d_logits @ texts)
        around = texts, mask, columns, d_texts + scale * (d_logits.T @ images)
        return (_pass_on(around, axes, count), here), None

    zero = jnp.zeros(())
    start = (
        (texts, mask[None], numbers, jnp.zeros_like(texts)),
        (zero, zero, jnp.zeros_like(images)),
    )
    ((*_, d_texts), (d_scale, d_bias, d_images)), _ = jax.lax.scan(meet, start, length=count)
    if axes:
        d_scale, d_bias = jax.lax.psum((d_scale, d_bias), axes)
    return d_scale, d_bias, d_images, d_texts
