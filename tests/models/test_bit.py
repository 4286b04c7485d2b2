"""The BiT ResNets against big_vision's numbers, and what those do not show."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models import bit
from vit_jax.models.create import VARIANTS, VARIANTS_OF, create_model, get_variant
from vit_jax.models.tokens import token_grid
from vit_jax.trees import count_parameters, flatten_names

TINY: dict[str, Any] = {**VARIANTS["R50x1"], "resnet_layers": (1, 1), "num_classes": 5}
IMAGES = golden.images(2, 20, 17)

# Parameters with 1000 classes (timm's models of these names have as many), of each depth and
# width; the shapes of R50x1 are golden.
COUNTS = {"R50x2": 97_988_712, "R101x1": 44_541_480, "R152x4": 936_533_224, "R200x3": 568_633_000}


@functools.cache
def capturing(model: Any, jit: Any = jax.jit) -> Any:
    """Compiled once per model and shape of the images."""
    return jit(lambda p, x: model.apply({"params": p}, x, train=False, capture_intermediates=True))


def captured(
    model: Any, params: Any, images: np.ndarray, jit: Any = jax.jit
) -> tuple[jax.Array, dict[str, Any]]:
    """Logits, and what every submodule gave, by its name."""
    logits, state = capturing(model, jit)(params, images)
    return logits, golden.by_module(state["intermediates"])


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_numbers_of_big_vision(recipe: str) -> None:
    """Noise between one core and two is 1.1e-5; a zero-padded max-pooling is off by 2e-3."""
    model = create_model(**VARIANTS["R50x1"], num_classes=10)
    names = golden.table("bit_names")["bit_paper R50x1"]["params"]
    published = {name: tuple(shape) for name, shape in names.items()}
    flat = flatten_names(golden.abstract_params(model))
    # Their norms have shape [1, 1, 1, C].
    assert {
        name: (1, 1, 1, *leaf.shape) if "gn" in name or "norm" in name else leaf.shape
        for name, leaf in flat.items()
    } == published
    params = golden.filled(model, (1, 224, 224, 3), recipe)
    logits, values = captured(model, params, golden.images(2, 224, 224), golden.jit)
    key = f"bit_paper R50x1|{recipe}"
    if key in golden.arrays("bit_logits"):
        np.testing.assert_allclose(logits, golden.arrays("bit_logits")[key], rtol=0, atol=5e-5)
    values |= {"logits": logits, "stem": values["root_block"]}
    values |= {"norm_pre_head": values["norm-pre-head"]}
    for name in ("stem", "norm_pre_head", "pre_logits", "logits"):
        mean, std = golden.table("bit_detail")[key][name]["mean_std"]
        value = np.asarray(values[name], np.float64)
        assert value.mean() == pytest.approx(mean, abs=1e-5 * std), name
        assert value.std() == pytest.approx(std, rel=1e-5), name


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name: str) -> None:
    """Of two units a stage, of which the second stands for all others."""
    variant = get_variant(name)
    layers = variant["resnet_layers"]
    model = create_model(**{**variant, "resnet_layers": (2,) * len(layers)}, num_classes=1000)
    params = golden.abstract_params(model, (1, 32, 32, 3))
    others = sum(
        (units - 2) * count_parameters(params[f"block{stage}"]["unit02"])
        for stage, units in enumerate(layers, 1)
    )
    assert count_parameters(params) + others == COUNTS[name]


def test_the_models_of_the_papers_tables_are_there() -> None:
    names = {"R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R200x3"}  # tables 3 and 6
    assert names <= set(VARIANTS_OF["bit"])
    with pytest.raises(UserError, match=r"R26x1, R50x1.*|Did you mean 'R50x1'"):
        get_variant("R50")


def test_epsilons_stand_where_bit_has_them() -> None:
    """No golden number sees them: pixels are large, and kernels too."""
    kernel = np.random.default_rng(0).normal(size=(3, 3, 8, 4)).astype(np.float32)
    for scale in (1.0, 1e-5):  # a variance of 1e-10 is as large as epsilon
        centred = scale * (kernel - kernel.mean((0, 1, 2), keepdims=True))
        expected = centred / np.sqrt(centred.var((0, 1, 2), keepdims=True) + 1e-10)
        standardized = jax.jit(bit.weight_standardize)(kernel * np.float32(scale))
        np.testing.assert_allclose(standardized, expected, rtol=0, atol=1e-4)
    model = create_model(**TINY)
    images = np.float32(1e-3) * IMAGES  # the stem's output then has a variance of some 1e-5
    params = golden.filled(model, IMAGES.shape)
    _, values = captured(model, params, images)
    x = np.asarray(values["root_block"])
    groups = x.reshape(2, -1, 32, 2)  # [B, h*w, groups, C/groups]
    assert 1e-6 < groups.var() < 1e-4
    mean, var = (f((1, 3), keepdims=True) for f in (groups.mean, groups.var))
    normed = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    gn1 = params["block1"]["unit01"]["gn1"]
    expected = normed * gn1["scale"][None, None, None] + gn1["bias"][None, None, None]
    np.testing.assert_allclose(values["block1/unit01/gn1"], expected, rtol=0, atol=1e-3)


def loss_and_grads(model: Any, params: Any) -> tuple[jax.Array, dict[str, Any]]:
    def loss(p: Any) -> jax.Array:
        return jnp.sum(model.apply({"params": p}, IMAGES, train=True) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, flatten_names(grads)


def test_every_parameter_learns_and_remat_changes_no_number() -> None:
    sizes = {**TINY, "resnet_layers": (1,)}
    plain, full = create_model(**sizes), create_model(**sizes, remat="full")
    assert plain.remat != full.remat
    params = golden.filled(plain, IMAGES.shape)
    value, grads = loss_and_grads(plain, params)
    again, grads_again = loss_and_grads(full, params)
    assert float(again) == pytest.approx(float(value), rel=1e-5)
    assert grads.keys() == grads_again.keys()
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
        assert np.abs(grad).max() > 0, name
        # Sums in another order.
        atol = 1e-4 * np.abs(grad).max()
        np.testing.assert_allclose(grads_again[name], grad, rtol=0, atol=atol, err_msg=name)


def test_remat_keeps_the_inputs_of_units_only() -> None:
    def saved(remat: str) -> int:
        model = create_model(**{**TINY, "resnet_layers": (4,)}, remat=remat)
        params = golden.abstract_params(model, IMAGES.shape)
        apply = functools.partial(model.apply, train=True)
        kept = jax.eval_shape(
            lambda p: jax.vjp(lambda q: apply({"params": q}, IMAGES), p)[1], params
        )
        return sum(leaf.size for leaf in jax.tree.leaves(kept))

    # Beside the parameters themselves, 87 % of what is saved are activations inside the units.
    assert saved("full") < 0.75 * saved("none")


def test_initialisation() -> None:
    model = create_model(**{**TINY, "resnet_layers": (1,)}, head_bias_init=-10.0)
    init = jax.jit(lambda rng: model.init(rng, IMAGES, train=False)["params"])
    flat = flatten_names(init(jax.random.key(0)))
    assert not np.any(flat["head/kernel"])
    np.testing.assert_array_equal(flat["head/bias"], -10.0)


@pytest.mark.parametrize("size", [(17, 33), (224, 160), (1, 7)])
def test_any_size_and_the_grid_that_it_gives(size: tuple[int, int]) -> None:
    layers = (1, 1, 1)
    model = create_model(**{**TINY, "resnet_layers": layers})
    images = jnp.zeros((1, *size, 4))
    _, state = jax.eval_shape(
        lambda: model.init_with_output(
            jax.random.key(0), images, train=False, capture_intermediates=True
        )
    )
    value = state["intermediates"]["norm-pre-head"]["__call__"][0]
    assert value.shape[1:3] == token_grid(size, None, layers)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("patch_size", 16, "is not a key"),
        ("remat", "dots", "Known: none, full"),
        ("resnet_layers", (3, 0), "units of each stage"),
        ("resnet_width_factor", 0, "at least 1"),
        ("resnet_widths", 2, "Did you mean 'resnet_width_factor'"),
    ],
)
def test_what_a_resnet_cannot_do_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"model.{key}.*{message}"):
        create_model(**{**TINY, key: value})
