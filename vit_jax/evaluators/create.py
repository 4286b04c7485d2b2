"""Evaluator names to objects."""

from __future__ import annotations

from typing import Any

from vit_jax.errors import check_known
from vit_jax.evaluators.classification import ClassificationEvaluator
from vit_jax.evaluators.objective import ObjectiveEvaluator
from vit_jax.evaluators.stream import Reader

# Each is built as `Kind(objective, reader, *, key=default, ...)`, has `metric_names`, and is called
# with parameters: it gives `{metric: float}`.
EVALUATORS: dict[str, Any] = {
    "objective": ObjectiveEvaluator,
    "classification": ClassificationEvaluator,
}


def create_evaluator(name: str, *, objective: Any, reader: Reader, **kwargs: Any) -> Any:
    """Builds the evaluator called `name`.

    Raises:
      UserError: unknown name, or not for this objective; unknown keyword arguments are a TypeError.
    """
    check_known("evaluators.*.name", name, EVALUATORS)
    return EVALUATORS[name](objective, reader, **kwargs)
