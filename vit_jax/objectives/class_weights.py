"""Class weights of the loss."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.kinds import check_known

KEY = "objective.class_weights"


def create_class_weights(
    weights: str | Sequence[Any],
    class_names: Sequence[str],
    read_labels: Callable[[], np.ndarray] | None,
) -> np.ndarray:
    """Float32 [K] in the order of the classes.

    UserError: wrong number of weights, an unknown class, or a weight that is not positive and
    finite, such as the balanced weight of a class without images.

    Args:
      weights: "balanced", K numbers, or pairs (class, number); other classes get 1.
      class_names: K names.
      read_labels: returns all training labels, [N], or [N, K] of 0 and 1.
    """
    if isinstance(weights, str):
        check_known(KEY, weights, ("balanced",))
        assert read_labels is not None
        values = balanced_weights(read_labels(), len(class_names))
    else:
        values = _explicit_weights(weights, class_names)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        raise UserError(
            f"{KEY}={weights!r} gives class {class_names[bad[0]]!r} the weight {values[bad[0]]:g}; "
            "it must be positive and finite. Set the weights, as ((CLASS, NUMBER), ...)."
        )
    return np.asarray(values, np.float32)


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


def _explicit_weights(weights: Sequence[Any], class_names: Sequence[str]) -> np.ndarray:
    try:
        if not all(isinstance(weight, tuple | list) for weight in weights):
            return np.array([float(value) for _, value in zip(class_names, weights, strict=True)])
        by_name = {str(name): float(value) for name, value in weights}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}={weights!r} must be 'balanced', a number for each class ({len(class_names)}), "
            f"or pairs such as (({class_names[0]!r}, 2.0),)."
        ) from error
    for name in by_name:
        check_known(KEY, name, class_names)
    return np.array([by_name.get(name, 1.0) for name in class_names])
