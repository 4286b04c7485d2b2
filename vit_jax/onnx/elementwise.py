"""JAX primitives that work element by element, as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.onnx.graph import Constant, Graph, Operand

Emitter = Callable[[Graph, Any, list[Operand]], Operand]

# ONNX's numbers of element types, as in onnx.TensorProto.
ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9}


def element_type(dtype: Any) -> int:
    """Raises UserError for types that the export does not handle."""
    name = np.dtype(dtype).name
    if name not in ELEMENT_TYPES:
        raise UserError(f"ONNX: values of type {name} are not exported; compute in float32.")
    return ELEMENT_TYPES[name]


def _direct(op_type: str) -> Emitter:
    return lambda graph, eqn, inputs: graph.add(op_type, *inputs)


def _negated(op_type: str) -> Emitter:
    return lambda graph, eqn, inputs: graph.add("Not", graph.add(op_type, *inputs))


def _same(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    return inputs[0]


def _square(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    return graph.add("Mul", inputs[0], inputs[0])


def _rsqrt(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    return graph.add("Reciprocal", graph.add("Sqrt", inputs[0]))


def _erfc(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    one = Constant(np.ones((), eqn.invars[0].aval.dtype))
    return graph.add("Sub", one, graph.add("Erf", inputs[0]))


def _integer_pow(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    """By products: the general power is slow, and undefined for negative bases in some runtimes."""
    exponent = eqn.params["y"]
    if not exponent:
        raise UserError("ONNX: a power of 0 is not exported.")
    result: Operand = inputs[0]
    for bit in bin(abs(exponent))[3:]:  # from the second highest on
        result = graph.add("Mul", result, result)
        if bit == "1":
            result = graph.add("Mul", result, inputs[0])
    return graph.add("Reciprocal", result) if exponent < 0 else result


def _max(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    for this, other in (inputs, inputs[::-1]):
        if isinstance(this, Constant) and np.all(this.value == -np.inf):
            return other  # what jax.nn.softmax guards empty rows with
    return graph.add("Max", *inputs)


def _select_n(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    if len(inputs) != 3 or eqn.invars[0].aval.dtype != np.bool_:
        raise UserError("ONNX: select_n is exported for a condition and two cases only.")
    condition, if_false, if_true = inputs
    return graph.add("Where", condition, if_true, if_false)


def _convert_element_type(graph: Graph, eqn: Any, inputs: list[Operand]) -> Operand:
    if eqn.invars[0].aval.dtype == eqn.params["new_dtype"]:
        return inputs[0]
    return graph.add("Cast", inputs[0], to=element_type(eqn.params["new_dtype"]))


EMITTERS: dict[str, Emitter] = {
    "abs": _direct("Abs"),
    "add": _direct("Add"),
    "convert_element_type": _convert_element_type,
    "copy": _same,
    "div": _direct("Div"),
    "eq": _direct("Equal"),
    "erf": _direct("Erf"),
    "erfc": _erfc,
    "exp": _direct("Exp"),
    "ge": _direct("GreaterOrEqual"),
    "gt": _direct("Greater"),
    "integer_pow": _integer_pow,
    "le": _direct("LessOrEqual"),
    "log": _direct("Log"),
    "logistic": _direct("Sigmoid"),
    "lt": _direct("Less"),
    "max": _max,
    "min": _direct("Min"),
    "mul": _direct("Mul"),
    "ne": _negated("Equal"),
    "neg": _direct("Neg"),
    "pow": _direct("Pow"),
    "rsqrt": _rsqrt,
    "select_n": _select_n,
    "sqrt": _direct("Sqrt"),
    "square": _square,
    "stop_gradient": _same,
    "sub": _direct("Sub"),
    "tanh": _direct("Tanh"),
}
