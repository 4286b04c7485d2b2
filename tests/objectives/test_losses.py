import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.errors import UserError
from vit_jax.objectives.classification import LOSSES, Classification, one_hot_targets
from vit_jax.objectives.objective import Task

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


def test_binary_is_torchs_mean_and_counts_both_labels_of_a_mixed_image() -> None:
    """As DeiT III trains: `targets.gt(0)` of mixed targets, then BCEWithLogitsLoss."""
    one, other = (np.eye(5, dtype=np.float32)[labels] for labels in (LABELS, [1, 4, 0, 3]))
    mixed = 0.9 * one + 0.1 * other
    loss = torch.nn.BCEWithLogitsLoss()
    expected = loss(torch.from_numpy(LOGITS), torch.from_numpy(mixed).gt(0.0).float())
    losses = LOSSES["binary"](LOGITS, mixed)
    assert losses.shape == (4,)
    np.testing.assert_allclose(np.mean(losses), expected.numpy(), rtol=1e-6)
    assert np.abs(losses - LOSSES["binary"](LOGITS, one)).max() > 0.1


def test_binary_takes_no_smoothing() -> None:
    with pytest.raises(UserError, match="label_smoothing=0.1 gives every class a target above 0"):
        Classification(Task.of(object()), loss="binary", label_smoothing=0.1)


def test_label_smoothing_spreads_its_mass_over_all_classes() -> None:
    targets = np.asarray(one_hot_targets(jnp.asarray([1]), 4, 0.1))
    np.testing.assert_allclose(targets, [[0.025, 0.925, 0.025, 0.025]], rtol=1e-6)
