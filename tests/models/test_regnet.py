"""RegNetY; its numbers beside timm's are in tests/pretrained/test_timm_resnet.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import pretrain
from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.training.optimizer import create_optimizer
from vit_jax.trees import flatten_names

TINY: dict[str, Any] = {
    "name": "regnet",
    "num_classes": 3,
    "stage_layers": (1, 1),
    "stage_widths": (8, 16),
    "group_width": 8,
}
IMAGES = golden.images(2, 17, 20)


def loss_and_grads(model: Any, params: Any) -> tuple[jax.Array, dict[str, Any]]:
    def loss(p: Any) -> jax.Array:
        return jnp.sum(model.apply({"params": p}, IMAGES, train=True) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, jax.device_get(flatten_names(grads))


def test_statistics_are_constants_and_all_else_learns() -> None:
    sizes = {**TINY, "stage_layers": (1,), "stage_widths": (8,)}
    plain, full = create_model(**sizes), create_model(**sizes, remat="full")
    params = golden.filled(plain, IMAGES.shape)
    value, grads = loss_and_grads(plain, params)
    again, _ = loss_and_grads(full, params)
    assert float(again) == pytest.approx(float(value), rel=1e-5)
    statistics = {name for name in grads if name.endswith(("/mean", "/var"))}
    assert {name for name, grad in grads.items() if not np.any(grad)} == statistics
    # Weight decay leaves them out too, also where it is for all parameters.
    tx = create_optimizer("adamw", schedule=lambda _: 0.1, weight_decay=0.5, decay_parameters="all")
    flat = flatten_names(params)
    updates, _ = jax.device_get(jax.jit(lambda p, g: tx.update(g, tx.init(p), p))(flat, grads))
    assert {name for name, update in updates.items() if not np.any(update)} == statistics


def test_any_size_and_the_grid_that_it_gives() -> None:
    model = create_model(**TINY, dtype="bfloat16")
    for size in ((16, 16), (17, 33), (1, 7)):
        images = jnp.zeros((1, *size, 3))
        logits, state = jax.eval_shape(
            lambda x: model.init_with_output(
                jax.random.key(0), x, train=False, capture_intermediates=True
            ),
            images,
        )
        value = state["intermediates"]["stage2_block1"]["__call__"][0]
        assert value.shape[1:3] == token_grid(size, None, (1, 1))
        assert (value.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stage_layers", (), "must be a number for each stage"),
        ("stage_widths", (8, 16, 24), "must be a number for each stage"),
        ("group_width", 3, "does not divide model.stage_widths"),
        ("remat", "dots", "Known: none, full"),
    ],
)
def test_what_it_cannot_do_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"model.{key}.*{message}"):
        create_model(**{**TINY, key: value})


def test_it_cannot_be_pre_trained() -> None:
    with pytest.raises(UserError, match="cannot be pre-trained: its batch norms"):
        pretrain.get_config("RegNetY-16GF,imagenet2012")
