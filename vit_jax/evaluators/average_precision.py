"""Mean average precision, for images with any number of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.classification import check_losses
from vit_jax.evaluators.stream import Reader, compile_outputs, stream_outputs


class AveragePrecisionEvaluator:
    """Ranks all images by each class's logit, on the host."""

    metric_names = ("mAP", "loss", "num_examples")

    def __init__(self, objective: Any, reader: Reader):
        """Raises UserError unless the objective has several labels per image."""
        if not objective.several_labels:
            raise UserError(
                "evaluators.*.name='average_precision' needs objective.name='multi_label'; "
                "'objective' and 'classification' are for one label per image."
            )

        def outputs(params: Any, batch: Any) -> Any:
            logits = objective.predict(params, batch)
            values = objective.values(logits, batch)
            return {**values, "logits": logits, "label": batch["label"]}

        self._step = compile_outputs(outputs, reader.mesh)
        self._reader = reader

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """`mAP`, the mean over the classes that an image has; the mean `loss`; `num_examples`."""
        return summarize(self.examples(params, on_batch=on_batch))

    def examples(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, np.ndarray]:
        """`label` and `logits` [N, K], `loss` [N], in the order of the split."""
        parts = list(stream_outputs(self._step, params, self._reader, on_batch=on_batch))
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        check_losses(arrays["loss"])
        return arrays


def summarize(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """What the evaluator returns, from `examples`."""
    precisions = average_precisions(arrays["logits"], arrays["label"])
    counted = precisions[~np.isnan(precisions)]
    return {
        "mAP": float(np.mean(counted)) if len(counted) else 0.0,
        "loss": float(np.mean(arrays["loss"], dtype=np.float64)),
        "num_examples": len(arrays["loss"]),
    }


def average_precisions(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Average precision of each class: scores and labels (0 or 1) [N, K] -> [K].

    The sum over the thresholds, from the highest score on, of the precision there times the recall
    gained; images of equal score come at once. NaN for a class that no image has.
    """
    found = np.full(scores.shape[1], np.nan)
    for k in np.flatnonzero(labels.any(axis=0)):
        order = np.argsort(-scores[:, k], kind="stable")
        ranked, hits = scores[order, k], np.cumsum(labels[order, k], dtype=np.int64)
        last = np.append(ranked[1:] != ranked[:-1], True)  # of each threshold's images
        hits, seen = hits[last], np.flatnonzero(last) + 1
        found[k] = np.sum(hits / seen * np.diff(hits, prepend=0)) / hits[-1]
    return found
