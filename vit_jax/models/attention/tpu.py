"""Attention as one TPU kernel, for sequences whose rows of keys fit into VMEM as a whole.

XLA writes the scores [B, H, N, N] to memory and reads them back, several times per layer; here they
never leave the chip, and the backward pass recomputes them from queries and keys. A program of
the kernel handles all heads of one image. The arrays stay [B, N, H * d], as the matrix products
leave them, and a head is a mask over lanes: a product over 64 lanes takes the matrix unit as long
as one over 128. Scores are stored transposed, [keys, queries]: the softmax then reduces over
sublanes, which is cheap, and no [N, N] array has to be transposed.

Rows are padded to whole tiles. The contents of the padding are undefined (NaN in Pallas'
interpreter, so that tests notice every leak).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_SUBLANES = 16  # of a tile of bfloat16
# What VMEM holds at a time (every TPU has at least 16 MiB): scores, about five copies of them in
# float32, and two blocks of each array.
_MAX_SCORES = 384 * 384
_MAX_BLOCK_BYTES = 8 * 2**20
_ARRAYS = 14  # two blocks of each of seven, in the backward pass


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Heads of one image in blocks [rows, width], whose first `num_tokens` rows are valid."""

    num_tokens: int
    head_dim: int
    width: int

    @property
    def rows(self) -> int:
        return _padded(self.num_tokens)

    @property
    def keys(self) -> int:
        """Rows of keys that scores are computed for."""
        return -(-self.num_tokens // _SUBLANES) * _SUBLANES

    @property
    def tile(self) -> int:
        """Queries per iteration."""
        parts = range(1, self.rows // _LANES + 1)
        tiles = [self.rows // n for n in parts if self.rows % (n * _LANES) == 0]
        return next((t for t in tiles if self.rows * t <= _MAX_SCORES), _LANES)

    @property
    def group(self) -> int:
        """The fewest lanes that are both whole heads and whole vectors."""
        return _lanes_of_whole_heads(self.head_dim, self.width)

    @property
    def spans(self) -> list[tuple[int, int, slice]]:
        """Per head of a group: the first and last lane of its vectors, and its lanes in these."""
        found = []
        for first in range(0, self.group, self.head_dim):
            last = first + self.head_dim
            low, high = first // _LANES * _LANES, min(-(-last // _LANES) * _LANES, self.group)
            found.append((low, high, slice(first - low, last - low)))
        return found

    def for_each(self, body: Callable[[Any, slice], None]) -> None:
        """Calls `body(lanes, own)` per head."""

        def turn(i: jax.Array, carry: None) -> None:
            start = pl.multiple_of(i * self.group, self.group)
            for low, high, own in self.spans:
                body(pl.ds(start + low, high - low), own)
            return carry

        jax.lax.fori_loop(0, self.width // self.group, turn, None)

    def load(self, ref: Any, rows: Any, lanes: Any) -> jax.Array:
        """Rows of some lanes; zeros where there is no token."""
        x = ref[rows, lanes]
        row = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) + rows.start
        return _masked(x, row < self.num_tokens)

    def exp_scores(self, keys: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """exp(scores - maximum) float32 [keys, queries], and its sum over the keys [1, queries]."""
        scores = _product(keys, queries, 1, 1)
        key = jax.lax.broadcasted_iota(jnp.int32, (scores.shape[0], 1), 0)
        scores = jnp.where(key < self.num_tokens, scores, -jnp.inf)
        exp = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
        return exp, jnp.sum(exp, axis=0, keepdims=True)


def _masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, x, jnp.zeros_like(x))


def _product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """A matrix product in float32, over axis `contract_a` of `a` and `contract_b` of `b`."""
    dimensions = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _is_own(own: slice, num_lanes: int) -> jax.Array:
    """Mask [1, lanes] of a head's lanes."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, num_lanes), 1)
    return (lane >= own.start) & (lane < own.stop)


def _weighted_rows(x: jax.Array, weights: jax.Array, own: slice) -> jax.Array:
    """x^T weights, transposed: [rows, lanes], [keys, queries] -> float32 [queries, lanes].

    Only a head's own lanes are multiplied if they are whole tiles. Rows without keys count as 0.
    """
    num_lanes = x.shape[1]
    x = x.T
    whole = own.start % _SUBLANES == 0 and own.stop % _SUBLANES == 0
    x = x[own] if whole else x
    out = _product(x, _with_zeros(weights, 0, x.shape[1] - len(weights)), 1, 0)
    if whole:
        out = _with_zeros(out, own.start, num_lanes - own.stop)
    return out.T


def _with_zeros(x: jax.Array, before: int, after: int) -> jax.Array:
    """x with rows of zeros before and after."""
    parts = [jnp.zeros((n, x.shape[1]), x.dtype) for n in (before, after)]
    return jnp.concatenate([each for each in (parts[0], x, parts[1]) if len(each)], axis=0)


def _store(ref: Any, rows: Any, lanes: Any, own: slice, value: jax.Array) -> None:
    kept = ref[rows, lanes]
    ref[rows, lanes] = jnp.where(_is_own(own, lanes.size), value.astype(ref.dtype), kept)


def _tile_rows(heads: _Heads, i: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(i * heads.tile, heads.tile), heads.tile)


def _attention_forward(heads: _Heads, q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any) -> None:
    def head(lanes: Any, own: slice) -> None:
        keys = heads.load(k_ref, pl.ds(0, heads.keys), lanes)
        values = heads.load(v_ref, pl.ds(0, heads.rows), lanes)

        def tile(i: jax.Array, carry: None) -> None:
            rows = _tile_rows(heads, i)
            queries = _masked(heads.load(q_ref, rows, lanes), _is_own(own, lanes.size))
            exp, total = heads.exp_scores(keys, queries)
            weights = (exp * (1.0 / total)).astype(values.dtype)
            _store(o_ref, rows, lanes, own, _weighted_rows(values, weights, own))
            return carry

        jax.lax.fori_loop(0, heads.rows // heads.tile, tile, None)

    heads.for_each(head)


def _attention_backward(
    heads: _Heads,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    some = pl.ds(0, heads.keys)

    def head(lanes: Any, own: slice) -> None:
        keys = heads.load(k_ref, pl.ds(0, heads.rows), lanes)
        values = heads.load(v_ref, some, lanes)

        def tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rows = _tile_rows(heads, i)
            queries = _masked(heads.load(q_ref, rows, lanes), _is_own(own, lanes.size))
            d_out = _masked(heads.load(do_ref, rows, lanes), _is_own(own, lanes.size))
            exp, total = heads.exp_scores(keys[: heads.keys], queries)
            weights = exp * (1.0 / total)  # [keys, queries]
            d_weights = _product(values, d_out, 1, 1)
            change = weights * d_weights
            d_scores = change - weights * jnp.sum(change, axis=0, keepdims=True)
            d_scores = d_scores.astype(keys.dtype)
            _store(dq_ref, rows, lanes, own, _weighted_rows(keys, d_scores, own))
            dk = _product(d_scores, queries, 1, 0)
            dv = _product(weights.astype(d_out.dtype), d_out, 1, 0)
            return carry[0] + dk, carry[1] + dv

        zeros = jnp.zeros((heads.keys, lanes.size), jnp.float32)
        dk, dv = jax.lax.fori_loop(0, heads.rows // heads.tile, tile, (zeros, zeros))
        _store(dk_ref, some, lanes, own, dk)
        _store(dv_ref, some, lanes, own, dv)

    heads.for_each(head)


def _lanes_of_whole_heads(head_dim: int, width: int) -> int:
    """The fewest lanes that are both whole heads and whole vectors; else all."""
    lanes = math.lcm(head_dim, _LANES)
    return lanes if width % lanes == 0 else width


def _block_width(rows: int, head_dim: int, width: int, bytes_per_lane: int) -> int:
    """Lanes of a program: the most whole heads whose blocks fit into VMEM."""
    least = _lanes_of_whole_heads(head_dim, width)
    widths = [width // n for n in range(1, width // least + 1) if width % (n * least) == 0]
    return next((w for w in widths if w * rows * bytes_per_lane <= _MAX_BLOCK_BYTES), least)


def fits(num_tokens: int, num_heads: int, head_dim: int, itemsize: int) -> bool:
    """Whether the backward pass fits into VMEM: up to about 1,100 tokens for d = 64."""
    lanes = _lanes_of_whole_heads(head_dim, num_heads * head_dim)
    return _padded(num_tokens) * lanes * _ARRAYS * itemsize <= _MAX_BLOCK_BYTES


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // _LANES) * _LANES


def _cost(x: jax.Array, head_dim: int, num_arrays: int) -> pl.CostEstimate:
    """Of the products of equations 5 to 8 and of their gradients, without padding."""
    batch_size, num_tokens, width = x.shape
    num_products = 2 if num_arrays == 4 else 4
    return pl.CostEstimate(
        flops=2 * num_products * batch_size * num_tokens**2 * width,
        transcendentals=batch_size * num_tokens**2 * width // head_dim,
        bytes_accessed=num_arrays * x.nbytes,
    )


def _call(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    num_outputs: int,
    head_dim: int,
    interpret: bool,
) -> Any:
    batch_size, num_tokens, total = arrays[0].shape
    rows = _padded(num_tokens)
    width = _block_width(rows, head_dim, total, _ARRAYS * arrays[0].dtype.itemsize)
    image = pl.BlockSpec((None, rows, width), lambda i, j: (i, 0, j))
    return pl.pallas_call(
        functools.partial(kernel, _Heads(num_tokens, head_dim, width)),
        grid=(batch_size, total // width),
        in_specs=[image] * len(arrays),
        out_specs=[image] * num_outputs,
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * num_outputs,
        name=kernel.__name__.strip("_"),
        cost_estimate=_cost(arrays[0], head_dim, len(arrays) + num_outputs),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, head_dim: int, interpret: bool = False
) -> jax.Array:
    """softmax(q k^T) v of all heads: three times [B, N, H * d] -> [B, N, H * d].

    Args:
      query: divided by sqrt(d).
      key, value: of the same shape.
      head_dim: d.
      interpret: run in Pallas' interpreter, on any platform.
    """
    call = functools.partial(_call, head_dim=head_dim, interpret=interpret)
    [out] = call(_attention_forward, query, key, value, num_outputs=1)
    return out


def _forward(query: Any, key: Any, value: Any, head_dim: int, interpret: bool) -> Any:
    return attention(query, key, value, head_dim, interpret), (query, key, value)


def _backward(head_dim: int, interpret: bool, saved: Any, d_out: jax.Array) -> Any:
    call = functools.partial(_call, head_dim=head_dim, interpret=interpret)
    return tuple(call(_attention_backward, *saved, d_out, num_outputs=3))


attention.defvjp(_forward, _backward)
