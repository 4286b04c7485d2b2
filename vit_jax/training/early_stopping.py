"""Ends a run early: its metric no longer improves, or a callback requests it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.workdir.metrics import is_lowest_best


def create_ending(
    values: dict[int, float],
    *,
    metric: str,
    patience: int,
    min_delta: float,
    total_steps: int,
    on_evaluation: Callable[[int, dict[str, float]], Any] | None,
) -> Callable[[int, Mapping[str, float]], dict[str, float]]:
    """Returns a function to call with each step and its evaluations; {} continues the run.

    To end it: `planned_steps`, and `early_stopping_best_step` if the metric is the reason.

    Without a metric only the callback decides, see `train_and_evaluate`. `values` of the metric by
    step, from the checkpoint, count as if they had been measured now; new ones are added.
    """

    def ending(step: int, results: Mapping[str, float]) -> dict[str, float]:
        asked = on_evaluation is not None and on_evaluation(step, dict(results)) == "stop"
        best = None
        if metric in results:
            values[step] = results[metric]
            best = stalled_since(values, metric=metric, patience=patience, min_delta=min_delta)
        if step == total_steps or not (asked or best is not None):
            return {}
        entries: dict[str, float] = {"planned_steps": total_steps}
        reason = "on_evaluation requested it"
        if best is not None:
            entries["early_stopping_best_step"] = best
            reason = f"{metric} has not improved on {values[best]:.4f} at step {best}"
        logging.info("The run ends at step %d of %d: %s.", step, total_steps, reason)
        return entries

    return ending


def stalled_since(
    values: Mapping[int, float], *, metric: str, patience: int, min_delta: float
) -> int | None:
    """The best step if the last `patience` evaluations have not improved on it, else None.

    Early stopping as in Goodfellow et al., "Deep Learning", algorithm 7.1. `values`: by step;
    smaller gains than `min_delta`, or equal ones, do not count.
    """
    sign = -1.0 if is_lowest_best(metric) else 1.0
    best: int | None = None
    waited = 0
    for step, value in sorted(values.items()):
        waited += 1
        if best is None or sign * (value - values[best]) > min_delta:
            best, waited = step, 0
    return best if waited >= patience else None
