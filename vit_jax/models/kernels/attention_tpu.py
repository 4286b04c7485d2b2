"""Attention on TPUs: our kernel, and JAX's for long sequences, on one device or a mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as saved
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from vit_jax.errors import UserError
from vit_jax.models.kernels import attention_pallas, devices
from vit_jax.models.kernels.devices import device_has
from vit_jax.models.kernels.products import dot_general

_MAX_BLOCK = 512  # tokens of `splash`: larger blocks leave no room for the backward pass


def pallas(
    query: jax.Array, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> jax.Array:
    """Our kernel, see `attention_pallas`: scores never leave the chip."""
    _, num_tokens, num_heads, head_dim = query.shape
    if not attention_pallas.fits(num_tokens, num_heads, head_dim, query.dtype.itemsize):
        raise UserError(
            f"model.attention='pallas' does not fit {num_tokens} tokens with heads of "
            f"{head_dim}; use 'splash' or 'xla'."
        )
    return _by_columns(attention_pallas.attention, query, key, value, lengths)


def splash(
    query: jax.Array, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> jax.Array:
    """JAX's kernel for longer sequences: with patches of 16, images of 736 pixels and more."""
    return _by_columns(_splash, query, key, value, lengths)


def _splash(
    head_dim: int,
    interpret: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
) -> jax.Array:
    """As `attention_pallas.attention`; block by block, so that scores [N, N] never exist."""
    batch_size, num_tokens, width = query.shape
    # The largest block that pads the sequence by less than a tenth, if any.
    blocks = range(_MAX_BLOCK, attention_pallas.LANES, -attention_pallas.LANES)
    block = next((b for b in blocks if -num_tokens % b < num_tokens / 10), attention_pallas.LANES)
    rows = -(-num_tokens // block) * block

    def by_head(x: jax.Array) -> jax.Array:
        x = jnp.reshape(x, (batch_size, num_tokens, width // head_dim, head_dim))
        x = jnp.swapaxes(x, 1, 2)  # [B, H, N, d]
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows - num_tokens), (0, 0)))

    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask(
            [splash_attention.FullMask((rows, rows))] * (width // head_dim)
        ),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    # Tokens attend only within their segment; the padding is another one.
    lengths = jnp.full(batch_size, num_tokens) if lengths is None else lengths
    segments = (jnp.arange(rows)[None] >= lengths[:, None]).astype(jnp.int32)  # [B, rows]
    see = splash_attention.SegmentIds(segments, segments)
    out = jax.vmap(kernel)(*map(by_head, (query, key, value)), see)
    return jnp.reshape(jnp.swapaxes(out[:, :, :num_tokens], 1, 2), query.shape)


def joint(
    x: jax.Array, kernels: Any, biases: Any, lengths: jax.Array | None = None
) -> jax.Array | None:
    """Our TPU kernel on one product for queries, keys and values, as in equation 5.

    Args:
      x: [B, N, D].
      kernels, biases: three times [D, H, d] and [H, d].
      lengths: see `AttentionFn`.

    Returns:
      [B, N, D]; None if the kernel does not take them.
    """
    batch_size, num_tokens, width = x.shape
    num_heads, head_dim = biases[0].shape
    mesh = jax.sharding.get_abstract_mesh()
    shards = math.prod(mesh.shape[axis] for axis in _mesh_axes("heads", num_heads, mesh) or ())
    sizes = (num_tokens, num_heads // shards, head_dim, x.dtype.itemsize)
    groups = shards * attention_pallas.num_groups(*sizes)
    if width // groups % attention_pallas.LANES or not attention_pallas.fits(*sizes):
        return None

    def by_groups(query: jax.Array, *others: jax.Array) -> jax.Array:
        """Three times [H, d, ...] -> [3 * D, ...], by groups of heads."""
        arrays = (query / math.sqrt(head_dim), *others)  # exact for heads of 16, 64, 256
        arrays = tuple(jnp.reshape(array, (groups, -1, *array.shape[2:])) for array in arrays)
        return jnp.reshape(jnp.concatenate(arrays, axis=1), (-1, *query.shape[2:]))

    with jax.named_scope("query_key_value"):
        # A TPU has [D, H, d] in memory as [H, d, D]: joined like that, nothing is transposed.
        kernel = by_groups(*(jnp.moveaxis(kernel, 0, -1) for kernel in kernels)).T  # [D, 3 * D]
        x = _with_unfused_gradient(x) if device_has("unfused_joint_gradient") else x
        qkv = dot_general(x, kernel.astype(x.dtype), (((2,), (0,)), ((), ())))
        bias = jnp.tile(by_groups(*biases).astype(jnp.float32), (batch_size, 1, 1))
    arrays = qkv, bias
    return _on_each_device(attention_pallas.joint_attention, arrays, lengths, num_heads, head_dim)


@jax.custom_vjp
def _with_unfused_gradient(x: jax.Array) -> jax.Array:
    """x, whose gradient is behind a barrier."""
    return x


_with_unfused_gradient.defvjp(
    lambda x: (x, None), lambda _, d_x: (jax.lax.optimization_barrier(d_x),)
)


def _by_columns(
    kernel: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
) -> jax.Array:
    """A kernel for arrays [B, N, H * d], of whose queries it wants to be divided by sqrt(d)."""
    num_heads, head_dim = query.shape[2:]
    query = query / math.sqrt(head_dim)
    # Heads stay adjacent, as the matrix products leave them.
    qkv = (jnp.reshape(x, (*x.shape[:2], -1)) for x in (query, key, value))
    # As the kernel reads them: otherwise remat would add the biases and write them again.
    arrays = tuple(saved(x, "dense") for x in qkv)
    out = _on_each_device(kernel, arrays, lengths, num_heads, head_dim)
    return jnp.reshape(out, query.shape)


def _on_each_device(
    kernel: Callable[..., jax.Array],
    arrays: tuple[jax.Array, ...],
    lengths: jax.Array | None,
    num_heads: int,
    head_dim: int,
) -> jax.Array:
    """Runs a kernel on the images and heads of each device: XLA cannot partition it.

    Without a TPU Pallas interprets the kernel, for tests.
    """
    call = functools.partial(kernel, head_dim, devices.device_of_program()[0] != "tpu")
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        sizes = {"batch": len(arrays[0]), "heads": num_heads}
        batch, heads = (_mesh_axes(axis, size, mesh) for axis, size in sizes.items())
        spec = PartitionSpec(batch, None, heads)
        specs = *(spec,) * len(arrays), PartitionSpec(batch)
        # The kernel does not declare over which axes its outputs vary.
        call = jax.shard_map(call, in_specs=specs, out_specs=spec, check_vma=False)
    return call(*arrays, lengths)


def _mesh_axes(logical: str, size: int, mesh: Any) -> tuple[str, ...] | None:
    """The mesh axes that shard a logical axis; None if they do not divide its size."""
    if mesh.empty:
        return None
    spec: Any = nn.logical_to_mesh_axes((logical,))
    axes = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
    shards = math.prod(mesh.shape[axis] for axis in axes)
    return axes if axes and size % shards == 0 else None
