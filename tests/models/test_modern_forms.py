"""The parts of today's models together, as published ones have them; timm's logits are compared in
tests/pretrained/test_timm_registry.py."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.kinds import FORMS, small
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.features import feature_function
from vit_jax.models.later.modern_vit import infer
from vit_jax.models.later.rotary import axial_angles, rotate
from vit_jax.parameters.table import table_of
from vit_jax.trees import flatten_names

IMAGES = golden.images(2, 16, 24)


def filled(form: str) -> tuple[Any, Any]:
    model = create_model(**small(f"modern_vit:{form}"), num_classes=5)
    return model, golden.filled(model, IMAGES.shape)


@pytest.mark.parametrize("form", FORMS)
def test_loop_and_scan_and_a_file_without_a_description(form: str) -> None:
    model, params = filled(form)
    apply = jax.jit(
        lambda model, p: model.apply({"params": p}, IMAGES, train=False), static_argnums=0
    )
    loop = np.asarray(apply(model, params))
    scan = apply(model.clone(scan=True), table_of(model).stack(params))
    # The same operations, fused in another way.
    np.testing.assert_allclose(scan, loop, rtol=0, atol=1e-6)
    assert np.abs(loop).max() > 1e-3
    unseen = {"rope", "layer_scale_init", "classifier"}
    for key, value in infer(flatten_names(params)).items():
        assert key in unseen or value == getattr(model, key), key


def test_scores_see_differences_of_rotary_positions() -> None:
    """Moving the image by a row moves nothing but scores with tokens that do not turn."""
    model = create_model(**small("modern_vit:DINOv3") | {"rope": "grid"}, num_classes=5)
    turned = [axial_angles((4, 6), 8, model.clone(rope_offset=start)) for start in (0.0, 3.0)]
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 25, 2, 8)), jnp.float32) for _ in range(2))
    scores = [np.einsum("bqhd,bkhd->bhqk", rotate(query, a), rotate(key, a)) for a in turned]
    # Sums of eight products of float32.
    np.testing.assert_allclose(scores[1][:, :, 1:, 1:], scores[0][:, :, 1:, 1:], rtol=0, atol=1e-5)
    assert np.abs(scores[1] - scores[0]).max() > 0.1
    np.testing.assert_array_equal(rotate(query, turned[0])[:, 0], query[:, 0])
    norms = np.linalg.norm(rotate(query, turned[1]), axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(query, axis=-1), rtol=1e-6)


def test_training_alone_scales_coordinates() -> None:
    model, params = filled("DINOv3")

    @jax.jit
    def outputs(params: Any, key: jax.Array) -> tuple[jax.Array, ...]:
        def logits(model: Any, train: bool) -> jax.Array:
            return model.apply({"params": params}, IMAGES, train=train, rngs={"dropout": key})

        return logits(model, True), logits(model.clone(rope_jitter=1.0), True), logits(model, False)

    (one, still, evaluated), (same, *_), (other, *_) = (
        jax.device_get(outputs(params, jax.random.key(seed))) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-6
    np.testing.assert_allclose(still, evaluated, rtol=0, atol=1e-6)


def test_patches_and_blocks_are_features() -> None:
    model, params = filled("DINOv3")
    names = ["tokens", "patches", "register_1", "block_1_normed", "block_0_normed"]
    names += ["block_0_gap", "block_0_tokens"]
    features = jax.device_get(jax.jit(feature_function(model, names))(params, IMAGES))
    np.testing.assert_array_equal(features["patches"], features["tokens"][:, 3:])
    np.testing.assert_array_equal(features["register_1"], features["tokens"][:, 2])
    means = features["block_0_tokens"][:, 3:].mean(axis=1)
    np.testing.assert_allclose(features["block_0_gap"], means, rtol=0, atol=1e-5)
    # The last block's is what the model ends with; both are computed with other fusions.
    np.testing.assert_allclose(features["block_1_normed"], features["tokens"], rtol=0, atol=1e-5)
    assert np.abs(features["block_0_normed"] - features["tokens"]).max() > 1e-3


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"classifier": "token", "class_token": False}, "needs model.class_token=True"),
        ({"classifier": "token_gap", "final_norm": "pooled"}, "needs model.final_norm='tokens'"),
        ({"relative_bias": True, "attention": "splash"}, "does not support model.relative_bias"),
        ({"rope": "grid", "hidden_size": 12}, "width is divisible by 4, not 6"),
        ({"rope_base": 0.0}, "model.rope_base=0.0 must be positive"),
        ({"rope_jitter": 0.5}, "model.rope_jitter=0.5 must be at least 1"),
    ],
)
def test_attributes_that_do_not_go_together(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model(**small("modern_vit") | attributes, num_classes=5)


def test_mixed_frequencies_start_as_turned_axes() -> None:
    model = create_model(**small("modern_vit:mixed"), num_classes=5)

    @jax.jit
    def frequencies(key: jax.Array) -> jax.Array:
        params = model.init(key, IMAGES, train=False)["params"]
        block = params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_0"]
        return block["rope"]["frequencies"]  # [2, H, d / 2]

    uv = np.asarray(frequencies(jax.random.key(0)))
    u, v = np.split(uv, 2, axis=-1)  # of one axis and of the other
    base = 10.0 ** (-np.arange(2) / 2)
    for axis in (u, v):
        np.testing.assert_allclose(np.hypot(*axis), np.tile(base, (2, 1)), rtol=1e-5)
    angle = np.arctan2(v[1], v[0]) - np.arctan2(u[1], u[0])
    np.testing.assert_allclose(np.mod(angle, 2 * math.pi), math.pi / 2, rtol=1e-4)
