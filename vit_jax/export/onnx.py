"""Converts a JAX function to an ONNX file.

The function is traced once, with a symbolic size if the batch is free. Calls are inlined, what
depends only on parameters is computed immediately (weight standardisation becomes a plain kernel),
and every other equation goes through a table of the primitives that our models use. (jax2onnx 0.17
cannot be installed with the orbax-checkpoint that we need; ONNX Runtime rejects its max pooling.)
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from vit_jax.errors import UserError, import_extra

INPUT_NAME = "images"
OPSET = 18  # the first in which all reductions take axes the same way
# Protocol buffers are limited to 2 GiB; above that, constants are in a separate file.
MAX_SINGLE_FILE = 2**31 - 2**24

# A tensor of the graph, by name, or a value known before the graph runs.
Operand = str | np.ndarray


class Graph:
    """Nodes in execution order, and the constants they use.

    Shapes are JAX's; a size that is not an int is the free batch.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []  # onnx.NodeProto
        self.constants: dict[str, np.ndarray] = {}

    def add(self, op_type: str, *inputs: Operand, output: str = "", **attributes: Any) -> str:
        """Appends a node and returns the name of its output."""
        from onnx.helper import make_node

        output, names = output or f"{op_type}_{len(self.nodes)}", []
        for x in inputs:
            names.append(x if isinstance(x, str) else f"constant_{len(self.constants)}")
            if isinstance(x, np.ndarray):
                self.constants[names[-1]] = x
        self.nodes.append(make_node(op_type, names, [output], name=output, **attributes))
        return output

    def transpose(self, x: Operand, order: Sequence[int]) -> Operand:
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        return x if list(order) == sorted(order) else self.add("Transpose", x, perm=list(order))

    def reshape(self, x: Operand, shape: Sequence[Any]) -> Operand:
        """One size may depend on a free batch; it is inferred at run time."""
        if isinstance(x, np.ndarray):
            return x.reshape(shape)
        return self.add("Reshape", x, integers([s if isinstance(s, int) else -1 for s in shape]))

    def sizes(self, shape: Sequence[Any]) -> Operand:
        """A shape as an operand; a free batch is read from the images at run time."""
        if all(isinstance(size, int) for size in shape):
            return integers(shape)
        batch = self.add("Shape", INPUT_NAME, start=0, end=1)
        parts = [integers([size]) if isinstance(size, int) else batch for size in shape]
        return self.add("Concat", *parts, axis=0)


def integers(values: Sequence[int]) -> np.ndarray:
    """Shapes and axes as ONNX takes them."""
    return np.array(values, np.int64)


def element_type(dtype: Any) -> int:
    from onnx.helper import np_dtype_to_tensor_dtype

    return np_dtype_to_tensor_dtype(np.dtype(dtype))


def write_onnx(
    path: Path,
    function: Callable[[Any, Any], Any],
    params: Mapping[str, np.ndarray],
    images: jax.ShapeDtypeStruct,
    *,
    output_name: str,
) -> None:
    """Writes a valid file of a pure function with one result; UserError: no such primitive."""
    onnx = import_extra("--format=onnx", "onnx", "export")
    helper = onnx.helper
    closed, result = jax.make_jaxpr(function, return_shape=True)(dict(params), images)
    graph = Graph()
    # Dicts are flattened in sorted order of their keys.
    arguments: list[Operand] = [np.asarray(params[name]) for name in sorted(params)]
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
        ir_version=helper.find_min_ir_version_for(opsets),  # older runtimes read it too
        producer_name="vit_jax",
    )
    for name, value in graph.constants.items():  # last: the helpers above copy their inputs
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    is_large = sum(value.nbytes for value in graph.constants.values()) > MAX_SINGLE_FILE
    onnx.save_model(model, path, save_as_external_data=is_large, location=f"{path.name}.data")
    del model  # the checker makes copies of its own
    onnx.checker.check_model(str(path), full_check=True)


def _inline(
    graph: Graph, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Operand]
) -> list[Operand]:
    """Adds the equations of a jaxpr; returns its results."""
    known: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {v: np.asarray(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Operand:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)
        return known[atom]

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        is_known = all(isinstance(x, np.ndarray) for x in inputs)
        is_sized = all(isinstance(size, int) for size in eqn.outvars[0].aval.shape)
        if name in CALLS:  # a jaxpr, closed or without constants
            called = eqn.params[CALLS[name]]
            inner = getattr(called, "jaxpr", called)
            results = _inline(graph, inner, getattr(called, "consts", ()), inputs)
        elif is_known and is_sized and not eqn.primitive.multiple_results:
            results = [np.asarray(eqn.primitive.bind(*inputs, **eqn.params))]
        elif name in DIRECT:
            results = [graph.add(DIRECT[name], *inputs)]
        elif name in EMITTERS:
            results = [EMITTERS[name](graph, eqn, *inputs)]
        else:
            text = f"--format=onnx: no row of vit_jax/export/onnx.py has the JAX primitive {name!r}"
            raise UserError(f"{text}; add one, or use --format=stablehlo.")
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _integer_pow(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """As products: the general power is slow, and undefined for negative bases in some runtimes."""
    product = x
    for _ in range(eqn.params["y"] - 1):
        product = graph.add("Mul", product, x)
    return product


def _broadcast_in_dim(graph: Graph, eqn: Any, x: Operand) -> Operand:
    before, shape = eqn.invars[0].aval.shape, eqn.params["shape"]
    sizes = dict(zip(eqn.params["broadcast_dimensions"], before, strict=True))
    aligned = [sizes.get(axis, 1) for axis in range(len(shape))]
    x = x if aligned == list(before) else graph.reshape(x, aligned)
    if aligned == list(shape):
        return x
    # 1 keeps a size, including a free one.
    grown = [1 if size == old else size for size, old in zip(shape, aligned, strict=True)]
    return graph.add("Expand", x, graph.sizes(grown))


def _slice(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """Slices the given axes, but not the batch, which may be free."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = [axis for axis, size in enumerate(before) if size != after[axis]]
    starts = [eqn.params["start_indices"][axis] for axis in axes]
    ends = [eqn.params["limit_indices"][axis] for axis in axes]
    return graph.add("Slice", x, integers(starts), integers(ends), integers(axes))


def _gather(graph: Graph, eqn: Any, x: Operand, start: Operand) -> Operand:
    """`x[:, 0]` and `x[:, :2]` with a free batch, or rows of a table by index."""
    [axis] = eqn.params["dimension_numbers"].start_index_map
    if not isinstance(start, np.ndarray):
        rows = graph.reshape(start, eqn.invars[1].aval.shape[:-1])
        return graph.add("Gather", x, rows, axis=axis)
    places = integers([start.item() + i for i in range(eqn.params["slice_sizes"][axis])])
    return graph.reshape(graph.add("Gather", x, places, axis=axis), eqn.outvars[0].aval.shape)


def _dot_general(graph: Graph, eqn: Any, *inputs: Operand) -> Operand:
    """[batch..., left, contracted] x [batch..., contracted, right]."""
    factors = []
    for side, x in enumerate(inputs):
        contracted, batch = (list(axes[side]) for axes in eqn.params["dimension_numbers"])
        shape = eqn.invars[side].aval.shape
        free = [axis for axis in range(len(shape)) if axis not in batch + contracted]
        last = (contracted, free) if side else (free, contracted)
        groups = [*([axis] for axis in batch), *last]
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
        group=eqn.params["feature_group_count"],
    )
    return graph.transpose(result, np.argsort(axes.out_spec).tolist())


def _reduce(op_type: str, graph: Graph, eqn: Any, x: Operand) -> Operand:
    return graph.add(op_type, x, integers(eqn.params["axes"]), keepdims=0)


def _reduce_window_sum(graph: Graph, eqn: Any, x: Operand) -> Operand:
    """The mean, padding included, times the size of a window."""
    mean = _pool("AveragePool", graph, eqn, x, count_include_pad=1)
    size = math.prod(eqn.params["window_dimensions"])
    return graph.add("Mul", mean, np.array(size, np.float32))


def _pool(op_type: str, graph: Graph, eqn: Any, x: Operand, **attributes: Any) -> Operand:
    """For images [B, H, W, C]."""
    low, high = zip(*eqn.params["padding"][1:3], strict=True)
    result = graph.add(
        op_type,
        graph.transpose(x, (0, 3, 1, 2)),
        kernel_shape=eqn.params["window_dimensions"][1:3],
        strides=eqn.params["window_strides"][1:3],
        pads=[*low, *high],
        **attributes,
    )
    return graph.transpose(result, (0, 2, 3, 1))


# Primitives that call a function, and the key under which they store it.
CALLS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr", "remat2": "jaxpr"}

# Primitives that are ONNX operators under another name.
DIRECT = {
    name.lower(): name for name in ["Add", "Div", "Exp", "Max", "Mul", "Neg", "Sqrt", "Sub", "Tanh"]
}
DIRECT |= {"gt": "Greater", "logistic": "Sigmoid", "lt": "Less"}

EMITTERS: dict[str, Callable[..., Operand]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda graph, eqn, *x: graph.add("Concat", *x, axis=eqn.params["dimension"]),
    "conv_general_dilated": _conv_general_dilated,
    "convert_element_type": lambda graph, eqn, x: graph.add(
        "Cast", x, to=element_type(eqn.params["new_dtype"])
    ),
    **dict.fromkeys(("copy", "name", "stop_gradient"), lambda _, __, x: x),
    "dot_general": _dot_general,
    "erfc": lambda graph, _, x: graph.add("Sub", np.ones((), np.float32), graph.add("Erf", x)),
    "gather": _gather,
    "integer_pow": _integer_pow,
    "reduce_max": functools.partial(_reduce, "ReduceMax"),
    "reduce_sum": functools.partial(_reduce, "ReduceSum"),
    "reduce_window_max": functools.partial(_pool, "MaxPool"),
    "reduce_window_sum": _reduce_window_sum,
    "reshape": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "rsqrt": lambda graph, _, x: graph.add("Reciprocal", graph.add("Sqrt", x)),
    "select_n": lambda graph, _, where, no, yes: graph.add("Where", where, yes, no),
    "slice": _slice,
    "square": lambda graph, _, x: graph.add("Mul", x, x),
    "squeeze": lambda graph, eqn, x: graph.reshape(x, eqn.outvars[0].aval.shape),
    "tile": lambda graph, eqn, x: graph.add("Tile", x, graph.sizes(eqn.params["reps"])),
    "transpose": lambda graph, eqn, x: graph.transpose(x, eqn.params["permutation"]),
}
