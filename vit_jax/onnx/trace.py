"""From a JAX function to an ONNX graph.

The function is traced once, with a symbolic size where the batch is free. Calls are followed into
what they call; equations that depend on parameters only are computed at once (weight
standardisation becomes a plain kernel); each of the others goes through the table of emitters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from vit_jax.errors import UserError
from vit_jax.onnx import elementwise, products, shapes
from vit_jax.onnx.elementwise import Emitter
from vit_jax.onnx.graph import Constant, Graph, Operand, is_free

EMITTERS: dict[str, Emitter] = elementwise.EMITTERS | shapes.EMITTERS | products.EMITTERS

# Primitives that call a function, and the key under which they hold it.
CALLS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr", "remat2": "jaxpr"}


def build_graph(
    function: Callable[[Any, Any], Any],
    params: Mapping[str, np.ndarray],
    images: jax.ShapeDtypeStruct,
    *,
    input_name: str,
) -> tuple[Graph, Operand, jax.ShapeDtypeStruct]:
    """Converts `function(params, images)`.

    Args:
      function: pure, with one array as result.
      params: flat names to arrays; the graph's constants carry these names.
      images: shape and type of the input; its first size may be symbolic
        (`jax.export.symbolic_shape`).
      input_name: of the input in the graph.

    Returns:
      The graph, the operand that holds the result, and the result's shape and type.

    Raises:
      UserError: a primitive that has no ONNX form here, named.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(dict(params), images)
    graph = Graph(input_name, images.shape[0])
    # Dicts are flattened in the order of their sorted keys.
    arguments: list[Operand] = [Constant(np.asarray(params[name]), name) for name in sorted(params)]
    [output] = _inline(graph, closed, [*arguments, input_name])
    return graph, output, result


def _inline(graph: Graph, closed: Any, arguments: list[Operand]) -> list[Operand]:
    """Adds the equations of a jaxpr to the graph; returns its results."""
    jaxpr, consts = closed.jaxpr, closed.consts
    known: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {
        variable: Constant(np.asarray(value))
        for variable, value in zip(jaxpr.constvars, consts, strict=True)
    }

    def read(atom: Any) -> Operand:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return Constant(np.asarray(atom.val, aval.dtype))
        return known[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        results = _convert(graph, eqn, inputs)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _convert(graph: Graph, eqn: Any, inputs: list[Operand]) -> list[Operand]:
    """The results of one equation."""
    name = eqn.primitive.name
    if name in CALLS:
        called = eqn.params[CALLS[name]]
        if not isinstance(called, core.ClosedJaxpr):
            called = core.ClosedJaxpr(called, ())
        return _inline(graph, called, inputs)
    if _is_constant(eqn, inputs):
        return _fold(eqn, inputs)  # type: ignore[arg-type]
    if name not in EMITTERS:
        raise UserError(
            f"ONNX: the model uses the JAX primitive {name!r}, for which there is no conversion; "
            "export to stablehlo, or add it to vit_jax/onnx."
        )
    return [EMITTERS[name](graph, eqn, inputs)]


def _is_constant(eqn: Any, inputs: list[Operand]) -> bool:
    sizes = [size for variable in eqn.outvars for size in variable.aval.shape]
    sizes += [eqn.params["dim"]] if eqn.primitive.name == "dim_as_value" else []
    return all(isinstance(operand, Constant) for operand in inputs) and not any(map(is_free, sizes))


def _fold(eqn: Any, inputs: list[Constant]) -> list[Operand]:
    """Computes an equation now. What comes from one parameter keeps its name."""
    names = {operand.name for operand in inputs if operand.name}
    name = names.pop() if len(names) == 1 else ""
    results = eqn.primitive.bind(*(operand.value for operand in inputs), **eqn.params)
    return [
        Constant(np.asarray(value), name)
        for value in (results if eqn.primitive.multiple_results else [results])
    ]
