"""Few-shot accuracy (section 4.1): least squares on a few frozen features per class."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.frozen_features import Features, FrozenFeaturesEvaluator, Split, accuracy

_BIAS = 100.0  # so large that regularisation hardly affects the bias


class FewShotEvaluator(FrozenFeaturesEvaluator):
    """The accuracy of `fit` for several numbers of shots and several seeds."""

    def __init__(
        self,
        features: Features,
        *,
        shots: tuple[int, ...] = (1, 5, 10, 25),
        num_seeds: int = 3,
        l2: float = 1024.0,
        **shared: Any,
    ):
        """See `fit`; UserError for a number out of range.

        Args:
          shots: images per class; each gives a metric `accuracy_5shot`.
          num_seeds: selections of images, 0, 1, ...; with two or more, `accuracy_5shot_ci95` is
            half the width of the 95 % confidence interval of their mean.
          l2: strength of the regularisation.
        """
        super().__init__(features, **shared)
        if not shots or min(shots) < 1 or not 1 <= num_seeds <= 10 or not l2 > 0:
            raise UserError(
                f"few_shot: {shots=}, {num_seeds=}, {l2=}: need shots >= 1, 1 to 10 seeds, l2 > 0."
            )
        self._shots, self._num_seeds, self._l2 = shots, num_seeds, l2
        names = [f"accuracy_{n}shot" for n in shots]
        if num_seeds > 1:
            names += [f"{name}_ci95" for name in names]
        self.metric_names = (*names, "num_examples")

    def measure(self, train: Split, test: Split) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for shots in self._shots:
            values = []
            for seed in range(self._num_seeds):
                chosen = choose_shots(train.y, self._num_classes, shots, seed)
                fitted = fit(train.x[chosen], train.y[chosen], self._num_classes, self._l2)
                values.append(accuracy(scores(test.x, *fitted).argmax(axis=1), test.y))
            metrics[f"accuracy_{shots}shot"] = float(np.mean(values))
            if (interval := confidence95(values)) is not None:
                metrics[f"accuracy_{shots}shot_ci95"] = interval
        return metrics


def confidence95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean (Student's t); None for n = 1."""
    from scipy.special import stdtrit  # takes 0.1 s, and few ask for intervals

    n = len(values)
    if n < 2:
        return None
    return float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))


def choose_shots(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """Indices of `shots` images of each class; all images of a class that has fewer.

    The first of a permutation per class, so that larger sets contain smaller ones (big_vision).
    """
    rng = np.random.default_rng(seed)
    of_class = (np.flatnonzero(labels == k) for k in range(num_classes))
    return np.concatenate([rng.permutation(indices)[:shots] for indices in of_class])


def fit(
    x: np.ndarray, labels: np.ndarray, num_classes: int, l2: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Regularised least squares with targets -1 and 1, in closed form, in float64.

    W = (X^T X + l2 I)^-1 X^T Y, on features standardised by their mean and standard
    deviation, with a bias; if N is less than their width, the same from X X^T. From features [N, D]
    and labels [N] to W [D + 1, K], mean [D] and standard deviation [D]; see `scores`.
    """
    x = np.asarray(x, np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    x = _whitened(x, mean, std)
    y = 2.0 * np.eye(num_classes)[labels] - 1.0  # [N, K]
    if len(x) < x.shape[1]:
        return x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(len(x)), y), mean, std
    return np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y), mean, std


def scores(x: np.ndarray, weights: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Features [N, D] -> [N, K], with the results of `fit`."""
    return _whitened(np.asarray(x, np.float64), mean, std) @ weights


def _whitened(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return np.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=_BIAS)  # [N, D + 1]
