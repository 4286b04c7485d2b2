"""Class weights against PyTorch and scikit-learn, over parts of a batch and devices."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from tests import tiny
from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.objectives.class_weights import balanced_weights, create_class_weights
from vit_jax.objectives.classification import Classification, MultiLabel
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import batch_sharding, create_mesh, replicated
from vit_jax.run import create_run
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.step import create_train_state, make_train_step

CLASSES = ("a", "b", "c")
WEIGHTS = (0.5, 3.0, 1.0)


class Linear(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        del train
        return nn.Dense(self.num_classes, name="head")(images.reshape(len(images), -1))


TASK = Task(Linear, (2, 2, 1), CLASSES)
RNG = jax.random.key(0)


def make_batch(**arrays: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(16, 2, 2, 1)).astype(np.float32)
    labels = np.array([0] * 9 + [1] + [2] * 6, np.int32)[rng.permutation(16)]
    batch = {"image": images, "label": labels, "mask": np.ones(16, np.float32)}
    return {**batch, **arrays}


def params_of(objective: Any) -> Any:
    kernel = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    assert objective.num_outputs == 3
    return {"head": {"kernel": kernel, "bias": np.zeros(3, np.float32)}}


def torch_logits(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.tensor(np.asarray(params["head"]["kernel"]), requires_grad=True)
    return torch.tensor(np.asarray(batch["image"])).reshape(16, 4) @ kernel, kernel


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_pytorch(smoothing: float) -> None:
    objective = Classification(TASK, class_weights=WEIGHTS, label_smoothing=smoothing)
    batch = make_batch(mask=np.float32(np.arange(16) < 13))
    params = params_of(objective)
    logits = torch_logits(params, batch)[0].detach()
    expected = torch.nn.functional.cross_entropy(
        logits[:13],
        torch.tensor(np.asarray(batch["label"]))[:13].long(),
        weight=torch.tensor(WEIGHTS),
        label_smoothing=smoothing,
    )
    loss, _ = jax.jit(objective.loss)(params, batch, RNG)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    # Evaluations of all recipes compare.
    plain = jax.jit(Classification(TASK).evaluate)(params, batch)["loss"]
    np.testing.assert_array_equal(jax.jit(objective.evaluate)(params, batch)["loss"], plain)


def test_a_loss_of_sigmoids_counts_as_often_as_its_label() -> None:
    objective = Classification(TASK, class_weights=WEIGHTS, loss="sigmoid")
    batch = make_batch()
    params = params_of(objective)
    losses = jax.jit(Classification(TASK, loss="sigmoid").evaluate)(params, batch)["loss"]
    weights = np.array(WEIGHTS)[np.asarray(batch["label"])]
    loss, _ = jax.jit(objective.loss)(params, batch, RNG)
    assert float(loss) == pytest.approx(np.average(losses, weights=weights), rel=1e-5)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_mean_is_that_of_the_global_batch(accumulation_steps: int) -> None:
    """Parts and devices have other labels, so other sums of weights, than the whole."""
    objective, batch = Classification(TASK, class_weights=WEIGHTS), make_batch()
    params = params_of(objective)
    logits, kernel = torch_logits(params, batch)
    labels = torch.tensor(np.asarray(batch["label"])).long()
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor(WEIGHTS))
    expected.backward()
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: jnp.float32(1.0))
    step = make_train_step(objective, tx, seed=0, accumulation_steps=accumulation_steps)
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        state = create_train_state(params, tx=tx, polyak_decay=0.0)
        placed = jax.device_put(state, replicated(mesh))
        after, metrics = jax.jit(step)(placed, {}, jax.device_put(batch, batch_sharding(mesh)))
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    gradient = np.asarray(params["head"]["kernel"]) - np.asarray(after.params["head"]["kernel"])
    assert kernel.grad is not None
    np.testing.assert_allclose(gradient, kernel.grad.numpy(), rtol=0, atol=1e-6)


def test_several_labels_have_the_positive_weights_of_pytorch() -> None:
    objective = MultiLabel(TASK, class_weights=WEIGHTS)
    batch = make_batch(label=np.random.default_rng(2).integers(0, 2, (16, 3)).astype(np.uint8))
    params = params_of(objective)
    logits = torch_logits(params, batch)[0].detach()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits,
        torch.tensor(np.asarray(batch["label"])).float(),
        pos_weight=torch.tensor(WEIGHTS),
        reduction="none",
    )
    loss, _ = jax.jit(objective.loss)(params, batch, RNG)
    assert float(loss) == pytest.approx(float(expected.sum(1).mean()), rel=1e-5)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    run = create_run(tiny.config(objective__class_weights="balanced"), create_mesh())
    labels = np.array([run.dataset.source[i]["label"] for i in range(100)])
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels)
    assert expected.min() < expected.max()
    batch = {"label": jnp.arange(10), "mask": jnp.ones(10)}
    mean = run.objective.prepare(batch)["mean_weight"][0]
    assert float(mean) == pytest.approx(expected.mean(), rel=1e-6)
    np.testing.assert_allclose(balanced_weights(labels, 10), expected)
    np.testing.assert_allclose(balanced_weights(np.array([[1, 0], [1, 1], [0, 0]]), 2), [0.5, 2])


@pytest.mark.parametrize(
    ("class_weights", "message"),
    [
        ("balance", "objective.class_weights='balance' is unknown. Did you mean 'balanced'"),
        ("balanced", "'balanced' gives class 'c' the weight inf"),
        ((1.0, 2.0), r"a number for each class \(3\)"),
        ((1.0, 0.0, 2.0), "gives class 'b' the weight 0"),
        ((1.0, "b", 2.0), "must be 'balanced', a number for each class"),
        ((("cat", 2.0),), "objective.class_weights='cat' is unknown. Known: a, b, c"),
    ],
)
def test_mistakes_are_named(class_weights: Any, message: str) -> None:
    assert create_class_weights((("b", 2.0),), CLASSES, None).tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(UserError, match=message):
        create_class_weights(class_weights, CLASSES, lambda: np.array([0, 0, 1]))
