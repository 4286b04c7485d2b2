"""Attention as one TPU kernel, for sequences whose rows of keys fit into VMEM as a whole.

XLA writes the scores [B, H, N, N] to memory and reads them back, several times per layer; here they
never leave the chip, and the backward pass recomputes them from queries and keys. A program of
the kernel handles all heads of one image. The arrays stay [B, N, H * d], as the dense layers
leave them, and all products are arranged such that no [N, N] array has to be transposed:

- Scores are [keys, queries], so that the softmax reduces over sublanes, which is cheap.
- Arrays are transposed per group of heads where a head has to be rows: [d, N].
- Everything else is computed as [d, N], too, and transposed per group before it is stored.

Heads do not depend on one another, but the compiler hardly moves the products of one across the
softmax of another. So each is written in two steps, and the first steps of the following heads
precede the second one of a head: `_Heads.for_each`.

Rows are padded to whole tiles. The contents of the padding are undefined (NaN in Pallas'
interpreter, so that tests notice every leak).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as saved
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_SUBLANES = 16  # of a tile of bfloat16
# What VMEM holds at a time (every TPU has at least 16 MiB): scores in float32, of all heads in
# flight, and two blocks of each array.
_MAX_SCORES = 2**20
_MAX_BLOCK_BYTES = 8 * 2**20
_ARRAYS = 14  # two blocks of each of seven, in the backward pass
_MAX_TILE = 384  # queries: a matrix unit of v6e takes 256 at a time; v5e is about as fast with 128
_MAX_UNROLLED = 32  # tiles of heads that the compiler sees at once, in time and memory


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Heads of one image in blocks [rows, width], whose first `num_tokens` rows are valid."""

    num_tokens: int
    head_dim: int
    width: int

    @property
    def rows(self) -> int:
        return -(-self.num_tokens // LANES) * LANES

    @property
    def keys(self) -> int:
        """Rows of keys that scores are computed for."""
        return -(-self.num_tokens // _SUBLANES) * _SUBLANES

    @property
    def tiles(self) -> list[slice]:
        """Queries, in parts such that the scores of four fit."""
        sizes = (n for n in range(_MAX_TILE, LANES, -LANES) if 4 * n * self.keys <= _MAX_SCORES)
        size = next(sizes, LANES)
        return [slice(i, min(i + size, self.rows)) for i in range(0, self.rows, size)]

    @property
    def group(self) -> int:
        """The fewest lanes that are both whole heads and whole vectors; else all."""
        lanes = math.lcm(self.head_dim, LANES)
        return lanes if self.width % lanes == 0 else self.width

    @property
    def lanes(self) -> list[tuple[slice, slice]]:
        """Of each head in a group: its lanes, and those of the vectors that it lies in."""
        own = [slice(i, i + self.head_dim) for i in range(0, self.group, self.head_dim)]
        ends = [min(-(-lanes.stop // LANES) * LANES, self.group) for lanes in own]
        starts = [lanes.start // LANES * LANES for lanes in own]
        return list(zip(own, map(slice, starts, ends), strict=True))

    def width_of_program(self, itemsize: int) -> int:
        """Lanes of a program: the most whole heads whose blocks fit into VMEM."""
        counts = range(1, self.width // self.group + 1)
        widths = [self.width // n for n in counts if self.width % (n * self.group) == 0]
        most = _MAX_BLOCK_BYTES // (self.rows * _ARRAYS * itemsize)
        return next((width for width in widths if width <= most), self.group)

    def for_each(self, work: Callable[[Any], Iterator[Callable[[], None]]], arrays: int) -> None:
        """Calls `work(lanes)` per group, which yields the second step of each tile of a head.

        A second step runs when the first ones of the following tiles have: as many as VMEM has room
        for, with this number of arrays of scores.
        """
        ahead = _MAX_SCORES // (arrays * self.keys * self.tiles[0].stop) - 1
        groups = self.width // self.group
        most = max(_MAX_UNROLLED // (len(self.lanes) * len(self.tiles)), 1)
        unrolled = max(n for n in range(1, most + 1) if groups % n == 0)

        def turn(i: Any, carry: None) -> None:
            starts = [(i * unrolled + j) * self.group for j in range(unrolled)]
            lanes = [pl.ds(pl.multiple_of(start, self.group), self.group) for start in starts]
            waiting: collections.deque[Callable[[], None]] = collections.deque()
            for second in itertools.chain.from_iterable(map(work, lanes)):
                waiting.append(second)
                if len(waiting) > ahead:
                    waiting.popleft()()
            for second in waiting:
                second()
            return carry

        jax.lax.fori_loop(0, groups // unrolled, turn, None)

    def load(self, ref: Any, lanes: Any) -> jax.Array:
        """Some lanes; zeros where there is no token."""
        return _replaced(ref[:, lanes], self.num_tokens, 0)

    def exp_scores(self, scores: jax.Array, length: Any) -> tuple[jax.Array, jax.Array]:
        """exp(scores - maximum) [keys, queries], and 1 / its sum over the keys [1, queries].

        `length`: of the keys that are seen, a number that the chip reads; None: all tokens.
        """
        if length is None:
            scores = _replaced(scores, self.num_tokens, -jnp.inf)
        else:
            index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            scores = jnp.where(index < length, scores, -jnp.inf)
        exp = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
        return exp, 1.0 / jnp.sum(exp, axis=0, keepdims=True)


def _replaced(x: jax.Array, first: int, value: float) -> jax.Array:
    """x with another value from row `first` on."""
    if first == len(x):
        return x
    whole = first // _SUBLANES * _SUBLANES
    rows = whole + jax.lax.broadcasted_iota(jnp.int32, (len(x) - whole, 1), 0)
    rest = jnp.where(rows < first, x[whole:], jnp.full_like(x[whole:], value))
    return jnp.concatenate([x[:whole], rest]) if whole else rest


def _with_zeros(x: jax.Array, before: int, after: int) -> jax.Array:
    """x with rows of zeros before and after."""
    parts = [jnp.zeros((n, x.shape[1]), x.dtype) for n in (before, after)]
    return jnp.concatenate([part for part in (parts[0], x, parts[1]) if len(part)], axis=0)


def _product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """A matrix product in float32, over axis `contract_a` of `a` and `contract_b` of `b`."""
    dimensions = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _product_of_head(x: jax.Array, y: jax.Array, own: slice, vectors: slice) -> jax.Array:
    """x y [keys, queries] over the lanes of a head: [keys, lanes], [lanes, queries].

    The matrix unit multiplies whole vectors: zeros take no longer.
    """
    y = _with_zeros(y[own], own.start - vectors.start, vectors.stop - own.stop)
    return _product(x[:, vectors], y, 1, 0)


def _store(ref: Any, lanes: Any, heads: Sequence[jax.Array], sum_ref: Any = None) -> None:
    """Stores a group, of whose heads each is [d, rows], and its sum over the rows."""
    block = jnp.concatenate([head.astype(ref.dtype) for head in heads]).T
    ref[:, lanes] = block
    if sum_ref is not None:
        sum_ref[:, lanes] = jnp.sum(block.astype(jnp.float32), axis=0, keepdims=True)


def _thirds(ref: Any, width: int) -> list[Any]:
    """Queries, keys and values, or their gradients, of a joint block."""
    return [ref.at[:, pl.ds(i * width, width)] for i in range(3)]


def _length(lengths_ref: Any) -> Any:
    """Of the image of this program; None if all tokens of all images are real."""
    return None if lengths_ref is None else lengths_ref[pl.program_id(0)]


def _attention_forward(heads: _Heads, joint: bool, lengths_ref: Any, *refs: Any) -> None:
    """Of queries, keys, values (if `joint`, of one block of all three) and the output."""
    *qkv_refs, o_ref = refs
    length = _length(lengths_ref)
    q_ref, k_ref, v_ref = _thirds(qkv_refs[0], heads.width) if joint else qkv_refs

    def work(lanes: Any) -> Iterator[Callable[[], None]]:
        keys = k_ref[: heads.keys, lanes]
        queries, values = q_ref[:, lanes].T, heads.load(v_ref, lanes).T
        outs: list[list[jax.Array]] = [[] for _ in heads.lanes]

        def second(head: int, scores: jax.Array) -> None:
            own, _ = heads.lanes[head]
            exp, scale = heads.exp_scores(scores, length)
            exp = _with_zeros(exp.astype(values.dtype), 0, heads.rows - heads.keys)
            out = _product(values[own], exp, 1, 0) * scale
            outs[head].append(out.astype(values.dtype))

        for head, (own, vectors) in enumerate(heads.lanes):
            for tile in heads.tiles:
                scores = _product_of_head(keys, queries[:, tile], own, vectors)
                yield functools.partial(second, head, scores)
        yield lambda: _store(o_ref, lanes, [jnp.concatenate(out, axis=1) for out in outs])

    heads.for_each(work, arrays=1)


def _attention_backward(heads: _Heads, joint: bool, lengths_ref: Any, *refs: Any) -> None:
    """Of queries, keys, values, the output's gradient and theirs.

    If `joint`, of one block of all three, the output's gradient, that of the block and its sum over
    rows.
    """
    if joint:
        qkv_ref, do_ref, *d_refs = refs
        q_ref, k_ref, v_ref = _thirds(qkv_ref, heads.width)
        d_refs, sum_refs = (_thirds(ref, heads.width) for ref in d_refs)
    else:
        q_ref, k_ref, v_ref, do_ref, *d_refs = refs
        sum_refs = []
    length = _length(lengths_ref)

    def work(lanes: Any) -> Iterator[Callable[[], None]]:
        q, k, v, do = (heads.load(ref, lanes) for ref in (q_ref, k_ref, v_ref, do_ref))
        queries, keys, d_outs = q.T, k.T, do.T
        k, v = k[: heads.keys], v[: heads.keys]
        dqs: list[list[jax.Array]] = [[] for _ in heads.lanes]
        dks: list[Any] = [0.0] * len(dqs)
        dvs: list[Any] = [0.0] * len(dqs)

        def second(head: int, tile: slice, scores: jax.Array, d_weights: jax.Array) -> None:
            own, _ = heads.lanes[head]
            exp, scale = heads.exp_scores(scores, length)
            weights = exp * scale  # [keys, queries]
            delta = jnp.sum(weights * d_weights, axis=0, keepdims=True)
            d_scores = weights * (d_weights - delta)
            d_scores, weights = (
                _with_zeros(x.astype(k.dtype), 0, heads.rows - heads.keys)
                for x in (d_scores, weights)
            )
            dqs[head].append(_product(keys[own], d_scores, 1, 0).astype(k.dtype))
            dks[head] += _product(queries[own, tile], d_scores, 1, 1)
            dvs[head] += _product(d_outs[own, tile], weights, 1, 1)

        for head, (own, vectors) in enumerate(heads.lanes):
            for tile in heads.tiles:
                scores = _product_of_head(k, queries[:, tile], own, vectors)
                d_weights = _product_of_head(v, d_outs[:, tile], own, vectors)
                yield functools.partial(second, head, tile, scores, d_weights)

        def store() -> None:
            gradients = ([jnp.concatenate(dq, axis=1) for dq in dqs], dks, dvs)
            for i, ref in enumerate(d_refs):
                _store(ref, lanes, gradients[i], *sum_refs[i : i + 1])

        yield store

    heads.for_each(work, arrays=2)


def fits(num_tokens: int, num_heads: int, head_dim: int, itemsize: int) -> bool:
    """Whether the backward pass fits into VMEM: up to 2,048 tokens for d = 64."""
    heads = _Heads(num_tokens, head_dim, num_heads * head_dim)
    block_bytes = heads.rows * heads.group * _ARRAYS * itemsize
    # At least two: with more than 16 tiles a single head does not fit, either.
    num_tiles = max(len(heads.lanes), 2) * len(heads.tiles)
    return block_bytes <= _MAX_BLOCK_BYTES and num_tiles <= _MAX_UNROLLED


def num_groups(num_tokens: int, num_heads: int, head_dim: int, itemsize: int) -> int:
    """How many programs share the heads of an image."""
    heads = _Heads(num_tokens, head_dim, num_heads * head_dim)
    return heads.width // heads.width_of_program(itemsize)


def _call(
    kernel: Callable[..., None],
    x: Any,
    arrays: Sequence[Any],
    outputs: Sequence[Any],
    head_dim: int,
    interpret: bool,
    lengths: jax.Array | None,
    *,
    joint: bool = False,
) -> Any:
    """Arrays and outputs are as wide as x [B, N, H * d], or three times as wide."""
    batch_size, num_tokens, total = x.shape
    heads = _Heads(num_tokens, head_dim, total)
    width = heads.width_of_program(x.dtype.itemsize)

    def block(array: Any) -> pl.BlockSpec:
        _, length, lanes = array.shape
        shape = (None, heads.rows if length == num_tokens else length, lanes * width // total)
        return pl.BlockSpec(shape, lambda i, j: (i, 0, j))

    num_products = 2 if kernel is _attention_forward else 4
    cost = pl.CostEstimate(  # of the mathematics, without padding
        flops=2 * num_products * x.size * num_tokens,
        transcendentals=x.size * num_tokens // head_dim,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arrays, *outputs)),
    )
    scalars = [] if lengths is None else [lengths]
    call = functools.partial(kernel, dataclasses.replace(heads, width=width), joint)
    return pl.pallas_call(
        call if scalars else functools.partial(call, None),
        grid=(batch_size, total // width),
        in_specs=[
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars),
            *(block(array) for array in arrays),
        ],
        out_specs=[block(output) for output in outputs],
        out_shape=[jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs],
        name=kernel.__name__.strip("_"),
        cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(*scalars, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(
    head_dim: int,
    interpret: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T) v of all heads: three times [B, N, H * d] -> [B, N, H * d].

    Args:
      head_dim: d.
      interpret: run in Pallas' interpreter, on any platform.
      query: divided by sqrt(d).
      key, value: of the same shape.
      lengths: int32 [B], how many keys of each image are seen; None: all.
    """
    arrays = query, key, value
    [out] = _call(_attention_forward, query, arrays, [query], head_dim, interpret, lengths)
    return out


def _backward(head_dim: int, interpret: bool, residuals: Any, d_out: jax.Array) -> Any:
    *qkv, lengths = residuals
    arrays = *qkv, d_out
    d_qkv = _call(_attention_backward, d_out, arrays, qkv, head_dim, interpret, lengths)
    return *d_qkv, None


attention.defvjp(lambda *arguments: (attention(*arguments), arguments[2:]), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def joint_attention(
    head_dim: int,
    interpret: bool,
    qkv: jax.Array,
    bias: jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """`attention` of qkv + bias, [B, N, 3 * H * d] and [B, 1, 3 * H * d] -> [B, N, H * d].

    The columns are those of queries, keys and values of the first of `num_groups` groups of heads,
    then of the next. The bias is float32. Its gradient, one per image, is summed by the kernel:
    XLA would read that of qkv once more.
    """
    return _joint_forward(head_dim, interpret, qkv, bias, lengths)[0]


def _joint_forward(
    head_dim: int, interpret: bool, qkv: jax.Array, bias: jax.Array, lengths: jax.Array | None
) -> Any:
    # As the kernel reads it: otherwise remat would add the bias and write it again.
    qkv = saved(qkv + bias.astype(qkv.dtype), "dense")
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], qkv.shape[2] // 3), qkv.dtype)
    options = head_dim, interpret, lengths
    [out] = _call(_attention_forward, out, [qkv], [out], *options, joint=True)
    return out, (qkv, lengths)


def _joint_backward(head_dim: int, interpret: bool, residuals: Any, d_out: jax.Array) -> Any:
    qkv, lengths = residuals
    sums = jax.ShapeDtypeStruct((len(qkv), 1, qkv.shape[2]), jnp.float32)
    arrays, outputs = [qkv, d_out], [qkv, sums]
    options = head_dim, interpret, lengths
    return *_call(_attention_backward, d_out, arrays, outputs, *options, joint=True), None


joint_attention.defvjp(_joint_forward, _joint_backward)
