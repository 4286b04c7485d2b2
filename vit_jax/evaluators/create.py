"""Evaluator names to objects."""

from __future__ import annotations

from typing import Any

from vit_jax.evaluators.average_precision import AveragePrecisionEvaluator
from vit_jax.evaluators.classification import ClassificationEvaluator
from vit_jax.evaluators.objective import ObjectiveEvaluator
from vit_jax.evaluators.stream import Reader

# Each is built as `Kind(objective, reader, *, key=default, ...)`, has `metric_names`, and returns
# `{metric: float}` when called with parameters.
EVALUATORS: dict[str, Any] = {
    "objective": ObjectiveEvaluator,
    "classification": ClassificationEvaluator,
    "average_precision": AveragePrecisionEvaluator,
}


def create_evaluator(name: str, *, objective: Any, reader: Reader, **kwargs: Any) -> Any:
    """Builds the evaluator called `name`; UserError if it does not work with this objective."""
    return EVALUATORS[name](objective, reader, **kwargs)
