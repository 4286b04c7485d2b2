"""Sharpness-aware minimisation against two passes by hand, and together with everything else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import VIT
from vit_jax.objectives.objective import Batch, Metrics, Objective
from vit_jax.parameters.sharding import batch_sharding, create_mesh, replicated
from vit_jax.training.gradients import create_gradient
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.step import create_train_state, make_train_step

RHO = 0.3
TEACHER = {"teacher": np.float32([[0.5, -1.0, 2.0]])}


class Toy(Objective):
    """Two layers that learn from a constant teacher, with dropout of the input."""

    def __init__(self, dropout: float):
        super().__init__()
        self._dropout = dropout

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        kept = jax.random.bernoulli(rng, 1.0 - self._dropout, batch["image"].shape)
        x = jnp.where(kept, batch["image"], 0.0)
        outputs = jnp.tanh(x @ params["below"]) @ params["head"]
        errors = jnp.square(outputs - batch["label"][:, None] * params["teacher"])
        return jnp.mean(errors), {"mean": jnp.mean(outputs)}


def toy_batch() -> Batch:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 5)).astype(np.float32)
    ones = np.ones(8, np.float32)
    return {"image": images, "label": np.arange(8, dtype=np.float32), "mask": ones}


def toy_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"below": (5, 4), "head": (4, 3)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def update(
    params: Any,
    *,
    rho: float | None = RHO,
    dropout: float = 0.0,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of one update, and its metrics; with `rho` None the plain one."""
    gradient = create_gradient("plain") if rho is None else create_gradient("sam", rho=rho)
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: jnp.float32(1.0))
    step = make_train_step(Toy(dropout), tx, seed=7, gradient=gradient, **options)
    mesh = mesh or create_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        state = create_train_state(params, tx=tx, polyak_decay=0.0)
        placed = jax.device_put((state, TEACHER), replicated(mesh))
        batch = jax.device_put(toy_batch(), batch_sharding(mesh))
        after, metrics = jax.jit(step)(*placed, batch)
    return jax.tree.map(lambda a, b: a - np.asarray(b), params, after.params), metrics


def by_hand(params: Any, dropout: float) -> Any:
    """Two gradients and the step between them."""
    rng = jax.random.fold_in(jax.random.key(7), 0)
    loss = jax.jit(jax.grad(lambda p: Toy(dropout).loss({**p, **TEACHER}, toy_batch(), rng)[0]))
    first = {name: np.asarray(grad, np.float64) for name, grad in loss(params).items()}
    norm = np.sqrt(sum((grad**2).sum() for grad in first.values()))
    worst = {name: np.float32(params[name] + RHO * grad / norm) for name, grad in first.items()}
    return jax.device_get(loss(worst))


def assert_close(ours: Any, expected: Any) -> None:
    """1e-5: a gradient of order 1 is the difference of two parameters in float32."""
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=1e-5, err_msg=name)


def test_it_is_the_gradient_at_the_worst_parameters_near_by() -> None:
    """With the dropout of the first pass, and a teacher that stays where it is."""
    ours, metrics = update(toy_params(), dropout=0.5)
    plain, at_start = update(toy_params(), rho=None, dropout=0.5)
    assert_close(ours, by_hand(toy_params(), 0.5))
    assert np.abs(ours["below"] - plain["below"]).max() > 0.1
    assert metrics["loss"] == at_start["loss"]
    assert metrics["mean"] == at_start["mean"]
    norm = np.sqrt(sum((grad**2).sum() for grad in ours.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_both_passes_are_accumulated() -> None:
    whole, _ = update(toy_params())
    assert_close(update(toy_params(), accumulation_steps=4)[0], whole)


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_no_gradient_is_no_nan(target: float) -> None:
    """Below a zero head, and where nothing is left to learn."""
    params = {**toy_params(), "head": np.zeros((4, 3), np.float32)}
    step = create_gradient("sam", rho=RHO)

    def loss(params: Any, batch: Batch, _rng: jax.Array) -> tuple[jax.Array, Metrics]:
        outputs = batch["image"] @ params["below"] @ params["head"]
        return jnp.mean(jnp.square(outputs - target)), {}

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    gradient = jax.jit(functools.partial(step, value_and_grad))
    _, grads = gradient(params, toy_batch(), jax.random.key(0), 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert bool(np.any(grads["head"])) == bool(np.any(grads["below"])) == bool(target)


def test_eight_devices_take_the_step_of_one() -> None:
    """Sums over devices come in another order, and both passes have them."""
    ours, _ = update(toy_params(), dropout=0.5, mesh=create_mesh(data=4, fsdp=2))
    assert_close(ours, update(toy_params(), dropout=0.5)[0])
