"""From JAX to ONNX: every primitive by itself, and every kind of model, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import export, lax

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.resnet import weight_standardize
from vit_jax.onnx.trace import CALLS, EMITTERS, build_graph
from vit_jax.onnx.write import check_opset, write_onnx
from vit_jax.parameters.names import flatten_names, unflatten_names

TINY: dict[str, Any] = {
    "name": "vit",
    "patch_size": 8,
    "hidden_size": 16,
    "num_layers": 1,
    "mlp_dim": 24,
    "num_heads": 2,
}
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "token": ({}, (16, 16)),
    "exact gelu, other epsilon": ({"gelu": "exact", "layer_norm_epsilon": 1e-12}, (16, 16)),
    "gap, fixed positions": ({"classifier": "gap", "position_embedding": "sincos2d"}, (16, 16)),
    "map, pre-logits": ({"classifier": "map", "representation_size": 12}, (16, 16)),
    "logits per token": ({"classifier": "token_unpooled"}, (16, 16)),
    "no head": ({"num_classes": 0}, (16, 16)),
    "rectangles": ({"patch_size": (8, 4)}, (16, 24)),
    "deit": ({"name": "deit", "gelu": "exact"}, (16, 16)),
    # Odd sizes: padding differs between the sides.
    "hybrid": ({"resnet_layers": (1,), "patch_size": 2}, (17, 19)),
}
# Sums of float32 in another order; a wrong operation shows in the first digits.
TOLERANCE = 1e-5


def write(
    path: Path, function: Callable[..., Any], params: dict[str, Any], spec: Any, **kwargs: Any
) -> tuple[Any, list[Path]]:
    """Converts and writes; returns what ONNX Runtime computes, and the files."""
    graph, result, output = build_graph(function, params, spec, input_name="images")
    options: dict[str, Any] = {"opset": 18, "metadata": {}, **kwargs}
    files = write_onnx(
        path, graph, result, images=spec, output=output, output_name="result", **options
    )
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["result"], {"images": images})[0], files


def free(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*export.symbolic_shape("b"), *shape), dtype)


def model_of(image: tuple[int, int], **overrides: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A tiny model: (function of flat parameters and images, parameters)."""
    module = create_model(**{**TINY, "num_classes": 5, **overrides})
    shapes = flatten_names(golden.abstract_params(module, (1, *image, 3)))
    params = {name: golden.fill(name, leaf.shape, "fanin") for name, leaf in shapes.items()}
    return lambda p, x: module.apply({"params": unflatten_names(p)}, x, train=False), params


@pytest.mark.parametrize("case", MODELS)
def test_models_with_a_free_batch(case: str, tmp_path: Path) -> None:
    overrides, image = MODELS[case]
    function, params = model_of(image, **overrides)
    run, files = write(tmp_path / "x.onnx", function, params, free(*image, 3))
    images = golden.images(3, *image)
    expected = np.asarray(jax.jit(function)(params, images))
    assert np.std(expected) > 0.1
    assert files == [tmp_path / "x.onnx"]
    np.testing.assert_allclose(run(images), expected, atol=TOLERANCE * np.std(expected), rtol=0)
    np.testing.assert_allclose(
        run(images[2:]), expected[2:], atol=TOLERANCE * np.std(expected), rtol=0
    )


def test_a_model_with_a_fixed_batch(tmp_path: Path) -> None:
    function, params = model_of((16, 16), classifier="map")
    spec = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    run, _ = write(tmp_path / "x.onnx", function, params, spec)
    images = golden.images(2, 16, 16)
    expected = np.asarray(jax.jit(function)(params, images))
    np.testing.assert_allclose(run(images), expected, atol=TOLERANCE * np.std(expected), rtol=0)
    [size, *_] = onnx.load(tmp_path / "x.onnx").graph.input[0].type.tensor_type.shape.dim
    assert size.dim_value == 2


def test_constants_carry_the_names_of_parameters(tmp_path: Path) -> None:
    """All of them; standardised kernels are computed once, and the names of the sizes are there."""
    function, params = model_of((16, 16), resnet_layers=(), patch_size=1)
    write(tmp_path / "x.onnx", function, params, free(16, 16, 3), metadata={"key": "text"})
    model = onnx.load(tmp_path / "x.onnx")
    constants = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    assert set(params) <= set(constants)
    np.testing.assert_allclose(
        constants["conv_root/kernel"].transpose(2, 3, 1, 0),
        weight_standardize(params["conv_root/kernel"]),
        atol=1e-6,
    )
    assert constants["head/kernel"].tobytes() == params["head/kernel"].tobytes()
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {x.key: x.value for x in model.metadata_props} == {"key": "text"}


def test_large_constants_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    function, params = model_of((16, 16))
    spec, path = free(16, 16, 3), tmp_path / "x.onnx"
    together, files = write(path, function, params, spec)
    assert files == [path]
    apart, files = write(tmp_path / "y.onnx", function, params, spec, max_single_file=10_000)
    assert files == [tmp_path / "y.onnx", tmp_path / "y.onnx.data"]
    assert files[1].stat().st_size > path.stat().st_size / 2
    assert files[0].stat().st_size < path.stat().st_size
    images = golden.images(2, 16, 16)
    np.testing.assert_array_equal(apart(images), together(images))


X = np.random.default_rng(1).uniform(-2, 2, (2, 6, 8, 4)).astype(np.float32)
W = np.random.default_rng(2).standard_normal((3, 3, 2, 6)).astype(np.float32)


def _conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        *(x, w, (2, 1), ((1, 2), (0, 3))),
        rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )


def _pool(x: Any) -> Any:
    padding = ((0, 0), (1, 2), (0, 1), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), padding)


# Each is given images [b, 6, 8, 4] and a kernel [3, 3, 2, 6].
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs, log, sqrt": lambda x, w: jnp.log(jnp.abs(x) + 1) + lax.sqrt(lax.square(x)),
    "erf, erfc": lambda x, w: lax.erf(x) + lax.erfc(x + 1),
    "exp, tanh, sigmoid": lambda x, w: jnp.exp(-x) + lax.tanh(x) * lax.logistic(x),
    "powers": lambda x, w: x**2 + x**3 + x**5 + (x + 3) ** -3 + (x + 3) ** 0.5 + lax.rsqrt(x + 3),
    "min, max": lambda x, w: jnp.minimum(x, 0.5) + jnp.maximum(x, -x),
    "greater": lambda x, w: jnp.where(x > 1, x, 0) + jnp.where(x >= 1, 2 * x, 1),
    "less": lambda x, w: jnp.where(x < 1, x, 0) + jnp.where(x <= 1, 2 * x, 1),
    "equal": lambda x, w: jnp.where(x.astype(int) != 1, x, jnp.where(x == 2, 3.0, 1.0)),
    "convert": lambda x, w: (x > 0).astype(jnp.int32).astype(jnp.float32) * lax.stop_gradient(x),
    "relu": lambda x, w: jax.nn.relu(x) + jax.checkpoint(jnp.tanh)(x),
    "copy": lambda x, w: jnp.array(x, copy=True),
    "reductions": lambda x, w: x.sum(axis=(1, 3)) + x.max(axis=(1, 3)) - x.min(axis=(1, 3)),
    "transposes": lambda x, w: x.transpose(0, 3, 1, 2).transpose(0, 2, 3, 1).swapaxes(1, 2),
    "reshape": lambda x, w: x.reshape(-1, 32)[:, None, :].squeeze(1),
    "expand": lambda x, w: (
        lax.expand_dims(x, (1,)) + jnp.tile(w[None, None, :, :1, 0, :4], (1, 1, 2, 8, 1))
    ),
    "tile": lambda x, w: jnp.tile(w[:1, 0, :1, :4], (x.shape[0], 1, 1)),
    "broadcast": lambda x, w: jnp.broadcast_to(w[0, 0, 0], (*x.shape[:2], 6)),
    "join": lambda x, w: jnp.concatenate([x, 2 * x[:, :1]], axis=1),
    "slices, division": lambda x, w: x[:, 1] + x[:, -1] / (x[:, 2] + 3),
    "slice": lambda x, w: lax.slice_in_dim(x, 1, 6, 2, axis=1),
    "dynamic slice": lambda x, w: lax.dynamic_slice_in_dim(x, 7, 3, axis=2),
    "pad": lambda x, w: lax.pad(x, 1.5, ((0, 0, 0), (1, 2, 0), (0, 3, 0), (0, 0, 0))),
    "convolution": _conv,
    "pooling": lambda x, w: _pool(x),
    "dense": lambda x, w: jnp.einsum("bhwc,ndcm->bhwndm", x[..., :2], w),
    "dense, two contracted": lambda x, w: jnp.einsum("bhwc,nwcm->bhnm", x[:, :, :3, :2], w),
    "constant first": lambda x, w: jnp.einsum(
        "nc,bhwc->nbhw", w[0, 0], jnp.tile(x, (1, 1, 1, 2))[..., :6]
    ),
    "attention": lambda x, w: jnp.einsum("bqhd,bkhd->bhqk", x, 2 * x),
    "attended": lambda x, w: jnp.einsum("bhqk,bkhd->bqhd", x[:, :, :, :3], x[:, :3, :6]),
    "vectors": lambda x, w: jnp.einsum("bhwc,bhwc->b", x, x),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_primitives(case: str, tmp_path: Path) -> None:
    def function(params: Any, x: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return FUNCTIONS[case](x, params["w"])

    run, _ = write(tmp_path / "x.onnx", function, {"w": W}, free(*X.shape[1:]))
    expected = np.asarray(function({"w": W}, X))
    np.testing.assert_allclose(run(X), expected, atol=1e-5, rtol=1e-5)
    assert run(X).shape == expected.shape


def primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name in CALLS:
            inner = eqn.params[CALLS[eqn.primitive.name]]
            yield from primitives(getattr(inner, "jaxpr", inner))


def test_every_emitter_is_tested_above() -> None:
    seen: set[str] = set()
    with jax.numpy_rank_promotion("allow"):
        for function in FUNCTIONS.values():
            spec = free(*X.shape[1:])
            seen |= set(primitives(jax.make_jaxpr(function)(spec, W).jaxpr))
    assert {*EMITTERS, *CALLS} <= seen


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, x: jnp.sort(x), "primitive 'sort'"),
        (lambda p, x: lax.scan(lambda c, _: (c * 2, None), x, None, 3)[0], "primitive 'scan'"),
        (lambda p, x: x.astype(jnp.bfloat16), "type bfloat16"),
        (lambda p, x: x[:, lax.convert_element_type(x[0, 0], int)], "depend on the images"),
        (lambda p, x: x[:, jnp.array([2, 0])], "gather that is no slice"),
        (lambda p, x: jnp.broadcast_to(p["w"], (2 * x.shape[0], 3)), "fix the batch size"),
        (lambda p, x: lax.integer_pow(x, 0), "power of 0"),
    ],
)
def test_what_has_no_form_is_named(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_graph(function, {"w": np.ones(3, np.float32)}, free(4), input_name="images")


def test_opsets() -> None:
    check_opset(18)
    for opset in (17, 1000):
        with pytest.raises(UserError, match=f"opset={opset} must be from 18 to"):
            check_opset(opset)
