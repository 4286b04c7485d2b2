"""An ONNX graph under construction: nodes, constants, and names for both.

What a node takes and gives is an operand: the name of a tensor that is computed when the graph
runs, or a `Constant`. Shapes are those of JAX; a size that is no int stands for the free batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError

Shape = Sequence[Any]  # of ints and symbolic sizes


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value known before the graph runs.

    Attributes:
      value: the array.
      name: of the parameter that it was made from, or "" if it was made from none or several.
    """

    value: np.ndarray
    name: str = ""

    def transposed(self, permutation: Sequence[int]) -> Constant:
        return Constant(np.transpose(self.value, permutation), self.name)

    def reshaped(self, shape: Sequence[int]) -> Constant:
        return Constant(np.reshape(self.value, shape), self.name)


Operand = str | Constant


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator of the standard set; all that we use have one output."""

    op_type: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]


def is_free(size: Any) -> bool:
    return not isinstance(size, int)


class Graph:
    """Nodes in the order in which they run, from the tensor `input_name` to what is asked for."""

    def __init__(self, input_name: str, batch: Any) -> None:
        """`batch` is the first size of the input, which a free batch is read from."""
        self.input_name = input_name
        self._batch = batch
        self._nodes: dict[str, Node] = {}  # by the tensor that they compute
        self._constants: dict[str, np.ndarray] = {}
        self._names: dict[Any, str] = {}  # of constants that are in the graph
        self._kept: list[Constant] = []  # so that an id in _names stays theirs
        self._shapes: dict[Any, str] = {}  # operands made by shape_operand

    def add(self, op_type: str, *inputs: Operand, **attributes: Any) -> str:
        """Appends a node and returns the name of its output."""
        output = f"{op_type}_{len(self._nodes)}"
        names = tuple(self._name(operand) for operand in inputs)
        self._nodes[output] = Node(op_type, names, output, attributes)
        return output

    def _name(self, operand: Operand) -> str:
        """The tensor's name; a constant becomes part of the graph, scalars once per value."""
        if isinstance(operand, str):
            return operand
        value = operand.value
        if value.size <= 16:
            key: Any = (operand.name, value.dtype, value.shape, value.tobytes())
        else:
            key = id(operand)
            self._kept.append(operand)
        if key not in self._names:
            base = operand.name or f"constant_{len(self._constants)}"
            name, number = base, 1
            while name in self._constants:
                name, number = f"{base}.{number}", number + 1
            self._names[key] = name
            self._constants[name] = value
        return self._names[key]

    def transpose(self, operand: Operand, permutation: Sequence[int]) -> Operand:
        """Transposed; two in a row become one, and none where nothing moves."""
        permutation = tuple(permutation)
        if isinstance(operand, Constant):
            return operand.transposed(permutation)
        producer = self._nodes.get(operand)
        if producer is not None and producer.op_type == "Transpose":
            operand = producer.inputs[0]
            permutation = tuple(producer.attributes["perm"][axis] for axis in permutation)
        if permutation == tuple(range(len(permutation))):
            return operand
        return self.add("Transpose", operand, perm=list(permutation))

    def reshape(self, operand: Operand, shape: Shape) -> Operand:
        """Reshaped; at most one size may depend on the batch, and it is left open."""
        if isinstance(operand, Constant):
            return operand.reshaped(shape)
        sizes = [-1 if is_free(size) else size for size in shape]
        if sizes.count(-1) > 1:
            raise UserError(f"ONNX: a reshape to {tuple(shape)} has two sizes that are not known.")
        return self.add("Reshape", operand, integers(sizes))

    def shape_operand(self, shape: Shape) -> Operand:
        """A shape as an operand; a free batch is that of the input when the graph runs."""
        if not any(is_free(size) for size in shape):
            return integers(shape)
        for size in shape:
            if is_free(size) and size != self._batch:
                raise UserError(f"ONNX: a size of {size} cannot be expressed; fix the batch size.")
        key = tuple("batch" if is_free(size) else size for size in shape)
        if key not in self._shapes:
            if "batch" not in self._shapes:
                self._shapes["batch"] = self.add("Shape", self.input_name, start=0, end=1)
            parts: list[Operand] = [
                self._shapes["batch"] if is_free(size) else integers([size]) for size in shape
            ]
            self._shapes[key] = self.add("Concat", *parts, axis=0)
        return self._shapes[key]

    def finish(self, output: Operand, name: str) -> tuple[list[Node], dict[str, np.ndarray]]:
        """The nodes and constants that `output`, to be called `name`, is computed from."""
        last = Node("Identity", (self._name(output),), name, {})
        nodes, seen = [last], {last.output}
        stack = list(last.inputs)
        while stack:
            tensor = stack.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in self._nodes:
                nodes.append(self._nodes[tensor])
                stack += self._nodes[tensor].inputs
        order = {tensor: position for position, tensor in enumerate(self._nodes)}
        nodes.sort(key=lambda node: order.get(node.output, len(order)))
        return nodes, {key: value for key, value in self._constants.items() if key in seen}


def integers(values: Sequence[int]) -> Constant:
    """Shapes and axes as ONNX takes them."""
    return Constant(np.array(values, np.int64))
