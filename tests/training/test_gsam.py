"""GSAM against big_vision's `gsam_gradient`, and the learning rate that its distance follows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.golden import VIT
from tests.training.test_sam import TEACHER, Toy, toy_batch, toy_params
from vit_jax.training.gradients import create_gradient
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.schedule import create_schedule
from vit_jax.training.step import create_train_state, make_train_step

# What big_vision's trainers/proj/gsam/gsam.py (@0127fb6) gives for `toy_loss` and the settings of
# its config: learning rate -> gradients of a and b.
BIG_VISION = {
    3e-3: (
        (0.20212945, 0.25652367, 0.42541817),
        (73.583954, 147.16791, -0.0019656161, -0.0039312323),
    ),
    1.2e-3: (
        (0.24364683, 0.27272117, 0.49907964),
        (30.265871, 60.531742, -0.002339982, -0.004679964),
    ),
    3e-5: (
        (0.32609075, 0.33667737, 0.65690088),
        (14.142318, 28.284636, -0.0031094442, -0.0062188883),
    ),
}
PARAMS = {"a": np.float32([1.0, -2.0, 0.5]), "b": np.float32([[0.3, 0.7], [-1.1, 0.2]])}
BATCH = {"image": np.float32([0.5, 1.5, -1.0]), "label": np.float32([0.4, -0.6])}


def toy_loss(params: Any, batch: Any, _rng: jax.Array) -> Any:
    outputs = params["b"] @ jnp.float32([1.0, 2.0]) - batch["label"]
    return jnp.sum(jnp.sin(batch["image"] * params["a"]) ** 2) + jnp.sum(outputs**4), {}


LOSS = float(toy_loss(PARAMS, BATCH, jax.random.key(0))[0])


def test_it_is_big_visions() -> None:
    value_and_grad = jax.value_and_grad(toy_loss, has_aux=True)
    gradient = jax.jit(functools.partial(create_gradient("gsam"), value_and_grad))
    for rate, expected in BIG_VISION.items():
        fraction = (rate - 3e-5) / (3e-3 - 3e-5)
        (value, _), grads = gradient(PARAMS, BATCH, jax.random.key(0), fraction)
        assert float(value) == LOSS  # of the first pass
        # Float32 on both sides, of gradients up to 150 that decompose into ones of 0.002.
        for name, values in zip("ab", expected, strict=True):
            np.testing.assert_allclose(grads[name].ravel(), values, rtol=1e-5, atol=2e-5)


def test_the_relative_rate_at_the_start_the_peak_and_the_end() -> None:
    kwargs = {"total_steps": 100, "warmup_steps": 20}
    schedule = create_schedule("linear", learning_rate=3e-3, linear_end=3e-4, **kwargs)
    relative = schedule.relative
    rates = [float(relative(step)) for step in (0, 1, 20, 60, 100)]
    np.testing.assert_allclose(rates, [0.0, 0.0, 1.0, 0.5, 0.0], atol=1e-6)
    flat = create_schedule("constant", **kwargs).relative
    assert [float(flat(step)) for step in (20, 100)] == [1.0, 1.0]


def test_the_step_hands_over_the_rate() -> None:
    """At the end of the training GSAM is that of rho_min."""
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: jnp.float32(1.0))
    state = create_train_state(toy_params(), tx=tx, polyak_decay=0.0)

    def after(relative_rate: Any, **kwargs: float) -> Any:
        gradient = create_gradient("gsam", **kwargs)
        step = make_train_step(Toy(0.0), tx, seed=0, gradient=gradient, relative_rate=relative_rate)
        return jax.jit(step)(state, TEACHER, toy_batch())[0].params["below"]

    at_end = after(jnp.zeros_like, rho_max=0.5, rho_min=0.1)
    np.testing.assert_allclose(at_end, after(jnp.ones_like, rho_max=0.1, rho_min=0.1), rtol=1e-6)
    assert np.abs(at_end - after(jnp.ones_like, rho_max=0.5, rho_min=0.1)).max() > 1e-3
