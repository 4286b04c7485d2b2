"""JAX primitives that move, cut, join or sum up elements, as ONNX nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.onnx.elementwise import Emitter, element_type
from vit_jax.onnx.graph import Constant, Graph, Operand, integers, is_free


def _reshape(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    # Also squeeze, whose result is a reshape likewise.
    return graph.reshape(inputs[0], eqn.outvars[0].aval.shape)


def _transpose(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    return graph.transpose(inputs[0], eqn.params["permutation"])


def _broadcast_in_dim(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    given = dict(zip(axes, eqn.invars[0].aval.shape, strict=True))
    aligned = [given.get(axis, 1) for axis in range(len(shape))]
    result = inputs[0]
    if aligned != list(eqn.invars[0].aval.shape):
        result = graph.reshape(result, aligned)
    if aligned == list(shape):
        return result
    return graph.add("Expand", result, graph.shape_operand(shape))


def _tile(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    repeats = eqn.params["reps"]
    return graph.add("Tile", inputs[0], graph.shape_operand(repeats))


def _concatenate(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    return graph.add("Concat", *inputs, axis=eqn.params["dimension"])


def _cut(graph: Graph, operand: Operand, cuts: dict[int, tuple[int, int, int]]) -> Operand:
    """Slices {axis: (start, limit, stride)}."""
    if not cuts:
        return operand
    starts, limits, strides = zip(*cuts.values(), strict=True)
    return graph.add(
        "Slice",
        operand,
        integers(starts),
        integers(limits),
        integers(list(cuts)),
        integers(strides),
    )


def _slice(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    shape = eqn.invars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(shape)
    cuts = {}
    for axis, bounds in enumerate(
        zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    ):
        if bounds == (0, shape[axis], 1):
            continue
        if any(map(is_free, bounds)):
            raise UserError(f"ONNX: a slice {bounds} of the batch cannot be expressed.")
        cuts[axis] = bounds
    return _cut(graph, inputs[0], cuts)


def _dim_as_value(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    """The free batch as a number; indices are compared with it even where they are constants."""
    size = graph.add("Squeeze", graph.shape_operand([eqn.params["dim"]]))
    return graph.add("Cast", size, to=element_type(eqn.outvars[0].aval.dtype))


def _constant_index(eqn: Any, start: Operand) -> np.ndarray:
    if not isinstance(start, Constant):
        raise UserError(
            f"ONNX: {eqn.primitive.name} with indices that depend on the images is not exported."
        )
    return start.value


def _dynamic_slice(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    """`x[:, :2]` where the batch is free: the starts are constants all the same."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    cuts = {}
    for axis, operand in enumerate(inputs[1:]):
        if sizes[axis] != shape[axis]:  # else the start can only be 0
            start = int(_constant_index(eqn, operand))
            start = min(max(start, 0), shape[axis] - sizes[axis])  # as JAX does
            cuts[axis] = (start, start + sizes[axis], 1)
    return _cut(graph, inputs[0], cuts)


def _gather(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    """`x[:, 0]` where the batch is free; other gathers are not exported."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    numbers = eqn.params["dimension_numbers"]
    rank = len(eqn.outvars[0].aval.shape)
    index = _constant_index(eqn, inputs[1])
    starts = dict(zip(numbers.start_index_map, index.ravel().tolist(), strict=False))
    is_slice = index.ndim == 1 and tuple(numbers.offset_dims) == tuple(range(rank))
    if not is_slice or any(
        not 0 <= start <= shape[axis] - sizes[axis] for axis, start in starts.items()
    ):
        raise UserError("ONNX: a gather that is no slice is not exported.")
    cuts = {axis: (start, start + sizes[axis], 1) for axis, start in starts.items()}
    return graph.reshape(_cut(graph, inputs[0], cuts), eqn.outvars[0].aval.shape)


def _pad(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    low, high, interior = zip(*eqn.params["padding_config"], strict=True)
    if any(interior):
        raise UserError("ONNX: padding between elements is not exported.")
    return graph.add("Pad", inputs[0], integers(low + high), inputs[1])


def _reduction(op_type: str) -> Emitter:
    def emit(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
        return graph.add(op_type, inputs[0], integers(eqn.params["axes"]), keepdims=0)

    return emit


EMITTERS: dict[str, Emitter] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dim_as_value": _dim_as_value,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "reduce_max": _reduction("ReduceMax"),
    "reduce_min": _reduction("ReduceMin"),
    "reduce_sum": _reduction("ReduceSum"),
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _reshape,
    "tile": _tile,
    "transpose": _transpose,
}
