"""Loss functions, one value per example."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def sigmoid_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Binary cross-entropy summed over the classes: [B, K], [B, K] -> [B].

    The loss of the released ImageNet-21k models (vision_transformer, issue 34).
    """
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, targets), axis=-1)


# Of logits and targets, [B, K] each: [B].
LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": optax.softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
}


def one_hot_targets(labels: jax.Array, num_classes: int, label_smoothing: float) -> jax.Array:
    """Integer labels [B] -> [B, K]: 1 - s + s/K for the label, s/K for the others."""
    return optax.smooth_labels(jax.nn.one_hot(labels, num_classes), label_smoothing)
