"""Full evaluation of predicted pixels and numbers: mIoU, depth errors, MAE, R2."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.classification import ExampleEvaluator
from vit_jax.evaluators.stream import Reader


class _OfObjective(ExampleEvaluator):
    """Summarises `objective.measure` of an objective that has the key `needed`."""

    needed: str

    def __init__(self, objective: Any, reader: Reader):
        if self.needed not in objective.example_keys:
            keys = f"{self.needed!r}; objective.name has {', '.join(objective.example_keys)}"
            raise UserError(f"this evaluator needs an objective that reads {keys}.")
        super().__init__(objective.measure, reader)


class SegmentationEvaluator(_OfObjective):
    """`overlap_means`, and the mean `loss` over all pixels that count."""

    metric_names = ("mIoU", "pixel_accuracy", "loss", "num_examples")
    needed = "label_map"

    @staticmethod
    def summarize(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        pixels = max(float(np.sum(arrays["pixels"], dtype=np.float64)), 1.0)
        loss = float(np.dot(arrays["loss"], arrays["pixels"]) / pixels)
        return {**overlap_means(arrays), "loss": loss}


def overlap_means(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """`mIoU`, the mean over classes that occur or are predicted, and `pixel_accuracy`."""
    overlaps = class_overlaps(arrays)
    counted = overlaps[~np.isnan(overlaps)]
    hits, labelled = (arrays[k].sum(dtype=np.float64) for k in ("hits", "labelled"))
    return {
        "mIoU": float(np.mean(counted)) if len(counted) else 0.0,
        "pixel_accuracy": float(hits / max(labelled, 1)),
        "num_examples": len(arrays["hits"]),
    }


def class_overlaps(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Intersection over union of each class over all images, [K]; NaN for one that is nowhere."""
    names = ("hits", "labelled", "predicted")
    hits, labelled, predicted = (arrays[name].sum(axis=0, dtype=np.float64) for name in names)
    union = labelled + predicted - hits
    return np.where(union > 0, hits / np.maximum(union, 1), np.nan)


class PixelRegressionEvaluator(_OfObjective):
    """Means over the images that have a pixel that counts, as usual for depths (1406.2283)."""

    needed = "value_map"

    def __init__(self, objective: Any, reader: Reader):
        super().__init__(objective, reader)
        self.metric_names = (*objective.measures, "num_examples")

    @staticmethod
    def summarize(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        counted = arrays["pixels"] > 0
        means = {
            name: float(np.mean(values[counted], dtype=np.float64)) if counted.any() else 0.0
            for name, values in arrays.items()
            if name != "pixels"
        }
        return {**means, "num_examples": int(counted.sum())}


class RegressionEvaluator(_OfObjective):
    """`mae`, `rmse` and `r2`, means over the numbers; of several, also `mae_NAME` of each."""

    needed = "target"

    def __init__(self, objective: Any, reader: Reader):
        super().__init__(objective, reader)
        self._names = error_names(objective.numbers["names"])
        self.metric_names = ("mae", "rmse", "r2", *self._names, "loss", "num_examples")

    def summarize(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:  # type: ignore[override]
        loss = float(np.mean(arrays["loss"], dtype=np.float64))
        return {**number_errors(self._names, arrays["value"], arrays["target"]), "loss": loss}


def error_names(names: Sequence[str]) -> list[str]:
    """Of the errors of several numbers; [] of one."""
    return [f"mae_{name}" for name in names] if len(names) > 1 else []


def number_errors(names: Sequence[str], value: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """Of predictions and targets [N, K]; `names` of the K errors, or none.

    R2 is 1 - squared error / variance of these targets; 0 if they are all the same.
    """
    target = np.asarray(target, np.float64)
    error = value - target
    mae, mse, variance = np.abs(error).mean(0), np.square(error).mean(0), target.var(0)
    r2 = np.where(variance > 0, 1 - mse / np.where(variance > 0, variance, 1), 0.0)
    return {
        "mae": float(mae.mean()),
        "rmse": float(np.sqrt(mse).mean()),
        "r2": float(r2.mean()),
        **dict(zip(names, mae.tolist(), strict=False)),
        "num_examples": len(error),
    }
