"""From JAX to ONNX: every kind of model in ONNX Runtime."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import export

from tests import golden
from tests.kinds import shape_of, small
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.export import onnx as converter
from vit_jax.export.onnx import CALLS, DIRECT, EMITTERS, write_onnx
from vit_jax.models import create
from vit_jax.models.create import create_model
from vit_jax.trees import unflatten_names

MODELS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "token": ({}, (16, 16)),
    "fixed positions": ({"classifier": "gap", "position_embedding": "sincos2d"}, (16, 16)),
    "map, pre-logits": ({"classifier": "map", "representation_size": 12}, (16, 16)),
    "rectangles": ({"patch_size": (8, 4), "gelu": "exact", "num_classes": 0}, (16, 24)),
    "logits per token": ({"classifier": "token_unpooled"}, (16, 16)),
    "logits per pixel": ({"classifier": "token_dense", "head_norm": True}, (16, 24)),
    # Odd sizes: padding differs between the sides.
    "hybrid": ({"resnet_layers": (1, 2), "patch_size": 1}, (33, 48)),
    "bit": ({"name": "bit", "resnet_layers": (1, 1), "max_pool_padding": "zero"}, (33, 48)),
    "regnet": (
        {"name": "regnet", "stage_layers": (1, 2), "stage_widths": (16, 24), "group_width": 8},
        (33, 48),
    ),
}
# Sums of float32 in another order; a wrong operation shows in the first digits.
TOLERANCE = 1e-5


def write(path: Path, function: Callable[..., Any], params: dict[str, Any], spec: Any) -> Any:
    """Converts and writes; returns what ONNX Runtime computes."""
    write_onnx(path, function, params, spec, output_name="result")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["result"], {"images": images})[0]


def free(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*export.symbolic_shape("b"), *shape), dtype)


def function_of(module: Any, shape: tuple[int, ...]) -> tuple[Any, dict[str, np.ndarray]]:
    """(Function of flat parameters and inputs, parameters)."""
    params = weights.seeded(module, shape)
    return lambda p, x: module.apply({"params": unflatten_names(p)}, x, train=False), params


@functools.cache
def model_of(case: str) -> tuple[Any, dict[str, np.ndarray]]:
    sizes, image = MODELS[case]
    if "name" not in sizes:
        sizes = {**weights.SMALL, "num_layers": 1, **sizes}
    return function_of(create_model(**{"num_classes": 5, **sizes}), (*image, 3))


@pytest.mark.parametrize("case", MODELS)
def test_every_kind_of_model(case: str, tmp_path: Path) -> None:
    (function, params), (_, image) = model_of(case), MODELS[case]
    images = golden.images(3, *image)
    expected = np.asarray(jax.jit(function)(params, images))
    assert np.std(expected) > 0.1
    tolerance = {"atol": TOLERANCE * np.std(expected), "rtol": 0}
    run = write(tmp_path / "free.onnx", function, params, free(*image, 3))
    np.testing.assert_allclose(run(images), expected, **tolerance)
    np.testing.assert_allclose(run(images[2:]), expected[2:], **tolerance)
    fixed = jax.ShapeDtypeStruct(images.shape, jnp.float32)
    run = write(tmp_path / "fixed.onnx", function, params, fixed)
    np.testing.assert_allclose(run(images), expected, **tolerance)
    for name, size in (("fixed", 3), ("free", "batch")):
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        for end in (graph.input[0], graph.output[0]):
            [dim, *_] = end.type.tensor_type.shape.dim
            assert size in (dim.dim_value, dim.dim_param)


def test_large_constants_stand_in_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "MAX_SINGLE_FILE", 10_000)
    function, params = model_of("token")
    run = write(tmp_path / "m.onnx", function, params, free(16, 16, 3))
    images = golden.images(2, 16, 16)
    expected = np.asarray(jax.jit(function)(params, images))
    np.testing.assert_allclose(run(images), expected, atol=TOLERANCE * np.std(expected), rtol=0)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    num_bytes = sum(array.nbytes for array in params.values())
    assert sizes["m.onnx.data"] > num_bytes / 2 > sizes["m.onnx"] / 2


def test_the_table_has_what_our_models_use_and_no_more() -> None:
    seen: set[str] = set()

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            seen.add(eqn.primitive.name)
            if eqn.primitive.name in CALLS:
                called = eqn.params[CALLS[eqn.primitive.name]]
                visit(getattr(called, "jaxpr", called))

    cases = [(model_of(case), (*image, 3)) for case, (_, image) in MODELS.items()]
    for (function, params), shape in cases[:1]:  # all are written so above
        fixed = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        visit(jax.make_jaxpr(function)(params, fixed).jaxpr)
    for kind in create.MODELS:
        module = create_model(**small(kind), num_classes=5)
        cases.append((function_of(module, shape_of(kind)), shape_of(kind)))
    for (function, params), shape in cases:
        dtype = jnp.int32 if len(shape) == 1 else jnp.float32
        visit(jax.make_jaxpr(function)(params, free(*shape, dtype=dtype)).jaxpr)
    for output in (jax.nn.softmax, jax.nn.sigmoid):  # of logits
        for spec in (free(5), jax.ShapeDtypeStruct((2, 5), jnp.float32)):
            visit(jax.make_jaxpr(output)(spec).jaxpr)
    assert seen == {*CALLS, *DIRECT, *EMITTERS}


def test_what_has_no_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="primitive 'sort'.*stablehlo"):
        write(tmp_path / "x.onnx", lambda _, x: jnp.sort(x), {}, free(4))
