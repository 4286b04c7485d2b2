"""Thorough evaluation of a classifier: top-1 and top-5 accuracy, loss, calibration, per example."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Reader, compile_outputs, stream_outputs

LOG_EVERY_SECONDS = 30


class ClassificationEvaluator:
    """Measures every example with `Classification.measure`; averages on the host."""

    def __init__(self, objective: Any, reader: Reader):
        """Raises UserError unless the objective is a classification."""
        if not hasattr(objective, "measure"):
            raise UserError(
                "evaluators.*.name='classification' needs an objective of one class per image; "
                "'average_precision' is for several, 'objective' works with any."
            )

        def outputs(params: Any, batch: Any) -> Any:
            return {**objective.measure(params, batch), "label": batch["label"]}

        self._step = compile_outputs(outputs, reader.mesh)
        self._reader = reader
        top5 = ("accuracy_top5",) if objective.num_outputs > 5 else ()
        self.metric_names = ("loss", "accuracy", *top5, "calibration_error", "num_examples")

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Means by name; see `ObjectiveEvaluator`."""
        return summarize(self.examples(params, on_batch=on_batch))

    def examples(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, np.ndarray]:
        """`label` and `measure` of every example in the order of the split: [N] each.

        Raises:
          UserError: a loss is not finite.
        """
        num_examples = self._reader.dataset.num_examples
        parts, done = [], 0
        start = last = time.monotonic()
        for part in stream_outputs(self._step, params, self._reader, on_batch=on_batch):
            parts.append(part)
            done += len(part["loss"])
            now = time.monotonic()
            if now - last > LOG_EVERY_SECONDS:
                last, speed = now, done / (now - start)
                logging.info("%d of %d images, %.0f images/s", done, num_examples, speed)
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        check_losses(arrays["loss"])
        return arrays


def check_losses(losses: np.ndarray) -> None:
    """Raises UserError for a loss [N] that is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(
            f"the loss of {len(bad)} of {len(losses)} examples is not finite, first of example "
            f"{bad[0]}; the parameters are damaged, or --loss is not theirs."
        )


def summarize(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means over the examples, in float64, and the calibration error."""
    means = {
        name: float(np.mean(values, dtype=np.float64))
        for name, values in arrays.items()
        if name not in ("label", "prediction", "confidence")
    }
    error = calibration_error(arrays["confidence"], arrays["accuracy"])
    return {**means, "calibration_error": error, "num_examples": len(arrays["loss"])}


def calibration_error(confidence: np.ndarray, correct: np.ndarray, *, num_bins: int = 15) -> float:
    """Expected calibration error (Guo et al., 1706.04599, section 2).

    The mean over examples of |accuracy - mean confidence| of their bin of confidences; bins have
    equal width, (0, 1/num_bins] first. The paper has 15.

    Args:
      confidence: probability of the predicted class [N].
      correct: whether it is the right one [N].
    """
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)  # [N]
    gaps = np.bincount(bins, weights=np.asarray(correct, np.float64) - confidence)
    return float(np.abs(gaps).sum() / len(bins))


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes [K] among labels or predictions [N], and int [K, K]: row i was taken for j."""
    found, places = np.unique(np.stack([labels, predictions]), return_inverse=True)
    rows, columns = places.reshape(2, -1)
    cells = np.bincount(rows * len(found) + columns, minlength=len(found) ** 2)
    return found, cells.reshape(len(found), len(found))


def real_accuracy(predictions: np.ndarray, labels: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Accuracy on ReaL labels ("Are we done with ImageNet?", 2006.07159), and its number of images.

    A prediction [N] is right if it is one of the image's labels (N sets, not all empty); images
    without labels do not count.
    """
    hits = [int(p) in kept for p, kept in zip(predictions, labels, strict=True) if len(kept)]
    return sum(hits) / len(hits), len(hits)
