"""The implementations of attention: a table, and the fastest one for each platform.

All have the same parameters and, up to rounding in the dtype, the same results:
softmax(q k^T / sqrt(d)) v, three times [B, N, H, d] -> [B, N, H, d].
"""

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as saved

from vit_jax.errors import UserError
from vit_jax.kinds import Kinds
from vit_jax.models.kernels import devices
from vit_jax.models.kernels.devices import device_has
from vit_jax.models.kernels.products import dot_general, product

_CACHE_BYTES = 2**20  # of float32 scores that `chunked` holds at a time, twice


def reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    lengths: jax.Array | None = None,
    module: Any = None,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
) -> jax.Array:
    """Equations 6 and 7 for all heads: three times [B, N, H, d] -> [B, N, H, d].

    Equation 5 (queries, keys and values) and equation 8 (the product with all heads) are the dense
    layers of Flax's `MultiHeadDotProductAttention` around it. Scores and softmax are float32 and
    match the official code bit for bit.

    Args:
      bias: [B, H, N, N], added to the scores.
      lengths: see `AttentionFn`.
      module: sows the weights [B, H, N, N] as the intermediate `attention_weights`.
      dropout_rng, dropout_rate: of the weights.
    """
    dtype, head_dim = query.dtype, query.shape[-1]
    query = query / jnp.sqrt(head_dim).astype(dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)  # [B, H, N, N]
    scores = scores if bias is None else scores + bias
    scores = masked(scores, lengths)
    weights = jax.nn.softmax(scores.astype(jnp.float32))  # equation 6
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, weights.shape)
        weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)  # equation 7


def masked(scores: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Scores [B, H, N, N] with -inf for the keys after the first `lengths` [B] of each image."""
    if lengths is None:
        return scores
    index = jnp.reshape(jnp.arange(scores.shape[-1]), (1, 1, 1, -1))
    return jnp.where(index < jnp.reshape(lengths, (-1, 1, 1, 1)), scores, -jnp.inf)


def xla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Products over [B, H, N, d]; softmax in float32, the weights in the dtype of the values.

    `bias` [B, H, N, N] is added to the scores; for `lengths` see `AttentionFn`.
    """
    query = query / math.sqrt(query.shape[-1])
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B, H, N, d]
    scores = product("bhqd,bhkd->bhqk", query, key)
    scores = masked(scores if bias is None else scores + bias, lengths)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    out = product("bhqk,bhkd->bhqd", weights, value).astype(value.dtype)
    return jnp.swapaxes(out, 1, 2)


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> jax.Array:
    """Like `xla`, a few heads at a time: their scores stay in the cache of a CPU.

    The backward pass recomputes them. On a mesh each device would compute the heads of all.
    """
    batch, num_queries, num_heads, width = query.shape
    num_products = batch * num_heads
    fit = max(_CACHE_BYTES // (4 * num_queries * key.shape[1]), 2)
    chunk = max(n for n in range(1, min(fit, num_products) + 1) if num_products % n == 0)

    def chunks(x: jax.Array) -> jax.Array:  # [B * H / chunk, chunk, N, d]
        return jnp.reshape(jnp.swapaxes(x, 1, 2), (-1, chunk, x.shape[1], width))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def heads(_: None, qkv: Any) -> tuple[None, jax.Array]:
        query, key, value, *real = qkv
        scores = product("hqd,hkd->hqk", query, key)
        if real:
            scores = masked(scores[:, None], *real)[:, 0]
        weights = jax.nn.softmax(scores).astype(value.dtype)
        return None, product("hqk,hkd->hqd", weights, value).astype(value.dtype)

    query = query / math.sqrt(width)
    parts = [chunks(query), chunks(key), chunks(value)]
    if lengths is not None:
        parts.append(jnp.reshape(jnp.repeat(lengths, num_heads), (-1, chunk)))
    # Two at a time: the softmax of one overlaps with the products of the other.
    _, out = jax.lax.scan(heads, None, tuple(parts), unroll=2)
    return jnp.swapaxes(jnp.reshape(out, (batch, num_heads, num_queries, width)), 1, 2)


ATTENTIONS = Kinds(
    reference=reference,
    xla=xla,
    chunked=chunked,
    cudnn="vit_jax.models.kernels.attention_cudnn:cudnn",
    pallas="vit_jax.models.kernels.attention_tpu:pallas",
    splash="vit_jax.models.kernels.attention_tpu:splash",
)
NAMES = ("auto", *ATTENTIONS)
BIASED = ("auto", "reference", "xla")  # those that can add a bias to the scores
PLATFORMS = {"cudnn": "gpu", "pallas": "tpu", "splash": "tpu"}  # of those that need one


def check_attention(name: str, platform: str, dtype: str) -> None:
    """Raises UserError if a training on this platform, in this dtype, cannot use it."""
    needed = PLATFORMS.get(name, platform)
    if platform != needed:
        raise UserError(
            f"model.attention={name!r} needs a {needed.upper()}, and this training runs on a "
            f"{platform.upper()}; use 'auto'."
        )
    if name == "cudnn" and dtype == "float32":
        raise UserError(
            "model.attention='cudnn' does not support model.dtype='float32'; set "
            "model.dtype=bfloat16, or model.attention=auto."
        )
    if name == "cudnn" and _deterministic():
        raise UserError(
            "model.attention='cudnn' stops XLA under --xla_gpu_deterministic_ops, which is in "
            "XLA_FLAGS; set model.attention=auto."
        )


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """An `attention_fn` for Flax's `MultiHeadDotProductAttention`.

    Attributes:
      name: one of `NAMES`; with a bias one of `BIASED`.
      train: whether a backward pass follows.
      bias: queries [B, N, H, d] -> [B, H, N, N], which is added to the scores.
      lengths: int32 [B]; the keys of an image after the first so many are padding, which no query
        sees. Outputs of padding are finite.
    """

    name: str
    train: bool
    bias: Callable[[jax.Array], jax.Array] | None = None
    lengths: Any = dataclasses.field(default=None, compare=False)  # linen hashes attributes

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        module: Any = None,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
    ) -> jax.Array:
        dropout_rate = 0.0 if deterministic else dropout_rate
        if dropout_rate or (module is not None and module.is_initializing()):
            name = "reference"
        else:
            name = self._resolve(query.shape, query.dtype)
        options: dict[str, Any] = {}
        if name == "reference":
            options = {"module": module, "dropout_rng": dropout_rng, "dropout_rate": dropout_rate}
        elif key.shape != query.shape:
            name = "xla"  # a single query, as in a MAP head: nothing to gain
        if self.bias is not None:
            options["bias"] = self.bias(query)
        if self.lengths is not None:
            options["lengths"] = self.lengths
        return saved(ATTENTIONS[name](query, key, value, **options), "attention")

    def of_tokens(self, x: jax.Array, params: Any, num_heads: int) -> jax.Array | None:
        """Equations 5 to 7 as the kernel for this device reads queries, keys and values.

        For our TPU kernel they are one product; for cuDNN's each product adds its bias.

        Args:
          x: tokens [B, N, D].
          params: of `query`, `key` and `value`.

        Returns:
          [B, N, H, d]; None where Flax's layers serve as well.
        """
        shape = (*x.shape[:2], num_heads, x.shape[2] // num_heads)
        zeros = jnp.zeros(shape[2:])  # some models have no bias, or not for keys
        names = ("query", "key", "value")
        layers = {name: {"bias": zeros, **params[name]} for name in names}
        name = self._resolve(shape, x.dtype)
        real = {} if self.lengths is None else {"lengths": self.lengths}
        out = None
        if name == "cudnn" and device_has("biases_in_products"):
            out = ATTENTIONS["cudnn"](*(_dense(x, name, **layers[name]) for name in names), **real)
        elif name == "pallas" and not device_has("three_products"):
            from vit_jax.models.kernels.attention_tpu import joint

            kernels, biases = (
                [layers[name][part] for name in names] for part in ("kernel", "bias")
            )
            out = joint(x, kernels, biases, self.lengths)
        return None if out is None else saved(jnp.reshape(out, shape), "attention")

    def _resolve(self, shape: tuple[int, ...], dtype: Any) -> str:
        """The implementation for queries of this shape, [B, N, H, d]."""
        if self.name != "auto":
            return self.name
        if self.bias is not None:
            return "xla"
        alone = self.train and jax.sharding.get_abstract_mesh().size <= 1
        return fastest(*shape[1:], itemsize=jnp.dtype(dtype).itemsize, alone=alone)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Flax's module of equations 5 to 8: [B, N, D] -> [B, N, D], see `AttentionFn.of_tokens`."""

    attention_fn: Any = AttentionFn("auto", train=False)
    kernel_init: Any = nn.initializers.xavier_uniform()
    broadcast_dropout: bool = False
    qkv_dot_general: Any = dot_general
    out_dot_general: Any = dot_general

    def __call__(self, x: jax.Array, *others: jax.Array, **options: Any) -> jax.Array:  # type: ignore[override]
        dropped = self.dropout_rate and not self.deterministic
        if not (others or dropped or self.is_initializing()):
            x, params = jnp.asarray(x, self.dtype), self.variables["params"]
            heads = self.attention_fn.of_tokens(x, params, self.num_heads)  # [B, N, H, d]
            if heads is not None:
                return _dense(heads, "out", **params["out"])
        return super().__call__(x, *others, **options)


def _dense(x: jax.Array, name: str, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """x W + b, both as matrices: [B, N, ...], of as many features as W -> [B, N, *bias.shape]."""
    with jax.named_scope(name):
        x = jnp.reshape(x, (*x.shape[:2], -1))
        kernel = jnp.reshape(kernel, (x.shape[2], -1)).astype(x.dtype)
        out = dot_general(x, kernel, (((2,), (0,)), ((), ())))
        out = out + jnp.reshape(bias, (1, 1, -1)).astype(x.dtype)
        return jnp.reshape(out, (*x.shape[:2], *bias.shape))


def fastest(num_tokens: int, num_heads: int, head_dim: int, *, itemsize: int, alone: bool) -> str:
    """The implementation to use on the device to compile for; the debug log says which and why.

    `alone`: whether training runs on a single device.
    """
    platform, kind = devices.device_of_program()
    name, why = "xla", "it runs everywhere"
    if device_has("pallas"):
        from vit_jax.models.kernels.attention_pallas import fits

        name, why = "splash", "too many tokens for the chip's memory: block by block"
        if fits(num_tokens, num_heads, head_dim, itemsize):
            name, why = "pallas", "scores stay on the chip"
    elif device_has("chunked") and alone:
        name, why = "chunked", "scores stay in the cache; 'reference' has the official bits"
    elif platform == "cpu" and itemsize == 4:
        name, why = "reference", "bit for bit as the official code"
    elif device_has("cudnn") and itemsize == 2 and _cudnn_takes(head_dim):
        name, why = "cudnn", "scores stay on the chip"
    logging.debug("Attention on %s, %d tokens: %s (%s).", kind, num_tokens, name, why)
    return name


def _cudnn_takes(head_dim: int) -> bool:
    """Whether cuDNN attends with heads of this width: since Ampere."""
    here = getattr(jax.devices()[0], "compute_capability", "8.0")  # a plan has no GPU
    is_new = int(here.split(".")[0]) >= 8
    return is_new and head_dim in range(8, 129, 8) and not _deterministic()


def _deterministic() -> bool:
    """Whether XLA was told to repeat runs on GPUs bit for bit.

    With cuDNN's attention in several equal layers it then stops (openxla#46500, JAX 0.11.2).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return bool(
        re.search(r"xla_gpu_(deterministic|exclude_nondeterministic)_ops\b(?!=(?i:false|0))", flags)
    )
