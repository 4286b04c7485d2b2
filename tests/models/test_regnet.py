"""RegNetY; its numbers beside timm's are in tests/pretrained/test_timm_resnet.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.parameters.table import table_of
from vit_jax.trees import flatten_names

TINY: dict[str, Any] = {"name": "regnet", "num_classes": 3, "stage_layers": (1, 1)}
TINY |= {"stage_widths": (8, 16), "group_width": 8}
IMAGES = golden.images(2, 17, 20)


def loss_and_grads(model: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """The loss of an update with the new statistics, and its gradients."""

    def loss(p: Any) -> Any:
        logits, stored = model.apply({"params": p}, IMAGES, train=True, mutable=["buffers"])
        return jnp.sum(logits**2), stored.get("buffers", {})

    value, grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return value, jax.device_get(flatten_names(grads))


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_have_no_gradient_and_all_else_learns(frozen: bool) -> None:
    sizes = {**TINY, "stage_layers": (1,), "stage_widths": (8,), "frozen_norms": frozen}
    model = create_model(**sizes, remat="full" if frozen else "none")
    (_, stored), grads = loss_and_grads(model, golden.filled(model, IMAGES.shape))
    table = table_of(model)
    statistics = {name for name in grads if table.find(name).row.is_statistic}
    assert {name for name, grad in grads.items() if not np.any(grad)} == statistics
    assert flatten_names(stored).keys() == (set() if frozen else statistics)


def test_recomputation_changes_no_statistic() -> None:
    plain = create_model(**{**TINY, "stage_layers": (1,), "stage_widths": (8,)})
    params = golden.filled(plain, IMAGES.shape)
    (value, stored), _ = loss_and_grads(plain, params)
    (again, stored_again), _ = loss_and_grads(plain.clone(remat="full"), params)
    assert float(again) == pytest.approx(float(value), rel=1e-5)
    for name, array in flatten_names(stored).items():
        np.testing.assert_allclose(flatten_names(stored_again)[name], array, rtol=1e-5, atol=1e-6)


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
    ],
)
def test_what_it_cannot_do_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"model.{key}.*{message}"):
        create_model(**{**TINY, key: value})
