from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vit_jax.models.create import create_model, get_variant
from vit_jax.models.flops import TRAIN_OVER_FORWARD, forward_flops
from vit_jax.models.tokens import token_grid
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Task


def model_flops(variant: str, size: int, num_classes: int = 1000, **kwargs: Any) -> float:
    model = create_model(**get_variant(variant), num_classes=num_classes, **kwargs)
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)
    return forward_flops(lambda p, x: model.apply(p, x, train=False), params, images)


def closed_form(variant: str, size: int, num_classes: int = 1000) -> float:
    """2 x multiply-adds of a plain ViT with a class token."""
    row = get_variant(variant)
    hidden, layers, mlp = row["hidden_size"], row["num_layers"], row["mlp_dim"]
    rows, columns = token_grid((size, size), row["patch_size"])
    patches, tokens = rows * columns, rows * columns + 1
    block = tokens * (4 * hidden**2 + 2 * hidden * mlp) + 2 * tokens**2 * hidden
    stem = patches * row["patch_size"] ** 2 * 3 * hidden
    return 2 * (stem + layers * block + hidden * num_classes)


# GMACs of facts/paper.md 9.1, rounded there to two digits.
@pytest.mark.parametrize(
    ("variant", "size", "gmacs"),
    [("Ti/16", 224, 1.25), ("B/16", 384, 55.48), ("L/32", 224, 15.38), ("G/14", 224, 483.75)],
)
def test_a_vit_costs_what_the_closed_form_says(variant: str, size: int, gmacs: float) -> None:
    flops = model_flops(variant, size, scan=True)
    assert flops == closed_form(variant, size)
    assert round(flops / 2e9, 2) == gmacs


# timm's GMACs, which include the ResNet's norms: up to 3.4 % of a whole ResNet.
@pytest.mark.parametrize(("variant", "gmacs"), [("R+Ti/16", 0.44), ("R50x1", 4.23)])
def test_a_resnet_costs_what_timm_counts(variant: str, gmacs: float) -> None:
    assert 0.96 * gmacs < model_flops(variant, 224) / 2e9 < gmacs


def test_a_loop_costs_as_much_as_a_scan() -> None:
    assert model_flops("Ti/16", 64, remat="full") == closed_form("Ti/16", 64)


def test_training_reproduces_the_papers_exaflops() -> None:
    """Table 6, B/16 on JFT-300M, 7 epochs: 224 exaFLOPs; the paper rounds to whole numbers."""
    model = create_model(**get_variant("B/16"), num_classes=18_291, scan=True)
    objective = Classification(Task.of(model))
    batch = {
        "image": jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.uint8),
        "label": jax.ShapeDtypeStruct((1,), jnp.int32),
        "mask": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    params = jax.eval_shape(objective.init, jax.random.key(0), batch)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    per_image = TRAIN_OVER_FORWARD * forward_flops(objective.loss, params, batch, rng)
    assert per_image == 3 * closed_form("B/16", 224, 18_291)
    assert round(per_image * 303e6 * 7 / 1e18) == 224


def test_the_backward_pass_doubles_it() -> None:
    """What TRAIN_OVER_FORWARD says, for a layer whose input also needs a gradient."""
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    w = jax.ShapeDtypeStruct((16, 4), jnp.float32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    forward = forward_flops(loss, x, w)
    assert forward == 2 * 8 * 16 * 4
    assert forward_flops(jax.grad(loss, argnums=(0, 1)), x, w) == 3 * forward


def test_branches_count_as_their_mean() -> None:
    """An update with several patch sizes runs one of them, each as often as the others."""

    def function(index: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.switch(index, [lambda x: x @ x, lambda x: x @ x @ x], x)

    arguments = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert forward_flops(function, *arguments) == 1.5 * 2 * 4**3
