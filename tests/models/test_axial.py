"""Axial-ViT and Axial-ResNet: their equations, sizes and recipes."""

import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax import export

from configs import axial, cordonnier
from tests import golden
from tests.kinds import small
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.export.onnx import write_onnx
from vit_jax.models.axial_resnet import AxialAttention
from vit_jax.models.create import create_model
from vit_jax.models.flops import forward_flops
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.trees import count_parameters, flatten_names, unflatten_names

VIT: dict[str, Any] = {**weights.SMALL, "classifier": "gap", "num_classes": 5}


def sizes(variant: str, **attributes: Any) -> tuple[int, float]:
    """Number of parameters, and of multiply-adds for an image of 224 pixels."""
    model = create_model(variant, num_classes=1000, **attributes)
    params = abstract_params(model, (224, 224, 3))
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    flops = forward_flops(lambda p, x: model.apply({"params": p}, x, train=False), params, images)
    return count_parameters(params), flops / 2


@pytest.mark.parametrize(("variant", "patch"), [("Axial-B/32", 32), ("Axial-B/16", 16)])
def test_an_axial_vit_has_twice_the_blocks_and_short_attention(variant: str, patch: int) -> None:
    side, width, mlp = 224 // patch, 768, 3072
    tokens = side * side
    dense = 4 * width * width + 2 * width * mlp
    embedding, head = 3 * patch * patch * width, 1000 * width
    expected = tokens * (embedding + 24 * (dense + 2 * side * width)) + head
    block = dense + 4 * width + mlp + width + 4 * width  # biases, two norms
    outside = embedding + width + tokens * width + 2 * width + head + 1000
    assert sizes(variant, scan=True) == (24 * block + outside, expected)


def test_a_row_block_of_one_row_is_a_vits() -> None:
    """Images of one row of patches: column blocks attend to a single token."""
    images = golden.images(2, 8, 40)
    axial_model = create_model(**{**VIT, "name": "axial_vit"})
    flat = weights.seeded(axial_model, images.shape[1:])
    for part in ("row", "column"):
        other = {"row": "column", "column": "row"}[part]
        # The MLP and the attention of the other half add nothing.
        zero = (f"{other}/MlpBlock_0/Dense_1", f"{other}/MultiHeadDotProductAttention_0/out")
        params = {name: 0 * x if any(z in name for z in zero) else x for name, x in flat.items()}
        plain = {n.replace(f"/{part}", ""): x for n, x in params.items() if f"/{other}/" not in n}
        image = images if part == "row" else np.swapaxes(images, 1, 2)
        logits = weights.logits(axial_model, unflatten_names(params), image)
        expected = weights.logits(create_model(**VIT), unflatten_names(plain), image)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-6)  # sums in another order


def test_a_token_sees_its_row_then_the_columns() -> None:
    """One pair of blocks: everything. The last block without its columns: the row alone."""
    model = create_model(**{**VIT, "name": "axial_vit", "num_layers": 1, "classifier": "unpooled"})
    params = weights.seeded(model, (24, 24, 3))
    image = golden.images(1, 24, 24)
    changed = image.copy()
    changed[:, 8:16, 16:] += 1.0  # the patch in row 1 and column 2

    def moved(params: Any) -> np.ndarray:
        tree = unflatten_names(params)
        logits = [weights.logits(model, tree, x) for x in (image, changed)]
        return (np.abs(logits[0] - logits[1]).max(axis=-1) > 1e-4).reshape(3, 3)

    assert moved(params).all()
    out = "column/MultiHeadDotProductAttention_0/out"
    only_rows = {name: 0 * x if out in name else x for name, x in params.items()}
    np.testing.assert_array_equal(moved(only_rows), [[0, 0, 0], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize("axis", [1, 2])
def test_axial_attention_by_its_equation(axis: int) -> None:
    """Wang et al., equation 4, in float64 pair by pair."""
    heads, channels, x = 8, 64, golden.images(2, 3, 5)[..., :1] * np.linspace(-1, 1, 64)
    x = np.float32(x + np.random.default_rng(1).normal(size=x.shape))
    module = AxialAttention(axis)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x)["params"])
    flat = {n: golden.fill(n, s.shape, "fanin") for n, s in flatten_names(shapes).items()}
    params = {"params": unflatten_names(flat)}
    outputs = np.asarray(jax.jit(module.apply)(params, x))

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        """[L, C] in 32 groups of channels."""
        groups = values.reshape(len(values), 32, -1)
        mean, variance = groups.mean((0, 2), keepdims=True), groups.var((0, 2), keepdims=True)
        normed = ((groups - mean) / np.sqrt(variance + 1e-4)).reshape(values.shape)
        return normed * flat[f"{name}/scale"] + flat[f"{name}/bias"]

    lines = np.moveaxis(x.astype(np.float64), axis, 2)
    expected = np.zeros(lines.shape)
    d, half = channels // heads, channels // heads // 2
    for b, m in np.ndindex(*lines.shape[:2]):
        qkv = norm(lines[b, m] @ flat["qkv/kernel"], "gn_qkv")
        out, length = np.zeros(lines.shape[2:]), lines.shape[2]
        for h, o in np.ndindex(heads, length):
            part = qkv[:, 2 * d * h : 2 * d * (h + 1)]
            q, k, v = part[:, :half], part[:, half:d], part[:, d:]
            r = flat["relative_embedding"][np.arange(length) - o + length - 1]
            rq, rk, rv = r[:, :half], r[:, half:d], r[:, d:]
            scores = k @ q[o] + rq @ q[o] + np.sum(k * rk, axis=1)
            softmax = np.exp(scores - scores.max())
            out[o, d * h : d * (h + 1)] = softmax / softmax.sum() @ (v + rv)
        expected[b, m] = norm(out, "gn_out")
    # Float32: two norms of values of about 1, and 64 terms in each product.
    np.testing.assert_allclose(outputs, np.moveaxis(expected, 2, axis), rtol=0, atol=2e-5)


def test_the_average_pooling_of_a_stride_in_onnx(tmp_path: Path) -> None:
    """The norm behind it hides another scale from the logits."""
    x = golden.images(2, 6, 4)
    spec = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), *x.shape[1:]), x.dtype)

    def pool(_: Any, x: jax.Array) -> jax.Array:
        return nn.avg_pool(x, (2, 2), (2, 2), "SAME")

    write_onnx(tmp_path / "a.onnx", pool, {}, spec, output_name="result")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    [result] = session.run(["result"], {"images": x})
    expected = x.reshape(2, 3, 2, 2, 2, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


def test_sizes_of_axial_resnet() -> None:
    """Of a ResNet-50 at 224 pixels, by the shapes in scenic's code."""
    params, products, side, channels = 7 * 7 * 3 * 64 + 2 * 64, 112**2 * 7 * 7 * 3 * 64, 56, 64
    for stage, units in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for unit in range(units):
            stride = 2 if stage and not unit else 1
            out = side // stride
            if channels != 4 * width or stride != 1:
                params += channels * 4 * width + 8 * width
                products += out**2 * channels * 4 * width
            d = width // 8
            params += channels * width + 2 * width + width * 4 * width + 8 * width
            params += 2 * (2 * width**2 + 4 * width + 2 * width + (2 * side - 1) * 2 * d)
            products += side**2 * channels * width + out**2 * width * 4 * width
            products += 2 * side**2 * (2 * width**2 + side * 8 * (3 * d // 2 + 2 * d))
            side, channels = out, 4 * width
    params, products = params + channels * 1000 + 1000, products + channels * 1000
    assert params == 19_373_640
    assert sizes("Axial-R50x1") == (params, products)


def test_its_offsets_are_interpolated_to_other_images() -> None:
    model = create_model(**small("axial_resnet"), num_classes=3)
    before, like = (weights.seeded(model, (size, size, 3)) for size in (16, 32))
    params, report = adapt_params(
        before,
        like,
        kinds=("axial_resnet", "axial_resnet"),
        grid=(4, 4),
        source_grid=(2, 2),
        reset_head=False,
    )
    assert report["adapted"] == {
        f"block{stage}/unit1/{axis}/relative_embedding": "bilinear 7 -> 15"
        for stage in (1, 2)
        for axis in ("height", "width")
    }
    name = "block1/unit1/width/relative_embedding"
    np.testing.assert_array_equal(params[name][[0, 7, 14]], before[name][[0, 3, 6]])


def test_the_recipes() -> None:
    config = axial.get_config("R50x1")
    assert config.schedule.learning_rate == pytest.approx(0.8)
    assert config.schedule.warmup_steps == 7 * 625
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("sgd", 1e-3)
    little = axial.get_config("R50x1,quickstart")
    assert {**little.optimizer} == {**config.optimizer}
    assert little.schedule.learning_rate == pytest.approx(0.1 * 48 / 256)
    vit = axial.get_config("B/16")
    assert (vit.model.name, vit.model.classifier) == ("axial_vit", "gap")
    assert (vit.schedule.learning_rate, vit.duration.epochs) == (8e-4, 7.0)
    for argument in ("L/16", "R50x1,jft"):
        with pytest.raises(UserError, match=r"must be B/32 or B/16\[,DATASET"):
            axial.get_config(argument)
    config = cordonnier.get_config()
    model = create_model(**config.model, num_classes=10)
    assert math.prod(model.token_grid((32, 32))) == 256
    assert config.schedule.warmup_steps == 7_500
    with pytest.raises(UserError, match="must be empty, or quickstart"):
        cordonnier.get_config("x")
