"""The table of attention implementations: every kernel against the reference; which is chosen."""

import contextlib
import functools
import logging
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType

from tests import golden, tiny
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.flops import jaxpr_flops
from vit_jax.models.kernels import attention as choose
from vit_jax.models.kernels import attention_cudnn, devices
from vit_jax.models.kernels.attention import (
    AttentionFn,
    MultiHeadDotProductAttention,
    check_attention,
    fastest,
    xla,
)
from vit_jax.models.kernels.attention_cudnn import cudnn
from vit_jax.models.kernels.devices import device_of_program
from vit_jax.parameters.sharding import MESH_AXES, keep_batch_sharding
from vit_jax.run import create_run

SMALL = {"patch_size": 8, "hidden_size": 32, "num_layers": 3, "mlp_dim": 64, "num_heads": 4}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(name: str, num_heads: int, *, train: bool = True, dtype: Any = jnp.float32) -> Any:
    function = AttentionFn(name, train)
    return MultiHeadDotProductAttention(num_heads=num_heads, attention_fn=function, dtype=dtype)


def outputs_and_gradients(
    name: str, params: Any, x: np.ndarray, num_heads: int, dtype: Any = jnp.float32
) -> Any:
    """Output, and gradients by parameters and input, of an attention with this implementation."""
    module = attention(name, num_heads, dtype=dtype)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x)

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        out, vjp = jax.vjp(apply, params, x)
        return out, *vjp(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return run(params, x)


@functools.cache
def parameters(width: int, num_heads: int) -> Any:
    module = attention("reference", num_heads)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), normal(1, 2, width))["params"])
    leaves, tree = jax.tree.flatten(shapes)
    scale = np.float32(width**-0.5)
    arrays = [normal(*leaf.shape, seed=i) * scale for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, arrays)


@functools.cache
def of_random_numbers(name: str, num_tokens: int, num_heads: int, head_dim: int, dtype: Any) -> Any:
    """As numpy float64, with the same numbers in every dtype."""
    width = num_heads * head_dim
    x, params = normal(2, num_tokens, width), parameters(width, num_heads)
    with jax.enable_x64(dtype == jnp.float64):
        if dtype == jnp.float64:
            x, params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (x, params))
        arrays = outputs_and_gradients(name, params, x, num_heads, dtype)
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), arrays)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest entry of each array; a key's bias has gradient 0 but for rounding."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1.0))


# Tokens, heads, width of a head: odd numbers as with a class token; heads that end within a vector
# of 128 lanes (80: H/14); that fill several, and are so wide that two programs share them in
# float32; fewer lanes than a vector.
SIZES = [(197, 2, 64), (17, 2, 80), (5, 2, 640), (7, 2, 12)]


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_heads", "head_dim"),
    [("xla", *SIZES[0]), ("chunked", 500, 2, 64), ("splash", *SIZES[0])]
    # Then so many tokens that the kernel takes queries in parts, and so many heads that it loops.
    + [("pallas", *sizes) for sizes in (*SIZES[1:], (500, 2, 64), (5, 40, 16))],
)
def test_every_kernel_gives_outputs_and_gradients_of_the_reference(
    name: str, num_tokens: int, num_heads: int, head_dim: int
) -> None:
    """No further from float64 than the reference in the same dtype is."""
    sizes = (num_tokens, num_heads, head_dim)
    exact = of_random_numbers("reference", *sizes, jnp.float64)
    # Sums in another order: in float32 five roundings, in bfloat16 half a one.
    roundings = {jnp.float32: 5 * 2**-24, jnp.bfloat16: 0.5 * 2**-9}
    for dtype in [jnp.float32] if sizes in SIZES[1:] else roundings:
        low = of_random_numbers("reference", *sizes, dtype)
        values = of_random_numbers(name, *sizes, dtype)
        for a, b, c in zip(*map(jax.tree.leaves, (values, low, exact)), strict=True):
            scale = max(np.abs(c).max(), 1.0)
            assert rms(a - c) < 1.25 * rms(b - c) + roundings[dtype] * scale


def test_what_surrounds_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA in the place of the library, which is not here; also without some of the biases."""
    monkeypatch.setattr(devices, "device_of_program", lambda: ("gpu", "NVIDIA H100"))
    monkeypatch.setitem(choose.ATTENTIONS, "cudnn", functools.partial(cudnn, implementation="xla"))
    params, x = parameters(32, 4), normal(2, 13, 32)
    for missing in ((), ("key",), ("query", "key", "value")):
        some = {**params, **{name: {"kernel": params[name]["kernel"]} for name in missing}}
        zero = jnp.zeros_like(params["query"]["bias"])
        full = {**params, **{name: {**params[name], "bias": zero} for name in missing}}

        out, d_params, d_x = outputs_and_gradients("reference", full, x, 4)
        for name in missing:
            del d_params[name]["bias"]
        assert_close(outputs_and_gradients("cudnn", some, x, 4), (out, d_params, d_x), 3e-6)


def traced_cudnn(
    num_tokens: int,
    head_dim: int,
    train: bool,
    dtype: Any = jnp.bfloat16,
    around: Any = lambda function: function,
) -> Any:
    """The program of its gradient, or without `train` of its outputs."""
    shape = jax.ShapeDtypeStruct((2, num_tokens, 3, head_dim), dtype)
    function = around(AttentionFn("cudnn", train))

    def loss(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(function(*qkv))

    return jax.make_jaxpr(jax.grad(loss, (0, 1, 2)) if train else function)(*[shape] * 3).jaxpr


# B/16 and L/16 at 224 and 384 pixels; G/14.
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(197, 64), (577, 64), (257, 104)])
def test_jax_takes_every_size_of_the_paper_for_cudnn(num_tokens, head_dim, monkeypatch):
    """By its own checks, which run while tracing, but for that of the library's version.

    Nothing is padded, whatever surrounds the gradient; and afterwards its checks are its own again.
    """
    check = fused_attention_stablehlo.check_is_flash_attention
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    products = 2 * 2 * 3 * num_tokens**2 * head_dim
    assert jaxpr_flops(traced_cudnn(num_tokens, head_dim, train=False)) == 2 * products
    for around in (jax.jit, jax.checkpoint):
        program = traced_cudnn(num_tokens, head_dim, train=True, around=around)
        forward_again = 2 if around is jax.checkpoint else 0
        assert jaxpr_flops(program) == (6 + forward_again) * products
    assert fused_attention_stablehlo.check_is_flash_attention is check


def test_a_jax_without_the_private_module_attends_by_xla(monkeypatch, caplog):
    qkv = [normal(2, 9, 2, 8, seed=seed) for seed in range(3)]
    attention_cudnn._library.cache_clear()
    monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
    for _ in range(2):
        np.testing.assert_array_equal(cudnn(*qkv), xla(*qkv))
    [line] = caplog.messages
    assert line == (
        "This JAX has no jax._src.cudnn.fused_attention_stablehlo: attention is 'xla', not 'cudnn'."
    )
    attention_cudnn._library.cache_clear()


def test_what_cudnn_does_not_take_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    with pytest.raises(UserError, match="model.attention='cudnn': .* multiple of 8.* got 12"):
        traced_cudnn(16, 12, train=True)
    with pytest.raises(UserError, match="model.attention='cudnn': .*float32"):
        traced_cudnn(16, 64, train=True, dtype=jnp.float32)
    monkeypatch.undo()
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)
    with pytest.raises(UserError, match="cuDNN is not detected. Use model.attention=xla"):
        traced_cudnn(16, 64, train=True)


@functools.cache
def on_one_device(kernel: str) -> Any:
    """Parameters, images, and what the kernel makes of them."""
    width = 256 if kernel == "pallas" else 128  # with which each of two devices has whole vectors
    params, x = parameters(width, 4), normal(6, 9, width)
    return params, x, outputs_and_gradients(kernel, params, x, 4)


@pytest.mark.parametrize(
    ("sizes", "kernel"), [((2, 2, 2), "pallas"), ((3, 1, 1), "pallas"), ((2, 2, 2), "splash")]
)
def test_kernels_on_a_mesh(sizes: tuple[int, int, int], kernel: str) -> None:
    """Batch and heads split, or whole where they do not divide (6 images on 4 devices)."""
    params, x, expected = on_one_device(kernel)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), keep_batch_sharding():
        split = outputs_and_gradients(kernel, params, x, 4)
    assert_close(split, expected, 1e-6)


def test_queries_keys_and_values_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where whole vectors of 128 lanes belong to a group of heads, on each device."""

    def is_one(width: int, num_heads: int) -> bool:
        module, params = attention("pallas", num_heads), parameters(width, num_heads)
        program = jax.make_jaxpr(module.apply)({"params": params}, normal(2, 9, width))
        return f"f32[2,9,{3 * width}]" in str(program)

    assert is_one(128, 2)
    assert not is_one(96, 2)
    two = np.array(jax.devices()[:2]).reshape(1, 1, 2)
    mesh = jax.sharding.Mesh(two, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), keep_batch_sharding():
        assert is_one(256, 4)
        assert not is_one(128, 4)
    for kind, expected in (("TPU v4", False), ("TPU v5", True), ("TPU v6 lite", True)):
        monkeypatch.setattr(devices, "device_of_program", lambda kind=kind: ("tpu", kind))
        assert is_one(128, 2) == expected


def test_the_kernel_takes_three_arrays() -> None:
    """As behind rotations of queries and keys; whole vectors of heads, and parts of one."""
    for shape in ((2, 197, 2, 64), (2, 17, 2, 80)):
        qkv = [normal(*shape, seed=seed) for seed in range(3)]

        @functools.partial(jax.jit, static_argnums=0)
        def run(name: str, *qkv: jax.Array) -> Any:
            out, vjp = jax.vjp(AttentionFn(name, train=True), *qkv)
            return out, *vjp(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

        assert_close(run("pallas", *qkv), run("reference", *qkv), 2e-6)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    kind: str,
    *,
    tokens: int = 197,
    width: int = 64,
    itemsize: int = 2,
    alone: bool = True,
) -> str:
    """What `auto` is on a device, for 12 heads."""
    monkeypatch.setattr(devices, "device_of_program", lambda: (platform, kind))
    return fastest(tokens, 12, width, itemsize=itemsize, alone=alone)


def test_the_choice_is_logged_with_its_reason(caplog, monkeypatch):
    auto = functools.partial(chosen, monkeypatch)
    with caplog.at_level(logging.DEBUG):
        assert auto("tpu", "TPU v5 lite") == "pallas"
        assert auto("tpu", "TPU v3") == "xla"
        assert auto("tpu", "TPU v5 lite", tokens=5000) == "splash"
        assert auto("cpu", "cpu", itemsize=4) == "chunked"
        assert auto("cpu", "cpu", itemsize=4, alone=False) == "reference"
        assert auto("cpu", "cpu") == "chunked"
        assert auto("cpu", "cpu", alone=False) == "xla"
        assert auto("gpu", "NVIDIA H100") == "cudnn"
        assert auto("gpu", "NVIDIA H100", itemsize=4) == "xla"
        assert auto("gpu", "NVIDIA H100", width=12) == "xla"
        assert auto("gpu", "NVIDIA H100", width=144) == "xla"
        assert auto("gpu", "AMD Instinct MI300X") == "xla"
    assert caplog.messages[0] == (
        "Attention on TPU v5 lite, 197 tokens: pallas (scores stay on the chip)."
    )
    assert "too many tokens" in caplog.messages[2]
    assert "it runs everywhere" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("attention", "platform", "message"),
    [
        ("pallas", "gpu", "model.attention='pallas' needs a TPU, and this training runs on a GPU"),
        ("cudnn", "cpu", "model.attention='cudnn' needs a GPU, .* use 'auto'"),
        ("cudnn", "gpu", "model.attention='cudnn' does not support .*; set model.dtype=bfloat16"),
    ],
)
def test_what_a_platform_cannot_run_ends_before_the_data_are_opened(attention, platform, message):
    device = types.SimpleNamespace(platform=platform)
    mesh: Any = types.SimpleNamespace(devices=np.array([device]))
    with pytest.raises(UserError, match=message):
        create_run(tiny.config(model__attention=attention, dataset__name="nowhere"), mesh)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--xla_gpu_deterministic_ops=true --xla_dump_to=d", "xla"),
        ("--xla_gpu_exclude_nondeterministic_ops", "xla"),
        ("--xla_gpu_deterministic_ops=false", "cudnn"),
    ],
)
def test_runs_that_xla_repeats_bit_for_bit(flags, name, monkeypatch):
    """XLA would stop with cuDNN's attention."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert chosen(monkeypatch, "gpu", "NVIDIA H100") == name
    refused = pytest.raises(UserError, match="'cudnn' stops XLA .* set model.attention=auto")
    with refused if name == "xla" else contextlib.nullcontext():
        check_attention("cudnn", "gpu", "bfloat16")


def test_chunks_are_for_training_on_one_device() -> None:
    """Evaluation has nothing to gain, may be exported with a free batch; a mesh splits heads."""
    params, x = parameters(32, 4), normal(2, 13, 32)

    def in_chunks(train: bool, num_devices: int) -> bool:
        module = attention("auto", 4, train=train, dtype=jnp.bfloat16)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        with jax.set_mesh(mesh):
            return "scan[" in str(jax.make_jaxpr(module.apply)({"params": params}, x))

    assert in_chunks(train=True, num_devices=1)
    assert not in_chunks(train=False, num_devices=1)
    assert not in_chunks(train=True, num_devices=2)


def test_the_choice_is_for_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for what runs on the CPU of a machine with a TPU."""
    devices, tpu = jax.devices, types.SimpleNamespace(platform="tpu", device_kind="TPU v4")
    monkeypatch.setattr(jax, "devices", lambda kind=None: devices(kind) if kind else [tpu])
    assert device_of_program() == ("tpu", "TPU v4")
    for device in ("cpu", devices()[1]):
        with jax.default_device(device):
            assert device_of_program() == ("cpu", "cpu")
    mesh = jax.sharding.Mesh(np.array(devices()[:1]), ("data",))
    with jax.set_mesh(mesh):
        assert device_of_program() == ("cpu", "cpu")


def test_too_many_tokens_for_the_kernel_are_one_line() -> None:
    module = create_model("vit", num_classes=5, **SMALL, attention="pallas")
    images = jax.ShapeDtypeStruct((1, 1024, 1024, 3), jnp.float32)
    params = {"params": golden.abstract_params(module, images.shape)}
    with pytest.raises(UserError, match="does not fit 16385 tokens with heads of 8; use 'splash'"):
        jax.eval_shape(functools.partial(module.apply, train=False), params, images)
