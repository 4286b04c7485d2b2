"""From a JAX function to an ONNX file.

The function is traced once, with a symbolic size where the batch is free. Calls are inlined, what
depends on parameters only is computed at once (weight standardisation becomes a plain kernel), and
every other equation goes through a table of the primitives that our models use. Emitters read the
parameters of an equation that these models vary; whoever writes a file compares it with the model.

This is ours because jax2onnx 0.17 cannot be installed beside the orbax-checkpoint that we need, and
writes max pooling that ONNX Runtime refuses; PyTorch has no twin for BiT, nor for pre_logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from vit_jax.errors import UserError, import_extra
from vit_jax.export.onnx_graph import INPUT_NAME, Constant, Graph, Operand, element_type, integers

OPSET = 18  # the first in which all reductions take their axes in one way
# Protocol buffers end at 2 GiB; beyond, constants stand in a file of their own.
MAX_SINGLE_FILE = 2**31 - 2**24


def write_onnx(
    path: Path,
    function: Callable[[Any, Any], Any],
    params: Mapping[str, np.ndarray],
    images: jax.ShapeDtypeStruct,
    *,
    output_name: str,
    metadata: Mapping[str, str],
) -> None:
    """Writes `function(params, images)` and checks the file's form.

    Args:
      path: of the file; constants of a large model go into `PATH.data` beside it.
      function: pure, with one array as result.
      params: flat names to arrays; the graph's constants carry these names.
      images: shape and type of the input; its first size may be symbolic.
      output_name: of the result in the file.
      metadata: texts to go with the model.

    Raises:
      UserError: the package onnx is missing, or a primitive of the model is not in the table.
    """
    onnx = import_extra("--format=onnx", "onnx", "export")
    helper = onnx.helper
    closed, result = jax.make_jaxpr(function, return_shape=True)(dict(params), images)
    graph = Graph()
    # Dicts are flattened in the order of their sorted keys.
    arguments: list[Operand] = [Constant(np.asarray(params[name]), name) for name in sorted(params)]
    [output] = _inline(graph, closed.jaxpr, closed.consts, [*arguments, INPUT_NAME])
    graph.add("Identity", output, output=output_name)

    def info(name: str, spec: jax.ShapeDtypeStruct) -> Any:
        shape = [size if isinstance(size, int) else "batch" for size in spec.shape]
        return helper.make_tensor_value_info(name, element_type(spec.dtype), shape)

    opsets = [helper.make_opsetid("", OPSET)]
    ends = [info(INPUT_NAME, images)], [info(output_name, result)]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "vit_jax", *ends),
        opset_imports=opsets,
        # The oldest, so that older runtimes read it too.
        ir_version=helper.find_min_ir_version_for(opsets),
        producer_name="vit_jax",
    )
    helper.set_model_props(model, dict(metadata))
    for name, value in graph.constants.items():  # last: the helpers above copy what they are given
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    is_large = sum(value.nbytes for value in graph.constants.values()) > MAX_SINGLE_FILE
    data_file = path.name + ".data"
    onnx.save_model(model, path, save_as_external_data=is_large, location=data_file)
    del model  # the checker makes copies of its own
    onnx.checker.check_model(str(path), full_check=True)


def _inline(
    graph: Graph, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Operand]
) -> list[Operand]:
    """Adds the equations of a jaxpr; returns its results."""
    known: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {v: Constant(np.asarray(x)) for v, x in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Operand:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return Constant(np.asarray(atom.val, aval.dtype))
        return known[atom]

    for eqn in jaxpr.eqns:
        results = _convert(graph, eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _convert(graph: Graph, eqn: Any, inputs: Sequence[Operand]) -> list[Operand]:
    """The results of one equation."""
    name = eqn.primitive.name
    if name in CALLS:  # a jaxpr, closed or without constants
        called = eqn.params[CALLS[name]]
        return _inline(
            graph, getattr(called, "jaxpr", called), getattr(called, "consts", ()), inputs
        )
    constants = [x for x in inputs if isinstance(x, Constant)]
    is_sized = all(isinstance(size, int) for size in eqn.outvars[0].aval.shape)
    if len(constants) == len(inputs) and is_sized and not eqn.primitive.multiple_results:
        value = eqn.primitive.bind(*(constant.value for constant in constants), **eqn.params)
        names = {constant.name for constant in constants} - {""}
        # What comes from one parameter keeps its name.
        return [Constant(np.asarray(value), names.pop() if len(names) == 1 else "")]
    if name in DIRECT:
        return [graph.add(DIRECT[name], *inputs)]
    if name in EMITTERS:
        return [EMITTERS[name](graph, eqn, *inputs)]
    raise UserError(
        f"--format=onnx: the model uses the JAX primitive {name!r}, for which there is no "
        "conversion; export to stablehlo, or add it to vit_jax/export/onnx.py."
    )


def _integer_pow(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """By products: the general power is slow, and undefined for negative bases in some runtimes."""
    product = x
    for _ in range(eqn.params["y"] - 1):
        product = graph.add("Mul", product, x)
    return product


def _convert_element_type(graph: Graph, eqn: Any, x: Operand) -> Operand:
    if eqn.invars[0].aval.dtype == eqn.params["new_dtype"]:
        return x
    return graph.add("Cast", x, to=element_type(eqn.params["new_dtype"]))


def _broadcast_in_dim(graph: Graph, eqn: Any, x: Operand) -> Operand:
    given, shape = eqn.invars[0].aval.shape, eqn.params["shape"]
    sizes = dict(zip(eqn.params["broadcast_dimensions"], given, strict=True))
    aligned = [sizes.get(axis, 1) for axis in range(len(shape))]
    if aligned != list(given):
        x = graph.reshape(x, aligned)
    if aligned == list(shape):
        return x
    # 1 leaves a size as it is, also a free one.
    grown = [1 if size == old else size for size, old in zip(shape, aligned, strict=True)]
    return graph.add("Expand", x, graph.sizes(grown))


def _slice(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """`x[:, 0]` where the batch is fixed."""
    return _cut(graph, eqn, x, eqn.params["start_indices"], eqn.outvars[0].aval.shape)


def _gather(graph: Graph, eqn: Any, x: Operand, index: Operand) -> Operand:
    """`x[:, 0]` where the batch is free: one constant index, for the axes that are mapped."""
    assert isinstance(index, Constant)
    starts = np.zeros(len(eqn.invars[0].aval.shape), int)
    starts[list(eqn.params["dimension_numbers"].start_index_map)] = index.value
    x = _cut(graph, eqn, x, starts.tolist(), eqn.params["slice_sizes"])
    return graph.reshape(x, eqn.outvars[0].aval.shape)


def _cut(graph: Graph, eqn: Any, x: Operand, starts: Any, sizes: Any) -> Operand:
    axes = [axis for axis, size in enumerate(eqn.invars[0].aval.shape) if size != sizes[axis]]
    begin, end = [starts[axis] for axis in axes], [starts[axis] + sizes[axis] for axis in axes]
    return graph.add("Slice", x, integers(begin), integers(end), integers(axes))


def _reduce(op_type: str, graph: Graph, eqn: Any, x: Operand) -> Operand:
    return graph.add(op_type, x, integers(eqn.params["axes"]), keepdims=0)


def _dot_general(graph: Graph, eqn: Any, *inputs: Operand) -> Operand:
    """[batch..., left, contracted] x [batch..., contracted, right]."""
    factors = []
    for side, x in enumerate(inputs):
        contracted, batch = (list(axes[side]) for axes in eqn.params["dimension_numbers"])
        shape = eqn.invars[side].aval.shape
        free = [axis for axis in range(len(shape)) if axis not in batch + contracted]
        # Where nothing is a batch, the left factor may keep its axes: the right one is a matrix.
        groups = [*([axis] for axis in batch), free, contracted]
        if side:
            groups = [*([axis] for axis in batch), contracted, free]
        elif not batch and free:
            groups = [*([axis] for axis in free), contracted]
        order = [axis for group in groups for axis in group]
        x = graph.transpose(x, order)
        sizes = [math.prod(shape[axis] for axis in group) for group in groups]
        factors.append(x if sizes == [shape[axis] for axis in order] else graph.reshape(x, sizes))
    return graph.reshape(graph.add("MatMul", *factors), eqn.outvars[0].aval.shape)


def _conv_general_dilated(graph: Graph, eqn: Any, x: Operand, kernel: Operand) -> Operand:
    axes = eqn.params["dimension_numbers"]
    low, high = zip(*eqn.params["padding"], strict=True)
    result = graph.add(
        "Conv",
        graph.transpose(x, axes.lhs_spec),  # [B, C, H, W]
        graph.transpose(kernel, axes.rhs_spec),  # [Cout, Cin, kh, kw]
        strides=eqn.params["window_strides"],
        pads=[*low, *high],
    )
    return graph.transpose(result, np.argsort(axes.out_spec).tolist())


def _reduce_window_max(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """Of images [B, H, W, C]."""
    low, high = zip(*eqn.params["padding"][1:3], strict=True)
    result = graph.add(
        "MaxPool",
        graph.transpose(x, (0, 3, 1, 2)),
        kernel_shape=eqn.params["window_dimensions"][1:3],
        strides=eqn.params["window_strides"][1:3],
        pads=[*low, *high],
    )
    return graph.transpose(result, (0, 2, 3, 1))


ONE = Constant(np.ones((), np.float32))

# Primitives that call a function, and the key under which they hold it.
CALLS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr", "remat2": "jaxpr"}

# Primitives that are operators of ONNX by another name.
DIRECT = {
    "add": "Add",
    "div": "Div",
    "exp": "Exp",
    "gt": "Greater",
    "logistic": "Sigmoid",
    "max": "Max",
    "mul": "Mul",
    "neg": "Neg",
    "sqrt": "Sqrt",
    "sub": "Sub",
    "tanh": "Tanh",
}

EMITTERS: dict[str, Callable[..., Operand]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda graph, eqn, *x: graph.add("Concat", *x, axis=eqn.params["dimension"]),
    "conv_general_dilated": _conv_general_dilated,
    "convert_element_type": _convert_element_type,
    "copy": lambda _, __, x: x,
    "dot_general": _dot_general,
    "erfc": lambda graph, _, x: graph.add("Sub", ONE, graph.add("Erf", x)),
    "gather": _gather,
    "integer_pow": _integer_pow,
    "name": lambda _, __, x: x,
    "reduce_max": functools.partial(_reduce, "ReduceMax"),
    "reduce_sum": functools.partial(_reduce, "ReduceSum"),
    "reduce_window_max": _reduce_window_max,
    "reshape": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "rsqrt": lambda graph, _, x: graph.add("Reciprocal", graph.add("Sqrt", x)),
    "select_n": lambda graph, _, where, no, yes: graph.add("Where", where, yes, no),
    "slice": _slice,
    "square": lambda graph, _, x: graph.add("Mul", x, x),
    "squeeze": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "stop_gradient": lambda _, __, x: x,
    "tile": lambda graph, eqn, x: graph.add("Tile", x, graph.sizes(eqn.params["reps"])),
    "transpose": lambda graph, eqn, x: graph.transpose(x, eqn.params["permutation"]),
}
