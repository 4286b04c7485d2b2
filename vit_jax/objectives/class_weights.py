"""Class weights of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.kinds import check_known

KEY = "objective.class_weights"


def create_class_weights(
    given: str | Sequence[Any],
    class_names: Sequence[str],
    read_labels: Callable[[], np.ndarray] | None,
) -> np.ndarray:
    """Float32 [K] in the order of the classes.

    Args:
      given: "balanced", K numbers, or pairs (class, number); other classes get 1.
      class_names: K names.
      read_labels: returns all training labels, [N], or [N, K] of 0 and 1.

    Raises:
      UserError: wrong number of weights, an unknown class, or a weight that is not positive and
        finite, such as the balanced weight of a class without images.
    """
    if isinstance(given, str):
        check_known(KEY, given, ("balanced",))
        assert read_labels is not None
        weights = balanced_weights(read_labels(), len(class_names))
    else:
        weights = _explicit_weights(given, class_names)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(bad):
        raise UserError(
            f"{KEY}={given!r} gives class {class_names[bad[0]]!r} the weight {weights[bad[0]]:g}; "
            "it must be positive and finite. Set the weights, as ((CLASS, NUMBER), ...)."
        )
    return np.asarray(weights, np.float32)


def balanced_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Weights [K] that compensate for the frequencies of the classes.

    For labels [N]: N / (K * count), scikit-learn's `balanced`, with mean 1 over the examples. For
    labels [N, K], each class separately: images without it over images with it, as PyTorch
    recommends for `BCEWithLogitsLoss(pos_weight=)`.
    """
    with np.errstate(divide="ignore"):
        if labels.ndim == 1:
            return len(labels) / (num_classes * np.bincount(labels, minlength=num_classes))
        counts = labels.sum(axis=0, dtype=np.int64)
        return (len(labels) - counts) / counts


def _explicit_weights(given: Sequence[Any], class_names: Sequence[str]) -> np.ndarray:
    try:
        if all(isinstance(weight, tuple | list) for weight in given):
            pairs = {str(name): float(value) for name, value in given}
            for name in pairs:
                check_known(KEY, name, class_names)
            return np.array([pairs.get(name, 1.0) for name in class_names])
        weights = np.array([float(weight) for weight in given])
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{KEY}={given!r} must be 'balanced', a number for each class, or pairs such as "
            f"(({class_names[0]!r}, 2.0),)."
        ) from error
    if len(weights) != len(class_names):
        raise UserError(
            f"{KEY}={given!r} has {len(weights)} weights for {len(class_names)} classes; give one "
            f"for each, or pairs such as (({class_names[0]!r}, 2.0),)."
        )
    return weights
