"""Graphs as `.onnx` files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.onnx.elementwise import element_type
from vit_jax.onnx.graph import Graph, Node, Operand, is_free

MIN_OPSET = 18  # the first in which all reductions take their axes in one way
# Protocol buffers end at 2 GiB; beyond, constants stand in a file of their own.
MAX_SINGLE_FILE = 2**31 - 2**24
_SMALLEST_OUTSIDE = 1024  # bytes; shapes and scalars stay where checkers and runtimes expect them
_PAGE = 4096  # what lets a runtime map a constant instead of reading it


def import_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise UserError(
            'ONNX files need the package onnx: pip install "vit_jax[export]".'
        ) from error
    return onnx


def check_opset(opset: int) -> None:
    onnx = import_onnx()
    newest = onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= opset <= newest:
        raise UserError(
            f"opset={opset} must be from {MIN_OPSET} to {newest} (of this onnx package)."
        )


def write_onnx(
    path: Path,
    graph: Graph,
    result: Operand,
    *,
    images: jax.ShapeDtypeStruct,
    output: jax.ShapeDtypeStruct,
    output_name: str,
    opset: int,
    metadata: Mapping[str, str],
    max_single_file: int = MAX_SINGLE_FILE,
) -> list[Path]:
    """Writes and checks `path`.

    Args:
      path: of the file; constants of a large model go into `PATH.data` beside it.
      graph, result, images, output: see `build_graph`.
      output_name: of the result in the file.
      opset: version of the operator set.
      metadata: texts to go with the model.
      max_single_file: bytes of constants that one file may hold.

    Returns:
      The files.

    Raises:
      UserError: the package onnx is missing.
    """
    onnx = import_onnx()
    nodes, constants = graph.finish(result, output_name)
    total = sum(value.nbytes for value in constants.values())
    data_path = path.with_name(path.name + ".data") if total > max_single_file else None
    model = _model(
        nodes,
        _tensors(constants, data_path),
        inputs={graph.input_name: images},
        outputs={output_name: output},
        opset=opset,
        metadata=metadata,
    )
    path.write_bytes(model.SerializeToString())
    del model  # the checker makes copies of its own
    onnx.checker.check_model(str(path), full_check=True)
    return [path, data_path] if data_path else [path]


def _model(
    nodes: Sequence[Node],
    tensors: Sequence[Any],
    *,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    opset: int,
    metadata: Mapping[str, str],
) -> Any:
    """The onnx.ModelProto."""
    helper = import_onnx().helper

    def infos(specs: Mapping[str, jax.ShapeDtypeStruct]) -> list[Any]:
        return [
            helper.make_tensor_value_info(
                name,
                element_type(spec.dtype),
                ["batch" if is_free(size) else size for size in spec.shape],
            )
            for name, spec in specs.items()
        ]

    made = [
        helper.make_node(
            node.op_type, list(node.inputs), [node.output], name=node.output, **node.attributes
        )
        for node in nodes
    ]
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(
        helper.make_graph(made, "vit_jax", infos(inputs), infos(outputs), tensors),
        opset_imports=opsets,
        ir_version=helper.find_min_ir_version_for(opsets),  # so that older runtimes read it too
        producer_name="vit_jax",
    )
    helper.set_model_props(model, dict(metadata))
    return model


def _tensors(constants: Mapping[str, np.ndarray], data_path: Path | None) -> list[Any]:
    """The onnx.TensorProtos, with their values in `data_path` if there is one."""
    onnx = import_onnx()
    tensors = []
    with open(data_path, "wb") if data_path else contextlib.nullcontext() as data:
        for name, value in constants.items():
            tensor = onnx.TensorProto(
                name=name, dims=value.shape, data_type=element_type(value.dtype)
            )
            if data is not None and value.nbytes >= _SMALLEST_OUTSIDE:
                data.seek(-(-data.tell() // _PAGE) * _PAGE)
                place = {
                    "location": Path(data.name).name,
                    "offset": data.tell(),
                    "length": value.nbytes,
                }
                tensor.data_location = onnx.TensorProto.EXTERNAL
                tensor.external_data.extend(
                    onnx.StringStringEntryProto(key=key, value=str(text))
                    for key, text in place.items()
                )
                data.write(_bytes(value))
            else:
                tensor.raw_data = _bytes(value)
            tensors.append(tensor)
    return tensors


def _bytes(value: np.ndarray) -> bytes:
    return np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
