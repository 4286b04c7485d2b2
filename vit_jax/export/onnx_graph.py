"""An ONNX graph under construction.

Shapes are those of JAX; a size that is no int is the free batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

INPUT_NAME = "images"


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value known before the graph runs.

    Attributes:
      value: the array.
      name: of the parameter that it was made from, or "" if it was made from none or several.
    """

    value: np.ndarray
    name: str = ""


Operand = str | Constant  # a tensor of the graph, by name, or a constant


class Graph:
    """Nodes in the order in which they run, and the constants that they use."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []  # onnx.NodeProto
        self.constants: dict[str, np.ndarray] = {}

    def add(self, op_type: str, *inputs: Operand, output: str = "", **attributes: Any) -> str:
        """Appends a node and returns the name of its output."""
        output = output or f"{op_type}_{len(self.nodes)}"
        names = [self._name(operand) for operand in inputs]
        from onnx.helper import make_node

        self.nodes.append(make_node(op_type, names, [output], name=output, **attributes))
        return output

    def _name(self, operand: Operand) -> str:
        """The tensor's name; a constant becomes part of the graph."""
        if isinstance(operand, str):
            return operand
        name = operand.name or f"constant_{len(self.constants)}"
        if self.constants.get(name, operand.value) is not operand.value:
            name = f"{name}.{len(self.constants)}"
        self.constants[name] = operand.value
        return name

    def transpose(self, operand: Operand, order: Sequence[int]) -> Operand:
        if isinstance(operand, Constant):
            return Constant(np.transpose(operand.value, order), operand.name)
        if list(order) == sorted(order):
            return operand
        return self.add("Transpose", operand, perm=list(order))

    def reshape(self, operand: Operand, shape: Sequence[Any]) -> Operand:
        """One size may depend on a free batch; it is left open."""
        if isinstance(operand, Constant):
            return Constant(np.reshape(operand.value, shape), operand.name)
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        return self.add("Reshape", operand, integers(sizes))

    def sizes(self, shape: Sequence[Any]) -> Operand:
        """A shape as an operand; a free batch is read from the images when the graph runs."""
        if all(isinstance(size, int) for size in shape):
            return integers(shape)
        batch = self.add("Shape", INPUT_NAME, start=0, end=1)
        parts = [integers([size]) if isinstance(size, int) else batch for size in shape]
        return self.add("Concat", *parts, axis=0)


def integers(values: Sequence[int]) -> Constant:
    """Shapes and axes as ONNX takes them."""
    return Constant(np.array(values, np.int64))


def element_type(dtype: Any) -> int:
    from onnx.helper import np_dtype_to_tensor_dtype

    return np_dtype_to_tensor_dtype(np.dtype(dtype))
