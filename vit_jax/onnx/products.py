"""Matrix products, convolutions and pooling windows as ONNX nodes.

ONNX multiplies the last two axes and wants channels first; transposes that this asks for are
merged where two meet, and done once for constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.onnx.elementwise import Emitter
from vit_jax.onnx.graph import Constant, Graph, Operand


def _matrices(
    graph: Graph,
    operand: Operand,
    shape: Any,
    groups: Sequence[Sequence[int]],
    flat: Sequence[bool],
) -> Operand:
    """Brings the axes into the order of the groups, and makes one axis of a group where `flat`."""
    order = [axis for group in groups for axis in group]
    operand = graph.transpose(operand, order)
    sizes: list[Any] = []
    for group, flatten in zip(groups, flat, strict=True):
        group_sizes = [shape[axis] for axis in group]
        sizes += [math.prod(group_sizes)] if flatten else group_sizes
    if sizes == [shape[axis] for axis in order]:
        return operand
    return graph.reshape(operand, sizes)


def _moves(operand: Operand, order: list[int]) -> bool:
    return not isinstance(operand, Constant) and order != sorted(order)


def _dot_general(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    """[batch, left, contracted] x [batch, contracted, right] -> [batch, left..., right...]."""
    if any(variable.aval.dtype != np.float32 for variable in (*eqn.invars, *eqn.outvars)):
        raise UserError("ONNX: matrix products are exported in float32 only.")
    contracting, batching = eqn.params["dimension_numbers"]
    shapes = [variable.aval.shape for variable in eqn.invars]
    batch, contracted = [list(axes) for axes in batching], [list(axes) for axes in contracting]
    free = [
        [axis for axis in range(len(shapes[side])) if axis not in batch[side] + contracted[side]]
        for side in (0, 1)
    ]

    def cost(left: int, right: int) -> int:
        return _moves(inputs[left], batch[left] + free[left] + contracted[left]) + _moves(
            inputs[right], batch[right] + contracted[right] + free[right]
        )

    # The order of the factors is free: the one that moves less of what is computed at run time.
    left, right = (0, 1) if cost(0, 1) <= cost(1, 0) else (1, 0)
    # The left factor keeps its free axes where the right one is a plain matrix.
    plain = not batch[left] and len(free[left]) > 0
    a = _matrices(
        *(graph, inputs[left], shapes[left]),
        (batch[left], free[left], contracted[left]),
        (False, not plain, True),
    )
    b = _matrices(
        *(graph, inputs[right], shapes[right]),
        (batch[right], contracted[right], free[right]),
        (False, True, True),
    )
    result: Operand = graph.add("MatMul", a, b)
    sizes = [[shapes[side][axis] for axis in free[side]] for side in (left, right)]
    shape = [shapes[left][axis] for axis in batch[left]] + sizes[0] + sizes[1]
    if len(sizes[1]) != 1 or (len(sizes[0]) != 1 and not plain):
        result = graph.reshape(result, shape)
    if (left, right) == (1, 0):
        num_batch, num_left = len(batch[left]), len(free[left])
        axes = list(range(len(shape)))
        moved = axes[num_batch + num_left :] + axes[num_batch : num_batch + num_left]
        result = graph.transpose(result, axes[:num_batch] + moved)
    return result


def _inverse(permutation: Sequence[int]) -> list[int]:
    return [int(axis) for axis in np.argsort(permutation)]


def _refuse(eqn: Any, *keys: str) -> None:
    """These parameters have to be 1 everywhere."""
    for key in keys:
        if not np.all(np.array(eqn.params[key]) == 1):
            raise UserError(
                f"ONNX: {eqn.primitive.name} with {key}={eqn.params[key]} is not exported."
            )


def _pads(padding: Any) -> list[int]:
    low, high = zip(*padding, strict=True)
    return [int(size) for size in (*low, *high)]


def _conv_general_dilated(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    _refuse(eqn, "lhs_dilation", "batch_group_count")
    axes = eqn.params["dimension_numbers"]
    result = graph.add(
        "Conv",
        graph.transpose(inputs[0], axes.lhs_spec),  # [B, C, H, W]
        graph.transpose(inputs[1], axes.rhs_spec),  # [Cout, Cin, kh, kw]
        strides=[int(stride) for stride in eqn.params["window_strides"]],
        pads=_pads(eqn.params["padding"]),
        dilations=[int(step) for step in eqn.params["rhs_dilation"]],
        group=int(eqn.params["feature_group_count"]),
    )
    return graph.transpose(result, _inverse(axes.out_spec))


def _reduce_window_max(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    _refuse(eqn, "base_dilation", "window_dilation")
    window, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    padding = eqn.params["padding"]
    still = [
        axis
        for axis, size in enumerate(window)
        if (size, strides[axis], *padding[axis]) == (1, 1, 0, 0)
    ]
    if len(still) < 2:
        raise UserError(f"ONNX: a pooling window of {window} is not exported.")
    order = still[:2] + [axis for axis in range(len(window)) if axis not in still[:2]]
    result = graph.add(
        "MaxPool",
        graph.transpose(inputs[0], order),
        kernel_shape=[int(window[axis]) for axis in order[2:]],
        strides=[int(strides[axis]) for axis in order[2:]],
        pads=_pads([padding[axis] for axis in order[2:]]),
    )
    return graph.transpose(result, _inverse(order))


EMITTERS: dict[str, Emitter] = {
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "reduce_window_max": _reduce_window_max,
}
