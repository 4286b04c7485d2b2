"""Full evaluation of a classifier: accuracy, calibration; mean average precision."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Hook, Reader, compile_outputs, nothing


class ExampleEvaluator:
    """Computes metrics of every example on the devices; a subclass summarises them on the host."""

    example_keys: tuple[str, ...] = ()  # the objective's
    summarize: Callable[[dict[str, np.ndarray]], dict[str, Any]]  # `examples` to metrics by name

    def __init__(self, outputs: Callable[[Any, Any], Any], reader: Reader):
        """`outputs(params, batch)` returns arrays [B, ...], including `loss` [B]."""
        self._step = compile_outputs(outputs, reader.mesh)
        self._reader = reader

    def examples(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, np.ndarray]:
        """The outputs for every example, in order: [N, ...]; UserError if a loss is not finite."""
        arrays = self._reader.outputs(self._step, params, on_batch)
        if len(bad := np.flatnonzero(~np.isfinite(arrays["loss"]))):
            raise UserError(
                f"the loss of {len(bad)} of {len(arrays['loss'])} examples is not finite, first of "
                f"example {bad[0]}; the parameters are corrupt, or --loss is not the training loss."
            )
        return arrays

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, float]:
        """Metrics by name; see `ObjectiveEvaluator`."""
        return self.summarize(self.examples(params, on_batch=on_batch))


def summarize(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means over the examples, in float64, calibration error, and mean F1 over classes."""
    means = {
        name: float(np.mean(values, dtype=np.float64))
        for name, values in arrays.items()
        if name not in ("label", "prediction", "confidence")
    }
    error = calibration_error(arrays["confidence"], arrays["accuracy"])
    f1 = float(np.mean(class_scores(arrays["label"], arrays["prediction"])["f1"]))
    count = len(arrays["loss"])
    return {**means, "calibration_error": error, "macro_f1": f1, "num_examples": count}


def class_scores(labels: np.ndarray, predictions: np.ndarray) -> dict[str, np.ndarray]:
    """Of the classes among labels or predictions [N], [K] each; 0 if undefined.

    `class`, number of `images` with this label, `accuracy` (of these; the recall), `precision`
    (share of correct predictions of the class) and `f1`, the harmonic mean of the two.
    """
    classes, places = np.unique(np.stack([labels, predictions]), return_inverse=True)
    label, prediction = places.reshape(2, -1)
    images, predicted, hits = (
        np.bincount(numbers, minlength=len(classes))
        for numbers in (label, prediction, label[label == prediction])
    )
    return {
        "class": classes,
        "images": images,
        "accuracy": hits / np.maximum(images, 1),
        "precision": hits / np.maximum(predicted, 1),
        "f1": 2 * hits / (images + predicted),
    }


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Expected calibration error (Guo et al., 1706.04599, section 2).

    The mean over examples of |accuracy - mean confidence| of their confidence bin; bins have
    equal width, (0, 1/15] first. `confidence`: of the predicted class; `correct`: 0 or 1, [N].
    """
    num_bins = 15  # as in the paper
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)  # [N]
    gaps = np.bincount(bins, weights=np.asarray(correct, np.float64) - confidence)
    return float(np.abs(gaps).sum() / len(bins))


def real_accuracy(predictions: np.ndarray, labels: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Accuracy on ReaL labels ("Are we done with ImageNet?", 2006.07159), and number of images.

    A prediction [N] is correct if it is one of the image's labels (N sets, not all empty); images
    without labels do not count.
    """
    pairs = zip(predictions.tolist(), labels, strict=True)
    hits = [prediction in correct for prediction, correct in pairs if correct]
    return sum(hits) / len(hits), len(hits)


def summarize_ranking(arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """`mAP`, the mean over the classes that have images; the mean `loss`; `num_examples`."""
    precisions = average_precisions(arrays["logits"], arrays["label"])
    counted = precisions[~np.isnan(precisions)]
    return {
        "mAP": float(np.mean(counted)) if len(counted) else 0.0,
        "loss": float(np.mean(arrays["loss"], dtype=np.float64)),
        "num_examples": len(arrays["loss"]),
    }


def average_precisions(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Average precision of each class: scores and labels (0 or 1) [N, K] -> [K].

    The sum over thresholds, from the highest score down, of the precision times the gain in
    recall; images of equal score share a threshold. NaN for a class without images.
    """
    precisions = np.full(scores.shape[1], np.nan)
    for k in np.flatnonzero(labels.any(axis=0)):
        order = np.argsort(-scores[:, k], kind="stable")
        ranked, hits = scores[order, k], np.cumsum(labels[order, k], dtype=np.int64)
        last = np.append(ranked[1:] != ranked[:-1], True)  # image of each threshold
        hits, seen = hits[last], np.flatnonzero(last) + 1
        precisions[k] = np.sum(hits / seen * np.diff(hits, prepend=0)) / hits[-1]
    return precisions


class ClassificationEvaluator(ExampleEvaluator):
    """`Classification.measure` of every example, and `label`: [N] each."""

    summarize = staticmethod(summarize)

    def __init__(self, objective: Any, reader: Reader):
        """Raises UserError unless the objective is classification."""
        if not hasattr(objective, "measure"):
            raise UserError(
                "evaluators.*.name='classification' needs an objective with one class per image; "
                "'average_precision' is for several, 'objective' works with any."
            )

        def outputs(params: Any, batch: Any) -> Any:
            return {**objective.measure(params, batch), "label": batch["label"]}

        super().__init__(outputs, reader)
        top5 = ("accuracy_top5",) if objective.num_outputs > 5 else ()
        own = ("calibration_error", "macro_f1", "num_examples")
        self.metric_names = ("loss", "accuracy", *top5, *own)


class AveragePrecisionEvaluator(ExampleEvaluator):
    """Ranks all images by their logit for each class: `label`, `logits` [N, K], `loss` [N]."""

    metric_names = ("mAP", "loss", "num_examples")
    summarize = staticmethod(summarize_ranking)

    def __init__(self, objective: Any, reader: Reader):
        """Raises UserError unless the objective has several labels per image."""
        if not objective.several_labels:
            raise UserError(
                "evaluators.*.name='average_precision' needs objective.name='multi_label'; "
                "'objective' and 'classification' are for one label per image."
            )

        def outputs(params: Any, batch: Any) -> Any:
            logits = objective.predict(params, batch)
            return {**objective.values(logits, batch), "logits": logits, "label": batch["label"]}

        super().__init__(outputs, reader)
