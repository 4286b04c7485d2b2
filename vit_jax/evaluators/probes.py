"""Classifiers on frozen features: linear probe (logistic regression) and nearest neighbours."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.frozen_features import Features, FrozenFeaturesEvaluator, Split, accuracy

STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the regularisation


class LinearProbeEvaluator(FrozenFeaturesEvaluator):
    """Logistic regression; its regularisation is chosen on a fifth of the training split."""

    metric_names = ("accuracy", "l2", "num_examples")

    def __init__(
        self,
        features: Features,
        *,
        l2: tuple[float, ...] = STRENGTHS,
        max_iterations: int = 1000,
        **shared: Any,
    ):
        """See `fit`; the metric `l2` is the chosen strength. UserError for a number out of range.

        Args:
          l2: regularisation strengths to choose from.
          max_iterations: maximum for L-BFGS.
        """
        super().__init__(features, **shared)
        if not l2 or min(l2) < 0 or max_iterations < 1:
            raise UserError(f"linear_probe: {l2=}, {max_iterations=}: l2 >= 0, iterations > 0.")
        self._l2, self._max_iterations = l2, max_iterations

    def measure(self, train: Split, test: Split) -> dict[str, float]:
        classes, l2 = probe(train, test.x, self._num_classes, self._l2, self._max_iterations)
        return {"accuracy": accuracy(classes, test.y), "l2": l2}


def probe(
    train: Split,
    x: np.ndarray,
    num_classes: int,
    candidates: Sequence[float] = STRENGTHS,
    max_iterations: int = 1000,
) -> tuple[np.ndarray, float]:
    """Predicted classes [N] of features [N, D], and the chosen regularisation, see `fit`."""
    mean, std = train.x.mean(axis=0), train.x.std(axis=0) + 1e-5
    x_train, x, y_train = (train.x - mean) / std, (x - mean) / std, train.y

    def predict(x_train: np.ndarray, y_train: np.ndarray, x: np.ndarray, l2: float) -> np.ndarray:
        weights, bias = fit(x_train, y_train, num_classes, l2, max_iterations)
        return (x @ weights + bias).argmax(axis=1)

    best = candidates[0]
    if len(candidates) > 1:
        order = np.random.default_rng(0).permutation(len(x_train))
        held, fitted = np.split(order, [max(len(order) // 5, 1)])
        data = x_train[fitted], y_train[fitted], x_train[held]
        accuracies = [accuracy(predict(*data, l2), y_train[held]) for l2 in candidates]
        best = candidates[int(np.argmax(accuracies))]
    return predict(x_train, y_train, x, best), best


_SHORT_PRODUCT = 10**9  # multiplications; a fraction of a second in one thread


def fit(
    x: np.ndarray, labels: np.ndarray, num_classes: int, l2: float, max_iterations: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises the mean cross-entropy plus l2 / 2 |W|^2; the bias is not regularised.

    From features [N, D] and labels [N] to W [D, K] and bias [K].
    """
    from scipy.optimize import minimize  # takes 0.2 s, and only probes need it
    from scipy.special import log_softmax
    from threadpoolctl import threadpool_limits

    x = np.asarray(x, np.float64)
    targets = np.eye(num_classes)[labels]
    shape = (x.shape[1], num_classes)

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = flat[:-num_classes].reshape(shape), flat[-num_classes:]
        logs = log_softmax(x @ weights + bias, axis=1)
        loss = -np.sum(targets * logs) / len(x) + l2 / 2 * np.sum(weights**2)
        difference = (np.exp(logs) - targets) / len(x)  # [N, K]
        gradient = x.T @ difference + l2 * weights
        return loss, np.concatenate([gradient.ravel(), difference.sum(axis=0)])

    start = np.zeros(shape[0] * num_classes + num_classes)
    options = {"maxiter": max_iterations}
    # BLAS's threads spin while they wait for one another: beside other work a fit of hundreds of
    # short products takes minutes with them.
    threads = 1 if x.size * num_classes < _SHORT_PRODUCT else None
    with threadpool_limits(threads, "blas"):
        best = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options).x
    return best[:-num_classes].reshape(shape), best[-num_classes:]


_ROWS = 1024  # of similarities at a time


class NearestNeighborsEvaluator(FrozenFeaturesEvaluator):
    """A vote among an image's nearest neighbours."""

    metric_names = ("accuracy", "num_examples")

    def __init__(
        self,
        features: Features,
        *,
        num_neighbors: int = 20,
        temperature: float = 0.07,
        **shared: Any,
    ):
        """See `vote`; UserError for a number out of range.

        Args:
          num_neighbors: number of votes.
          temperature: of the weights; if low, only the nearest one counts.
        """
        super().__init__(features, **shared)
        if num_neighbors < 1 or not temperature > 0:
            raise UserError(
                f"nearest_neighbors: {num_neighbors=}, {temperature=} must be positive."
            )
        self._num_neighbors, self._temperature = num_neighbors, temperature

    def measure(self, train: Split, test: Split) -> dict[str, float]:
        classes = vote(*train, test.x, self._num_classes, self._num_neighbors, self._temperature)
        return {"accuracy": accuracy(classes, test.y)}


def vote(
    x_train: np.ndarray,
    y_train: np.ndarray,
    x: np.ndarray,
    num_classes: int,
    num_neighbors: int,
    temperature: float,
) -> np.ndarray:
    """Predicted classes [N] of features [N, D].

    Each of the nearest neighbours by cosine similarity votes with exp(cosine / temperature).
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
