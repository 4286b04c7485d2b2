"""Evaluator names to objects."""

from __future__ import annotations

from typing import Any

from vit_jax.errors import check_known
from vit_jax.evaluators.classification import ClassificationEvaluator

EVALUATORS = {"classification": ClassificationEvaluator}


def create_evaluator(name: str, **kwargs: Any) -> Any:
    """Builds the evaluator called `name`: a function from parameters to `{metric: float}`.

    Raises:
      UserError: unknown name; unknown keyword arguments are a TypeError.
    """
    check_known("evaluators.*.name", name, EVALUATORS)
    return EVALUATORS[name](**kwargs)
