"""Promises of the model that the golden numbers do not show."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, create_model, get_variant
from vit_jax.models.layers import REMAT_POLICIES
from vit_jax.models.resnet import ResidualUnit, ResNetLayers, Stage
from vit_jax.models.tokens import patch_shape, sincos2d, token_grid
from vit_jax.models.variants import PATCH_SIZES, SIZES
from vit_jax.trees import flatten_names

SMALL = {"name": "vit", "patch_size": 8, "hidden_size": 32, "num_layers": 2, "mlp_dim": 64}
SMALL |= {"num_heads": 4, "num_classes": 5}
IMAGES = golden.images(2, 32, 32)


def logits_and_grads(model: Any, params: Any) -> tuple[jax.Array, Any]:
    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({"params": p}, IMAGES, train=False)
        return jnp.sum(logits**2), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, grads


@functools.cache
def plain_numbers() -> tuple[Any, jax.Array, Any]:
    """Parameters, logits and gradients without either."""
    plain = create_model(**SMALL)
    assert (plain.remat, plain.scan) == ("none", False)
    params = golden.filled(plain, IMAGES.shape)
    return params, *logits_and_grads(plain, params)


@pytest.mark.parametrize("remat", [name for name in REMAT_POLICIES if name != "none"])
def test_remat_and_scan_give_the_same_numbers(remat: str) -> None:
    other = create_model(**SMALL, remat=remat, scan=True)
    params, logits, grads = plain_numbers()
    other_logits, other_grads = logits_and_grads(other, VIT.stack(params))
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=1e-5)
    expected = flatten_names(VIT.stack(grads))
    for name, grad in flatten_names(other_grads).items():
        scale = np.abs(expected[name]).max() + 1.0
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-5 * scale, err_msg=name)


def test_remat_saves_memory() -> None:
    """Read from the compiler's own analysis of the scan form (a loop shows nothing on CPU)."""

    def temporary_bytes(remat: str) -> int:
        model = create_model(**{**SMALL, "num_layers": 8}, scan=True, remat=remat)
        params = golden.abstract_params(model, IMAGES.shape)
        images = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)

        def loss(p: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(model.apply({"params": p}, x, train=False) ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(params, images).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, full = (temporary_bytes(remat) for remat in ("none", "dots", "full"))
    assert full < dots < none
    assert full < none / 2


def test_bfloat16_stays_close_to_float32() -> None:
    params, logits, _ = plain_numbers()
    low = create_model(**SMALL, dtype="bfloat16")
    low_logits = jax.jit(lambda p: low.apply({"params": p}, IMAGES, train=False))(params)
    difference = np.abs(low_logits - logits).max()
    # bfloat16 has 8 bits: 2^-8 of a unit-variance logit, times a few layers.
    assert 0 < difference < 0.05


def test_dropout_acts_in_training_only_and_at_every_place() -> None:
    params, logits, _ = plain_numbers()
    for kwargs in ({"dropout_rate": 0.5}, {"attention_dropout_rate": 0.5}):
        model = create_model(**SMALL, **kwargs)

        @functools.partial(jax.jit, static_argnames="train")
        def apply(rng: jax.Array, train: bool, model: Any = model) -> jax.Array:
            return model.apply({"params": params}, IMAGES, train=train, rngs={"dropout": rng})

        evaluated = apply(jax.random.key(0), train=False)
        np.testing.assert_allclose(evaluated, logits, rtol=0, atol=1e-5)
        trained = [np.asarray(apply(jax.random.key(i), train=True)) for i in range(2)]
        assert np.abs(trained[0] - trained[1]).max() > 1e-3


def test_rectangles_and_any_number_of_channels() -> None:
    model = create_model(**{**SMALL, "patch_size": (4, 8)})
    images = jnp.zeros((2, 24, 40, 5))
    logits, variables = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), images, train=False)
    )
    params = flatten_names(variables["params"])
    assert params["embedding/kernel"].shape == (4, 8, 5, 32)
    assert params["Transformer/posembed_input/pos_embedding"].shape == (1, 1 + 6 * 5, 32)
    assert logits.shape == (2, 5)
    assert token_grid((24, 40), (4, 8)) == (6, 5)


def test_initialisation_is_the_papers() -> None:
    sizes = {"hidden_size": 256, "num_layers": 1, "head_bias_init": -10.0}
    model = create_model(**{**SMALL, **sizes})
    init = jax.jit(lambda rng: model.init(rng, IMAGES, train=False)["params"])
    params = flatten_names(init(jax.random.key(0)))
    block = "Transformer/encoderblock_0"
    assert not np.any(params["head/kernel"])
    assert not np.any(params["cls"])
    np.testing.assert_array_equal(params["head/bias"], -10.0)
    assert np.std(params["Transformer/posembed_input/pos_embedding"]) == pytest.approx(
        0.02, rel=0.1
    )
    limit = np.sqrt(6 / (256 + 256))  # Glorot uniform, heads counted together
    query = params[f"{block}/MultiHeadDotProductAttention_0/query/kernel"]
    assert np.abs(query).max() == pytest.approx(limit, rel=0.01)
    assert np.std(params[f"{block}/MlpBlock_0/Dense_0/bias"]) == pytest.approx(1e-6, rel=0.5)
    assert np.std(params["embedding/kernel"]) == pytest.approx(1 / np.sqrt(8 * 8 * 3), rel=0.1)


def test_the_last_norm_of_a_residual_unit_starts_at_zero() -> None:
    layers = ResNetLayers(batch_norm=False, train=False, dtype=jnp.float32)
    stage = Stage(functools.partial(ResidualUnit, 32, layers), num_units=2, stride=1, digits=1)
    params = flatten_names(jax.jit(stage.init)(jax.random.key(0), golden.images(1, 8, 8)))
    scales = {name: value for name, value in params.items() if name.endswith("gn3/scale")}
    assert len(scales) == 2
    assert not any(np.any(value) for value in scales.values())


def test_all_sizes_at_all_patch_sizes() -> None:
    assert {"Ti/16", "S/8", "M/32", "g/14", "So400m/14", "R+Ti/16", "R50+L/16"} <= set(VARIANTS)
    assert all(f"{size}/{patch}" in VARIANTS for size in SIZES for patch in PATCH_SIZES)
    with pytest.raises(UserError, match="Did you mean"):
        get_variant("B16")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "vitt"}, "Did you mean 'vit'"),
        ({"hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"classifier": "cls"}, "Known: token, gap"),
        ({"remat": "ful"}, "Did you mean 'full'"),
        ({"dtype": "float16"}, "float32, bfloat16"),
        ({"num_heads": 5}, "hidden_size=32"),
        ({"stochastic_depth_rate": 1.0}, "stochastic_depth_rate=1.0"),
        ({"attention": "flash"}, "model.attention='flash' is unknown"),
        ({"attention": "xla", "attention_dropout_rate": 0.1}, "does not support attention dropout"),
    ],
)
def test_mistakes_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model(**{**SMALL, **kwargs})


@pytest.mark.parametrize("patch_size", [0, -1, (4, 8, 16), (4.0, 8), ()])
def test_patch_sizes_that_are_none(patch_size: Any) -> None:
    with pytest.raises(UserError, match="patch_size"):
        patch_shape(patch_size)


def test_a_patch_must_divide_the_image() -> None:
    assert token_grid((224, 160), 16) == (14, 10)
    assert token_grid((224, 224), 1, (3, 4, 9)) == (14, 14)
    assert token_grid((224, 224), 8, ()) == (7, 7)
    with pytest.raises(UserError, match="70 becomes 64 or 80"):
        token_grid((70, 64), 16)
    with pytest.raises(UserError, match="12 becomes 16"):
        token_grid((16, 12), 16)


def test_the_tables_of_big_vision() -> None:
    """1e-6: sines of the same float32 arguments, by two libraries."""
    expected = golden.arrays("bv_logits")
    small = sincos2d((3, 5), 16)
    np.testing.assert_allclose(small, expected["posemb_sincos_2d(3,5,16)"], rtol=0, atol=1e-6)
    large = sincos2d((14, 14), 192)[0, ::13, ::7]
    np.testing.assert_allclose(
        large, expected["posemb_sincos_2d(14,14,192)[0,::13,::7]"], rtol=0, atol=1e-6
    )
    assert small.dtype == np.float32


@pytest.mark.parametrize("hidden_size", [4, 10])
def test_sizes_that_do_not_go(hidden_size: int) -> None:
    with pytest.raises(UserError, match=f"hidden_size={hidden_size}.*multiple of 4"):
        sincos2d((2, 2), hidden_size)
