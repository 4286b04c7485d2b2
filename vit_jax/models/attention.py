"""Multi-head attention (equations 5 to 8 of 2010.11929): a table of implementations.

All have the same parameters and, within the rounding of the dtype, the same numbers. `attention=
"auto"` takes the fastest for the platform that the program is compiled for. B: batch, N: tokens,
H: heads, d: width of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as saved

from vit_jax.errors import UserError
from vit_jax.models.layers import Dense, product


@dataclasses.dataclass(frozen=True)
class _Sown:
    """Sows the weights into a collection of their own, kept only on request."""

    module: nn.Module

    def sow(self, _collection: str, name: str, value: jax.Array) -> bool:
        if self.module.is_initializing():  # `init` returns parameters alone
            return False
        return self.module.sow("attention", name, value)


_CACHE_BYTES = 2**20  # of float32 scores that `chunked` holds at a time, twice


def reference(query: Any, key: Any, value: Any, **kwargs: Any) -> jax.Array:
    """The official code's: scores and softmax in float32, which all write to memory."""
    return nn.dot_product_attention(query, key, value, force_fp32_for_softmax=True, **kwargs)


def xla(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Products over [B, H, N, d]; softmax in float32, the weights in the dtype of the values."""
    query = query / math.sqrt(query.shape[-1])
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B, H, N, d]
    weights = jax.nn.softmax(product("bhqd,bhkd->bhqk", query, key)).astype(value.dtype)
    out = product("bhqk,bhkd->bhqd", weights, value).astype(value.dtype)
    return jnp.swapaxes(out, 1, 2)


def recomputed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """As `xla`, but the backward pass computes scores and weights anew."""
    return jax.checkpoint(xla)(query, key, value)


def chunked(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """As `recomputed`, a few heads after the other: their scores stay in the cache of a CPU.

    On a mesh each device would compute the heads of all.
    """
    batch, num_queries, num_heads, width = query.shape
    num_products = batch * num_heads
    fit = max(_CACHE_BYTES // (4 * num_queries * key.shape[1]), 2)
    chunk = max(n for n in range(1, min(fit, num_products) + 1) if num_products % n == 0)

    def chunks(x: jax.Array) -> jax.Array:  # [B * H / chunk, chunk, N, d]
        return jnp.reshape(jnp.swapaxes(x, 1, 2), (-1, chunk, x.shape[1], width))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def heads(_: None, qkv: Any) -> tuple[None, jax.Array]:
        query, key, value = qkv
        weights = jax.nn.softmax(product("hqd,hkd->hqk", query, key)).astype(value.dtype)
        return None, product("hqk,hkd->hqd", weights, value).astype(value.dtype)

    query = query / math.sqrt(width)
    # Two at a time: the softmax of one beside the products of the other.
    _, out = jax.lax.scan(heads, None, (chunks(query), chunks(key), chunks(value)), unroll=2)
    return jnp.swapaxes(jnp.reshape(out, (batch, num_heads, num_queries, width)), 1, 2)


def cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: Any = "cudnn"
) -> jax.Array:
    """cuDNN's fused attention; tokens are padded to a multiple of 8, which its kernels want."""
    num_queries, num_keys = query.shape[1], key.shape[1]

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))

    def lengths(num_tokens: int) -> jax.Array:
        return jnp.full(query.shape[0], num_tokens, jnp.int32)

    out = jax.nn.dot_product_attention(
        padded(query),
        padded(key),
        padded(value),
        query_seq_lengths=lengths(num_queries),
        key_value_seq_lengths=lengths(num_keys),
        implementation=implementation,
    )
    return out[:, :num_queries]


# softmax(q k^T / sqrt(d)) v: three times [B, N, H, d] -> [B, N, H, d].
ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference,
    "xla": xla,
    "recomputed": recomputed,
    "chunked": chunked,
    "cudnn": cudnn,
}
# With the layout of the projections, see `Kernel`.
KERNELS = ("pallas", "splash")
NAMES = ("auto", *ATTENTIONS, *KERNELS)


def check_attention(name: str, dropout_rate: float) -> None:
    """Raises UserError where the implementation has no dropout of its weights."""
    if dropout_rate and name not in ("auto", "reference"):
        raise UserError(
            f"model.attention={name!r} has no dropout of attention weights; use 'reference', or "
            f"model.attention_dropout_rate=0 (given: {dropout_rate})."
        )


class Kernel(nn.Module):
    """A TPU kernel: [B, N, H * d] three times, biases [3, H * d] -> [B, N, H * d].

    XLA cannot split a kernel over devices; a context of `parameters.sharding` calls it on each.
    Without a TPU Pallas interprets it, for tests.
    """

    kernel: str
    head_dim: int

    @nn.compact
    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array
    ) -> jax.Array:
        if self.kernel == "splash":
            from vit_jax.models.attention_splash import attention
        else:
            from vit_jax.models.attention_tpu import attention

        interpret = device_of_program()[0] != "tpu"
        return attention(query, key, value, bias, self.head_dim, interpret)


def as_defined() -> AbstractContextManager[None]:
    """A context in which kernels are traced as the products that define them, without padding."""

    def define(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, Kernel):
            return method(*args, **kwargs)
        query, key, value, _ = args
        split = (*query.shape[:2], -1, context.module.head_dim)
        return jnp.reshape(xla(*(jnp.reshape(x, split) for x in (query, key, value))), query.shape)

    return nn.intercept_methods(define)


class MultiHeadDotProductAttention(nn.Module):
    """MSA of equations 5 to 8, with biases everywhere as in the official code.

    [B, N, D] -> [B, N, D]; from other tokens [B, M, D] where `inputs` are given.
    """

    num_heads: int
    attention: str = "auto"
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, queries: jax.Array, inputs: jax.Array | None = None, *, train: bool
    ) -> jax.Array:
        width = queries.shape[-1]
        heads = (self.num_heads, width // self.num_heads)
        dropout_rate = self.dropout_rate if train else 0.0
        chosen = self._choose(queries.shape[1], inputs is not None, dropout_rate, width, train)
        inputs = queries if inputs is None else inputs
        sources = {"query": queries, "key": inputs, "value": inputs}
        projections = {
            name: Dense((width, *heads), heads, self.dtype, name=name) for name in sources
        }
        if chosen in KERNELS:
            apart = [projections[name](x, apart=True) for name, x in sources.items()]
            products, biases = zip(*apart, strict=True)
            query, key, value = products
            bias = jnp.concatenate(biases)  # [3, H * d]
            out = Kernel(chosen, heads[1])(query, key, value, bias)  # [B, N, H * d]
        else:
            options: dict[str, Any] = {}
            if chosen == "reference":
                options = {"module": _Sown(self), "deterministic": not dropout_rate}
            if dropout_rate:
                rng = self.make_rng("dropout")
                options |= {"dropout_rate": dropout_rate, "dropout_rng": rng}
                options["broadcast_dropout"] = False
            split = [projections[name](x) for name, x in sources.items()]  # [B, N, H, d]
            out = jnp.reshape(ATTENTIONS[chosen](*split, **options), queries.shape)
        out = saved(out, "attention")
        return Dense((*heads, width), (width,), self.dtype, name="out")(out)

    def _choose(
        self, num_tokens: int, is_cross: bool, dropout_rate: float, width: int, train: bool
    ) -> str:
        if self.is_initializing() or dropout_rate:
            return "reference"
        sizes = (num_tokens, width // self.num_heads, width, jnp.dtype(self.dtype).itemsize)
        name = self.attention
        if name == "auto":
            looked_at = self.is_mutable_collection("attention")
            alone = train and jax.sharding.get_abstract_mesh().size <= 1
            name = "reference" if looked_at else fastest(*device_of_program(), *sizes, alone)
        if name in (*KERNELS, "chunked") and is_cross:  # one query: there is nothing to gain
            return "xla"
        if name == "pallas":
            check_kernel(*sizes)
        return name


def device_of_program() -> tuple[str, str]:
    """Platform and kind of what the program is compiled for: the mesh, else the default device."""
    mesh = jax.sharding.get_abstract_mesh()
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # or a platform
    if not mesh.empty:
        device: Any = mesh.abstract_device
    elif default is None or isinstance(default, str):
        device = jax.devices(default)[0]
    else:
        device = default
    return device.platform, device.device_kind


def check_kernel(num_tokens: int, head_dim: int, width: int, itemsize: int) -> None:
    """Raises UserError where the kernel has no room for so many tokens."""
    from vit_jax.models import attention_tpu

    if not attention_tpu.fits(num_tokens, head_dim, width, itemsize):
        raise UserError(
            f"model.attention='pallas' has no room for {num_tokens} tokens with heads of "
            f"{head_dim}; use 'splash' or 'recomputed'."
        )


@functools.cache
def fastest(
    platform: str, kind: str, num_tokens: int, head_dim: int, width: int, itemsize: int, alone: bool
) -> str:
    """The implementation to take on a kind of device; a line of the log says which and why.

    `alone`: whether one device trains, without others.
    """
    if platform == "tpu":
        from vit_jax.models import attention_tpu

        if kind in ("TPU v2", "TPU v3"):
            name, why = "xla", "Pallas has no bfloat16 products for it"
        elif attention_tpu.fits(num_tokens, head_dim, width, itemsize):
            name, why = "pallas", "scores stay on the chip"
        else:
            name, why = "splash", "more tokens than fit on the chip, so block by block"
    elif platform == "cpu" and itemsize == 4:
        name, why = "reference", "bit for bit the official code's"
    elif platform == "cpu" and alone:
        name, why = "chunked", "scores stay in the cache"
    else:
        name, why = "xla", "the fastest of those measured"
    logging.info("Attention on %s, %d tokens: %s (%s).", kind, num_tokens, name, why)
    return name
