import jax.numpy as jnp
import numpy as np

from vit_jax.objectives.objective import LOSSES, one_hot_targets

LOGITS = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
LABELS = np.array([0, 4, 2, 2])


def test_softmax_is_minus_log_probability_of_the_label() -> None:
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    expected = -np.log(probabilities[np.arange(4), LABELS])
    targets = one_hot_targets(jnp.asarray(LABELS), 5, 0.0)
    np.testing.assert_allclose(LOSSES["softmax"](LOGITS, targets), expected, rtol=1e-5)


def test_sigmoid_is_summed_over_classes() -> None:
    p = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    y = np.eye(5)[LABELS]
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).sum(axis=-1)
    targets = one_hot_targets(jnp.asarray(LABELS), 5, 0.0)
    np.testing.assert_allclose(LOSSES["sigmoid"](LOGITS, targets), expected, rtol=1e-5)


def test_label_smoothing_spreads_its_mass_over_all_classes() -> None:
    targets = np.asarray(one_hot_targets(jnp.asarray([1]), 4, 0.1))
    np.testing.assert_allclose(targets, [[0.025, 0.925, 0.025, 0.025]], rtol=1e-6)
