"""Numbers about predictions that are more than means over examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def calibration_error(confidence: np.ndarray, correct: np.ndarray, *, num_bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from accuracy, on average.

    Examples are put into bins of equal width, (0, 1/num_bins] first. The error is the mean over
    examples of |accuracy - mean confidence| of their bin ("On Calibration of Modern Neural
    Networks", 1706.04599, section 2, which has 15 bins).

    Args:
      confidence: probability of the predicted class [N].
      correct: whether it is the right one [N].
      num_bins: of [0, 1].
    """
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)  # [N]
    gaps = np.bincount(bins, weights=np.asarray(correct, np.float64) - confidence)
    return float(np.abs(gaps).sum() / len(bins))


def real_accuracy(predictions: np.ndarray, labels: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Accuracy on ReaL labels ("Are we done with ImageNet?", 2006.07159).

    A prediction is right if it is one of the image's labels; images without labels do not count.

    Args:
      predictions: [N].
      labels: N sets, not all empty.

    Returns:
      The accuracy, and how many images count.
    """
    hits = [int(p) in kept for p, kept in zip(predictions, labels, strict=True) if len(kept)]
    return sum(hits) / len(hits), len(hits)
