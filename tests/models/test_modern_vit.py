"""LayerScale, positions of the patches alone, and the initial values of DeiT III."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.kinds import small
from vit_jax.errors import UserError
from vit_jax.models.create import create_model, get_variant, variant_called
from vit_jax.models.later.modern_block import LayerScale
from vit_jax.parameters.table import abstract_params
from vit_jax.trees import count_parameters, flatten_names, unflatten_names

# README_revenge.md of facebookresearch/deit and timm's results: millions of parameters.
MILLIONS = {"S/16": 22.06, "M/16": 38.85, "B/16": 86.59, "L/16": 304.37, "H/14": 632.13}
IMAGES = golden.images(2, 16, 16)


@functools.cache
def init() -> tuple[Any, dict[str, np.ndarray]]:
    """A model wide enough for deviations of its initial values."""
    sizes = {"hidden_size": 64, "mlp_dim": 256, "num_layers": 1}
    model = create_model(**small("modern_vit") | sizes, num_classes=5)
    params = jax.jit(lambda rng: model.init(rng, IMAGES, train=False)["params"])
    return model, jax.device_get(flatten_names(params(jax.random.key(0))))


def first_tokens(model: Any, params: dict[str, Any], images: Any, **kwargs: Any) -> jax.Array:
    """After the first block, [B, N, D]."""
    _, state = model.apply(
        {"params": unflatten_names(params)}, images, capture_intermediates=True, **kwargs
    )
    return state["intermediates"]["Transformer"]["encoderblock_0"]["__call__"][0]


@pytest.mark.parametrize("size", MILLIONS)
def test_parameters(size: str) -> None:
    model = create_model(**get_variant(f"DeiT3-{size}"), num_classes=1000)
    shapes = abstract_params(model, (224, 224, 3))
    assert round(count_parameters(shapes) / 1e6, 2) == MILLIONS[size]


def test_names_of_timm_find_the_variant() -> None:
    assert variant_called("deit3_medium_patch16_224.fb_in1k") == "DeiT3-M/16"
    assert variant_called("timm/deit3_huge_patch14_224.fb_in22k_ft_in1k") == "DeiT3-H/14"
    assert variant_called("vit_base_patch14_reg4_dinov2.lvd142m") == "DINOv2-B/14"
    assert variant_called("openai/clip-vit-large-patch14-336") == "CLIP-L/14"
    assert variant_called("microsoft/beit-base-patch16-224") == "BEiT-B/16"
    assert variant_called("eva02_base_patch16_clip_224") == ""


def test_a_block_is_its_equation() -> None:
    """Scaling gammas is scaling the branches; with zero gammas nothing but positions remains."""
    model, params = init()
    block = "Transformer/encoderblock_0"
    assert float(params[f"{block}/LayerScale_0/gamma"][0]) == pytest.approx(1e-4)

    @jax.jit
    def tokens(factor: float) -> jax.Array:
        scaled = {n: x * factor if "gamma" in n else x for n, x in params.items()}
        return first_tokens(model, scaled, IMAGES, train=False)

    embedded, small_step, large_step = (np.asarray(tokens(factor)) for factor in (0.0, 10.0, 20.0))
    cells = IMAGES.reshape(2, 2, 8, 2, 8, 3).swapaxes(2, 3).reshape(2, 4, -1)
    expected = cells @ params["embedding/kernel"].reshape(-1, 64)
    expected = expected + params["posembed_patches/pos_embedding"]
    np.testing.assert_allclose(embedded[:, 1:], expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(embedded[:, :1], np.tile(params["cls"], (2, 1, 1)))
    # To first order in gamma, the step is linear in it.
    one, two = small_step - embedded, large_step - embedded
    np.testing.assert_allclose(two, 2 * one, rtol=0.02, atol=1e-6)
    assert np.abs(one).max() > 1e-5


def test_layer_scale_rounds_once() -> None:
    """In bfloat16 neither gamma is rounded, nor is float32 saved for the backward pass."""
    rng = np.random.default_rng(0)
    gamma = rng.uniform(0.5, 2, 64).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((2, 8, 64)), jnp.bfloat16)
    layer = LayerScale(1e-4)
    scaled, backward = jax.vjp(lambda p, x: layer.apply({"params": p}, x), {"gamma": gamma}, x)
    expected = (np.asarray(x, np.float32) * gamma).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(scaled), expected)
    twice = np.asarray(x * jnp.asarray(gamma, jnp.bfloat16)[None, None])
    assert np.mean(twice != expected) > 0.2
    saved = {leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.size == x.size}
    assert saved == {x.dtype}


def test_every_block_drops_at_the_constant_rate() -> None:
    """As DeiT III; on a line the first block would drop nothing."""
    shape = {"stochastic_depth_rate": 0.9, "stochastic_depth_shape": "constant"}
    model = create_model(**small("modern_vit"), **shape, num_classes=5)
    params = flatten_names(golden.filled(model, IMAGES.shape))
    images, rngs = np.tile(IMAGES[:1], (64, 1, 1, 1)), {"dropout": jax.random.key(1)}
    tokens = jax.jit(lambda p: first_tokens(model, p, images, train=True, rngs=rngs))(params)
    assert len(np.unique(np.asarray(tokens).sum(axis=(1, 2)).round(4))) > 1


def test_initial_values_are_those_of_timm() -> None:
    _, params = init()
    for name, array in params.items():
        if name.endswith("kernel") and name != "embedding/kernel":
            assert np.std(array) == pytest.approx(0.02, rel=0.1), name
        if name.endswith("bias"):
            assert not np.any(array), name
    bound = 1 / np.sqrt(8 * 8 * 3)  # PyTorch's convolution
    assert 0.9 * bound < np.abs(params["embedding/kernel"]).max() <= bound
    assert np.std(params["cls"]) == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf")])
def test_an_initial_factor_that_is_none(value: float) -> None:
    with pytest.raises(UserError, match="model.layer_scale_init=.* must be positive, or None"):
        create_model(**{**small("modern_vit"), "layer_scale_init": value}, num_classes=5)
