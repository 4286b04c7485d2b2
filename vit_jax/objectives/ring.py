"""SigLIP's loss over all devices, a chunk of the texts at a time (2303.15343, section 3.3).

A device computes the logits of its own images with b texts, b x b of B x B. The texts go around the
devices, in the backward pass with their gradients: memory does not grow with the number of devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


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
    mesh = jax.sharding.get_abstract_mesh()
    names: Any = nn.logical_to_mesh_axes(("batch",))
    spec = () if mesh.empty else names[0] or ()
    axes = (spec,) if isinstance(spec, str) else tuple(spec)
    count = math.prod(mesh.shape[axis] for axis in axes)
    ring = Ring(axes, count) if count > 1 and len(mask) % count == 0 else Ring((), 1)
    return _losses(ring, scale, bias, images, texts, mask)


class Ring(NamedTuple):
    """The mesh axes over which the batch is split, and the number of devices along them."""

    axes: tuple[str, ...]
    size: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(ring: Ring, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _on_each_device(ring, _forward, "bb", *inputs)


def _losses_and_inputs(ring: Ring, *inputs: jax.Array) -> Any:
    return _losses(ring, *inputs), inputs


def _gradients(ring: Ring, inputs: Any, cotangents: Any) -> Any:
    gradients = _on_each_device(ring, _backward, "..bb", *inputs, cotangents[0])
    return *gradients, jnp.zeros_like(inputs[-1])


_losses.defvjp(_losses_and_inputs, _gradients)


def _on_each_device(
    ring: Ring, function: Callable[..., Any], outputs: str, scale: Any, bias: Any, *arrays: Any
) -> Any:
    """`outputs`: b for what is split as the batch is, `.` for scalars."""
    if not ring.axes:
        return function(ring, scale, bias, *arrays)
    rows, whole = PartitionSpec(ring.axes), PartitionSpec()
    return jax.shard_map(
        functools.partial(function, ring),
        in_specs=(whole, whole, *(rows for _ in arrays)),
        out_specs=tuple(rows if output == "b" else whole for output in outputs),
        check_vma=False,
    )(scale, bias, *arrays)


def _numbers(ring: Ring, count: int) -> jax.Array:
    """Of this device's pairs in the batch, int32 [1, b]."""
    return (jax.lax.axis_index(ring.axes) * count if ring.axes else 0) + jnp.arange(count)[None]


def _pass_on(ring: Ring, tree: Any) -> Any:
    """To the next device."""
    if not ring.axes:
        return tree
    to_next = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axes, to_next), tree)


def _forward(ring: Ring, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sigmoid_losses` of this device's pairs."""
    scale, bias, images, texts, mask = inputs
    numbers = _numbers(ring, len(mask))

    def meet(carry: Any, _: None) -> tuple[Any, None]:
        (texts, mask, columns), (own, losses, is_beaten) = carry
        logits = scale * (images @ texts.T) + bias  # [b, b]
        # Its own texts are the first that a device meets.
        own = jnp.where(columns == numbers, jnp.diagonal(logits)[None], own)  # [1, b]
        signs = jnp.where(columns == numbers.T, 1.0, -1.0)
        losses += jnp.sum(-jax.nn.log_sigmoid(signs * logits) * mask, axis=1)
        is_as_good = (logits >= own.T) & (mask > 0) & (columns != numbers.T)
        is_beaten |= jnp.any(is_as_good, axis=1)
        around = _pass_on(ring, (texts, mask, columns))
        return (around, (own, losses, is_beaten)), None

    zeros = jnp.zeros(len(mask))
    start = (texts, mask[None], numbers), (zeros[None], zeros, zeros > 0)
    (_, (_, losses, is_beaten)), _ = jax.lax.scan(meet, start, length=ring.size)
    return losses, 1.0 - is_beaten


def _backward(ring: Ring, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of scale, bias, images and texts."""
    scale, bias, images, texts, mask, d_losses = inputs
    numbers = _numbers(ring, len(mask))

    def meet(carry: Any, _: None) -> tuple[Any, None]:
        (texts, mask, columns, d_texts), (d_scale, d_bias, d_images) = carry
        cosines, signs = images @ texts.T, jnp.where(columns == numbers.T, 1.0, -1.0)
        slopes = -signs * jax.nn.sigmoid(-signs * (scale * cosines + bias))
        d_logits = slopes * mask * d_losses[:, None]  # [b, b]
        d_scale += jnp.sum(d_logits * cosines)
        here = d_scale, d_bias + jnp.sum(d_logits), d_images + scale * (d_logits @ texts)
        around = texts, mask, columns, d_texts + scale * (d_logits.T @ images)
        return (_pass_on(ring, around), here), None

    zero = jnp.zeros(())
    start = (
        (texts, mask[None], numbers, jnp.zeros_like(texts)),
        (zero, zero, jnp.zeros_like(images)),
    )
    ((*_, d_texts), (d_scale, d_bias, d_images)), _ = jax.lax.scan(meet, start, length=ring.size)
    if ring.axes:
        d_scale, d_bias = jax.lax.psum((d_scale, d_bias), ring.axes)
    return d_scale, d_bias, d_images, d_texts
