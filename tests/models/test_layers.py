"""Layer norms are Flax's, computed again for the gradient; products; dropout is independent."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import golden
from vit_jax.models import layers
from vit_jax.models.kernels import devices, products
from vit_jax.models.layers import Dropout, LayerNorm, random_words


def outputs_and_gradients(norm: nn.Module, x: np.ndarray) -> Any:
    """(y, (gradients of scale and bias, gradient of x)), compiled."""
    rng = np.random.default_rng(1)
    params = {name: np.float32(rng.standard_normal(x.shape[-1])) for name in ("scale", "bias")}
    cotangent = rng.standard_normal(x.shape)

    @golden.jit
    def run(params: Any, x: jax.Array) -> Any:
        y, backward = jax.vjp(lambda p, x: norm.apply({"params": p}, x), params, x)
        return y, backward(jnp.asarray(cotangent, y.dtype))

    return run(params, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm_has_the_bits_of_flax(dtype: Any) -> None:
    x = (3.0 + np.random.default_rng(0).standard_normal((2, 5, 48))).astype(dtype)
    ours = outputs_and_gradients(LayerNorm(dtype=dtype), x)
    flax = outputs_and_gradients(nn.LayerNorm(dtype=dtype), x)
    assert ours[0].dtype == dtype
    if dtype == jnp.bfloat16:  # Flax rounds the parts of the gradient of x before it adds them up
        exact = outputs_and_gradients(nn.LayerNorm(), x.astype(np.float32))[1][1]
        error, of_flax = (np.abs(np.float32(x[1][1]) - exact).mean() for x in (ours, flax))
        assert error < of_flax
        ours, flax = ((y, of_params) for y, (of_params, _) in (ours, flax))
    jax.tree.map(np.testing.assert_array_equal, ours, flax)


SHAPE = (16, 50, 768)  # 614,400 places


def mask(seed: int, shape: tuple[int, ...] = SHAPE, rate: float = 0.1) -> np.ndarray:
    return np.asarray(random_words(jax.random.key(seed), shape)) >= round(rate * 2**32)


@pytest.mark.parametrize(
    ("device", "results", "width", "barriers"),
    [
        (("gpu", "some kind"), "bfloat16 bfloat16 bfloat16", 96, 0),
        (("cpu", "cpu"), "float32 float32 float32", 96, 0),
        (("tpu", "TPU v5 lite"), "bfloat16 bfloat16 bfloat16", 96, 0),
        (("tpu", "TPU v4"), "bfloat16 bfloat16 bfloat16", 96, 3),
        (("tpu", "TPU v4"), "bfloat16 bfloat16 bfloat16", 8, 1),
    ],
)
def test_products_round_once_and_gradients_too(device, results, width, barriers, monkeypatch):
    """In the product itself on accelerators; on TPU v4 apart from what is beside it."""
    monkeypatch.setattr(devices, "device_of_program", lambda: device)
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((2, 3, 64), (64, width)))
    contract = (((2,), (0,)), ((), ()))

    def run(x: Any, kernel: Any) -> Any:
        out, vjp = jax.vjp(lambda *both: products.dot_general(*both, contract), x, kernel)
        return out, *vjp(out)

    program = str(jax.make_jaxpr(run)(x, kernel))
    assert re.findall(r"preferred_element_type=(\w+)", program) == results.split()
    assert program.count("optimization_barrier") == barriers
    products_and_gradients = run(jnp.asarray(x), jnp.asarray(kernel))
    x, kernel = (np.asarray(array, np.float32) for array in (x, kernel))
    out = x @ kernel
    exact = (out, out @ kernel.T, np.einsum("bnd,bne->de", x, out))
    for array, expected in zip(products_and_gradients, exact, strict=True):
        assert array.dtype == jnp.bfloat16
        atol = 2**-7 * np.abs(expected).max()
        np.testing.assert_allclose(np.float32(array), expected, rtol=2**-7, atol=atol)


def test_kept_values_are_scaled_and_evaluation_changes_nothing() -> None:
    x = jnp.full(SHAPE, 3.0)
    out = Dropout(0.25).apply({}, x, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert set(np.unique(out)) == {0.0, 4.0}
    np.testing.assert_array_equal(Dropout(0.25).apply({}, x, deterministic=True), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, deterministic=False), x)


@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_the_rate_of_all_of_each_token_and_of_each_feature(rate: float) -> None:
    dropped = 1.0 - mask(0, rate=rate)
    deviation = np.sqrt(rate * (1 - rate))
    for axes in ((0, 1, 2), (0, 2), (1, 2), (0, 1), (2,)):
        means = np.atleast_1d(dropped.mean(axes))
        count = dropped.size // means.size
        # 5 standard deviations, of up to 800 means; skewed where few are dropped.
        assert np.abs(means - rate).max() < 5 * deviation / np.sqrt(count) + 3 / count
        if means.size > 1 and count * rate > 20:
            # Spread as independent draws spread, neither more nor less.
            spread = means.std() / (deviation / np.sqrt(count))
            assert spread == pytest.approx(1.0, abs=4 / np.sqrt(2 * means.size))


@pytest.mark.parametrize("lag", [(0, 0, 1), (0, 0, 256), (0, 1, 0), (1, 0, 0)])
def test_neighbours_are_independent(lag: tuple[int, int, int]) -> None:
    values = mask(1, rate=0.5) - 0.5
    shifted = values[tuple(slice(step, None) for step in lag)]
    original = values[tuple(slice(0, size - step) for size, step in zip(SHAPE, lag, strict=True))]
    correlation = 4 * np.mean(shifted * original)
    assert abs(correlation) < 4.5 / np.sqrt(shifted.size)


def test_each_bit_is_fair_and_runs_of_words_fill_a_cube() -> None:
    words = np.asarray(random_words(jax.random.key(2), SHAPE))
    for bit in range(32):
        assert np.mean((words >> bit) & 1) == pytest.approx(0.5, abs=4.5 / 2 / np.sqrt(words.size))
    # Eight equal parts of each of three following words: 512 cells.
    parts = (words >> 29).reshape(-1, 3)
    counts = np.bincount(parts @ np.array([64, 8, 1]), minlength=512)
    expected = len(parts) / 512
    chi_square = np.sum((counts - expected) ** 2) / expected
    assert abs(chi_square - 511) < 4.5 * np.sqrt(2 * 511)


def test_the_same_on_every_mesh() -> None:
    draw = jax.jit(lambda key: random_words(key, SHAPE))
    expected = np.asarray(draw(jax.random.key(5)))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (("data",), (None, None, "tensor"), ("data", None, "tensor")):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        split: Any = jax.jit(draw, out_shardings=sharding)
        np.testing.assert_array_equal(split(jax.random.key(5)), expected)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_gelu_of_accelerators(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from float64 than JAX's own, but for what bfloat16 rounds on the way on a GPU."""
    x = np.linspace(-6.0, 6.0, 1001, dtype=np.float32)
    with jax.enable_x64(True):
        derived = jax.jit(jax.vmap(jax.value_and_grad(nn.gelu)))(np.asarray(x, np.float64))
        exact = [np.asarray(array) for array in derived]

    def error(dtype: Any) -> Any:
        out, vjp = jax.vjp(lambda x: layers.gelu(x, "tanh"), x.astype(dtype))
        arrays = (out, *vjp(jnp.ones_like(out)))
        return [np.abs(np.float64(a) - b).max() for a, b in zip(arrays, exact, strict=True)]

    expected = error(jnp.float32), error(jnp.bfloat16)
    monkeypatch.setattr(devices, "device_of_program", lambda: (platform, ""))
    errors = error(jnp.float32), error(jnp.bfloat16)
    assert errors[0] <= [2 * of_jax + 1e-7 for of_jax in expected[0]]
    roundings = 2 if platform == "gpu" else 1
    assert errors[1][0] <= roundings * expected[1][0]
    assert errors[1][1] <= 1.1 * expected[1][1]


def test_residual_sums_of_gpus_are_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (jax.random.normal(jax.random.key(seed), (2, 5, 8)) for seed in range(2))
    expected = layers.residual(x, y)
    monkeypatch.setattr(devices, "device_of_program", lambda: ("gpu", ""))
    assert "f32[10,8] = add" in str(jax.make_jaxpr(layers.residual)(x, y))
    np.testing.assert_array_equal(layers.residual(x, y), expected)


def test_patches_of_gpus_are_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the convolution, also where patches leave pixels over."""
    convolve = products.convolve_patches
    module = nn.Conv(8, (4, 3), (4, 3), "VALID", conv_general_dilated=convolve)
    images = golden.images(2, 13, 11)
    params = jax.jit(module.init)(jax.random.key(1), images)

    def run(images: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda *arguments: module.apply(*arguments), params, images)
        return out, vjp(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    def convolves() -> bool:
        return "conv_general_dilated" in str(jax.make_jaxpr(lambda images: run(images))(images))

    expected = jax.jit(lambda images: run(images))(images)
    assert convolves()
    monkeypatch.setattr(devices, "device_of_program", lambda: ("gpu", ""))
    assert not convolves()
    for a, b in zip(*map(jax.tree.leaves, (jax.jit(run)(images), expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
