"""A loss that spans the batch, in parts: the gradient of the whole, on any mesh."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.objective import Batch, Metrics, Objective
from vit_jax.parameters.sharding import batch_sharding, create_mesh, replicated
from vit_jax.run import create_run
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.step import create_train_state, make_train_step

SIZE, PARTS = 32, 4


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class TwoTowers(Objective):
    """Which label belongs to which image? With dropout, a temperature and a constant.

    The weights make the order of the rows matter.
    """

    spans_batch = True

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.constants = {"teacher": normal(1, 64, 8)}
        self._dropout = dropout

    def embed(self, params: Any, batch: Batch, rng: jax.Array) -> Any:
        kept = jax.random.bernoulli(rng, 1.0 - self._dropout, batch["image"].shape)
        hidden = jnp.tanh(jnp.where(kept, batch["image"], 0.0) @ params["image"])
        features = (hidden @ params["teacher"], jnp.take(params["text"], batch["label"], axis=0))
        return tuple(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in features)

    def loss_of(self, params: Any, embeddings: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        image, text = embeddings  # [B, 8] each
        logits = jnp.exp(params["temperature"]) * image @ text.T  # [B, B]
        rows = jnp.arange(len(image))
        values = optax.softmax_cross_entropy_with_integer_labels(logits, rows)
        hits = jnp.argmax(logits, axis=-1) == rows
        return jnp.mean(values * batch["weight"]), {"accuracy": jnp.mean(jnp.float32(hits))}


def pairs() -> Batch:
    rng = np.random.default_rng(0)
    return {
        "image": np.float32(rng.normal(size=(SIZE, 6))),
        "label": np.int32(rng.permutation(SIZE)),
        "weight": np.float32(rng.uniform(0.5, 1.5, SIZE)),
    }


def towers() -> dict[str, Any]:
    return {"image": normal(2, 6, 64), "text": normal(3, SIZE, 8), "temperature": np.float32(1.0)}


@functools.cache
def compiled_step(
    mesh: jax.sharding.Mesh, dropout: float = 0.0, **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """An update in PARTS parts unless told otherwise, and its arguments.

    Its rate of 1 shows the gradient.
    """
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: jnp.float32(1.0))
    objective = TwoTowers(dropout)
    step = make_train_step(objective, tx, seed=5, **{"accumulation_steps": PARTS, **options})
    with jax.set_mesh(mesh):
        state = create_train_state(towers(), tx=tx, polyak_decay=0.0)
        learned, constants = jax.device_put((state, objective.constants), replicated(mesh))
        arguments = (learned, constants, jax.device_put(pairs(), batch_sharding(mesh)))
        return jax.jit(step).lower(*arguments).compile(), arguments


def one_device() -> jax.sharding.Mesh:
    return create_mesh(devices=jax.devices()[:1])


@functools.cache
def update(
    dropout: float = 0.0, mesh: jax.sharding.Mesh | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """The gradient of one update, and its metrics."""
    step, arguments = compiled_step(mesh or one_device(), dropout, **options)
    after, metrics = step(*arguments)
    params = arguments[0].params
    grads = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, after.params)
    return grads, jax.tree.map(float, metrics)


def by_hand(dropout: float) -> tuple[jax.Array, Any]:
    """Loss and gradient of the parts' embeddings put together, each with the key of its part."""
    objective, batch = TwoTowers(dropout), pairs()
    rng = jax.random.fold_in(jax.random.key(5), 0)

    def loss(params: Any) -> jax.Array:
        params = {**params, **objective.constants}
        whole = [jnp.zeros((SIZE, 8)), jnp.zeros((SIZE, 8))]
        for part in range(PARTS):
            rows = {name: x[part::PARTS] for name, x in batch.items()}
            embeddings = objective.embed(params, rows, jax.random.fold_in(rng, part))
            whole = [x.at[part::PARTS].set(y) for x, y in zip(whole, embeddings, strict=True)]
        return objective.loss_of(params, whole, batch)[0]

    return jax.jit(jax.value_and_grad(loss))(towers())


def assert_close(ours: Any, expected: Any) -> None:
    """1e-6: a gradient of at most 0.1 is the difference of two parameters of order 1."""
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=1e-6, err_msg=name)


def test_parts_have_the_gradient_of_the_whole() -> None:
    whole, at_once = update(accumulation_steps=1)
    assert min(np.abs(grad).max() for grad in whole.values()) > 1e-2
    parts, metrics = update()
    assert_close(parts, whole)
    assert metrics == pytest.approx(at_once, rel=1e-6)


def test_each_part_has_its_own_dropout_and_the_same_both_times() -> None:
    """On eight devices, of which each keeps its rows."""
    mesh = create_mesh(data=4, fsdp=2)
    loss, grads = by_hand(0.5)
    ours, metrics = update(dropout=0.5, mesh=mesh)
    assert_close(ours, grads)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert metrics["loss"] != pytest.approx(update()[1]["loss"], rel=1e-3)
    program = compiled_step(mesh, 0.5)[0].as_text()
    # Embeddings are gathered to be compared, gradients are summed.
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    assert set(re.findall(rf" ({kinds})\(", program)) == {"all-gather", "all-reduce"}


def test_parts_need_less_memory() -> None:
    needed = [
        compiled_step(one_device(), accumulation_steps=steps)[0].memory_analysis()
        for steps in (1, PARTS)
    ]
    assert needed[1].temp_size_in_bytes < needed[0].temp_size_in_bytes


class InOnePiece(Classification):
    """Compares the examples, and does not say how to embed a part of them."""

    spans_batch = True


def test_without_embeddings_there_are_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "in_one_piece", InOnePiece)
    config = tiny.config(objective__name="in_one_piece")
    mesh = create_mesh()
    create_run(config, mesh)
    config.train_step.accumulation_steps = 2
    message = "train_step.accumulation_steps=2 must be 1: objective.name='in_one_piece' compares"
    with pytest.raises(UserError, match=message):
        create_run(config, mesh)
