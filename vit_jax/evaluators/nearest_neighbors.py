"""k-nearest-neighbour accuracy on frozen features, as DINO reports it (2104.14294, section 4.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.frozen_features import Features, FrozenFeaturesEvaluator, accuracy

_ROWS = 1024  # of similarities at a time


class NearestNeighborsEvaluator(FrozenFeaturesEvaluator):
    """The classes of an image's nearest neighbours vote."""

    metric_names = ("accuracy", "num_examples")

    def __init__(
        self,
        features: Features,
        *,
        num_neighbors: int = 20,
        temperature: float = 0.07,
        **shared: Any,
    ):
        """See `vote`.

        Args:
          num_neighbors: that vote.
          temperature: of their weights; low counts the nearest alone.

        Raises:
          UserError: see `FrozenFeaturesEvaluator`; or a number that makes no sense.
        """
        super().__init__(features, **shared)
        if num_neighbors < 1 or not temperature > 0:
            raise UserError(
                f"nearest_neighbors: {num_neighbors=}, {temperature=} must be positive."
            )
        self._num_neighbors, self._temperature = num_neighbors, temperature

    def measure(
        self, x_train: np.ndarray, y_train: np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> dict[str, float]:
        predictions = vote(
            x_train, y_train, x, self._num_classes, self._num_neighbors, self._temperature
        )
        return {"accuracy": accuracy(predictions, y)}


def vote(
    x_train: np.ndarray,
    y_train: np.ndarray,
    x: np.ndarray,
    num_classes: int,
    num_neighbors: int,
    temperature: float,
) -> np.ndarray:
    """Predicted classes [N] of features [N, D].

    Each of the nearest neighbours by cosine votes with exp(cosine / temperature).
    """
    x_train, x = _normalized(x_train), _normalized(x)
    num_neighbors = min(num_neighbors, len(x_train))
    predictions = []
    for start in range(0, len(x), _ROWS):
        cosine = x[start : start + _ROWS] @ x_train.T  # [n, N_train]
        nearest = np.argpartition(-cosine, num_neighbors - 1, axis=1)[:, :num_neighbors]
        weights = np.exp((np.take_along_axis(cosine, nearest, axis=1) - 1.0) / temperature)
        votes = np.zeros((len(cosine), num_classes))
        np.add.at(votes, (np.arange(len(cosine))[:, None], y_train[nearest]), weights)
        predictions.append(votes.argmax(axis=1))
    return np.concatenate(predictions)


def _normalized(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
