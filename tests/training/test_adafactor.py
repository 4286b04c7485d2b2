"""Adafactor as ViT-g was trained with, against its formulas in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.golden import VIT
from vit_jax.training.optimizer import create_optimizer
from vit_jax.trees import flatten_names, unflatten_names

BLOCK = "Transformer/encoderblock_"
# Two axes of at least 32; three of which two are; one that is too small; a vector.
SHAPES = {
    "head/kernel": (40, 33),
    f"{BLOCK}0/MultiHeadDotProductAttention_0/query/kernel": (32, 2, 35),
    f"{BLOCK}1/MultiHeadDotProductAttention_0/query/kernel": (32, 2, 35),
    f"{BLOCK}0/MlpBlock_0/Dense_0/kernel": (32, 31),
    f"{BLOCK}1/MlpBlock_0/Dense_0/kernel": (32, 31),
    f"{BLOCK}0/LayerNorm_0/bias": (48,),
    f"{BLOCK}1/LayerNorm_0/bias": (48,),
}
RATE = 0.01


def factored_axes(name: str) -> tuple[int, int] | None:
    """(larger, smaller) of the two largest axes, written down by hand."""
    return {"head/kernel": (0, 1)}.get(name, (2, 0) if "query" in name else None)


def reference(
    name: str, param: np.ndarray, grads: list[np.ndarray], *, cap: float, weight_decay: float
) -> np.ndarray:
    """Algorithm 4 of 1804.04235 in float64, with the choices of 2106.04560."""
    axes, param = factored_axes(name), param.astype(np.float64)
    row = column = full = 0.0
    momentum = np.zeros_like(param)
    for t, grad in enumerate(grads, start=1):
        grad = grad.astype(np.float64)
        decay = min(cap, 1.0 - t**-0.8)
        squares = grad**2 + 1e-30
        if axes is None:
            full = decay * full + (1 - decay) * squares
            second_moment = full
        else:
            row = decay * row + (1 - decay) * squares.mean(axis=axes[0], keepdims=True)
            column = decay * column + (1 - decay) * squares.mean(axis=axes[1], keepdims=True)
            second_moment = row * column / row.mean(axis=axes[1], keepdims=True)
        momentum = 0.9 * momentum + 0.1 * grad / np.sqrt(second_moment)
        decayed = weight_decay if name.endswith("kernel") else 0.0
        param = param - RATE * (momentum + decayed * param)
    return param


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in SHAPES.items():
        # Rows of different sizes, or the factors would all be one.
        row_size = np.exp(rng.normal(size=(shape[0],) + (1,) * (len(shape) - 1)))
        values[name] = np.float32(rng.normal(size=shape) * row_size)
    return values


def trained(tx: optax.GradientTransformation, params: Any, grads: list[Any]) -> Any:
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def test_five_updates_are_the_formulas() -> None:
    """A b2 of 0.6 is reached by the fourth update: 1 - 4 ** -0.8 = 0.67."""
    rates: Any = {"schedule": lambda _: jnp.float32(RATE), "weight_decay": 0.03}
    tx = create_optimizer("adafactor", table=VIT, **rates, b2=0.6)
    params, grads = arrays(0), [arrays(seed) for seed in range(1, 6)]
    after, _ = trained(tx, unflatten_names(params), [unflatten_names(grad) for grad in grads])
    for name, value in flatten_names(after).items():
        expected = reference(
            name, params[name], [grad[name] for grad in grads], cap=0.6, weight_decay=0.03
        )
        # Five float32 updates of about RATE each.
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6 * RATE * 5, err_msg=name)


def test_the_scan_form_is_factored_like_the_loop_form() -> None:
    """40 layers or more would otherwise be one of the two largest axes of a bias."""
    tx = create_optimizer("adafactor", table=VIT, schedule=lambda _: jnp.float32(RATE))
    params, grads = unflatten_names(arrays(0)), [unflatten_names(arrays(seed)) for seed in (1, 2)]
    loop, loop_state = trained(tx, params, grads)
    scan, scan_state = trained(tx, VIT.stack(params), [VIT.stack(grad) for grad in grads])
    for name, value in flatten_names(VIT.stack(loop)).items():
        # Some two float32 roundings of updates of RATE.
        np.testing.assert_allclose(
            flatten_names(scan)[name], value, rtol=1e-6, atol=1e-6 * RATE, err_msg=name
        )
    assert flatten_names(loop_state[0][0].v_row)[f"{BLOCK}0/LayerNorm_0/bias"].shape == (1,)
    rows = flatten_names(scan_state[0][0].v_row)
    assert rows["Transformer/encoderblock/LayerNorm_0/bias"].shape == (2, 1)
    name = "Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
    assert rows[name].shape == (2, 32, 2)


def test_a_bfloat16_momentum_is_all_that_is_as_large_as_the_parameters() -> None:
    tx = create_optimizer("adafactor", table=VIT, schedule=lambda _: 0.1, momentum_dtype="bfloat16")
    params = {"head": {"kernel": jnp.zeros((400, 300))}}
    state = tx.init(params)
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.size == 400 * 300]
    assert [str(leaf.dtype) for leaf in large] == ["bfloat16"]
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 400 * 300 + 800
    without = create_optimizer("adafactor", table=VIT, schedule=lambda _: 0.1, momentum=0.0)
    assert max(leaf.size for leaf in jax.tree.leaves(without.init(params))) == 400
