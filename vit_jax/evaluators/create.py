"""The kinds of evaluators by name."""

from __future__ import annotations

from typing import Any

from vit_jax.evaluators.average_precision import AveragePrecisionEvaluator
from vit_jax.evaluators.classification import ClassificationEvaluator
from vit_jax.evaluators.few_shot import FewShotEvaluator
from vit_jax.evaluators.linear_probe import LinearProbeEvaluator
from vit_jax.evaluators.nearest_neighbors import NearestNeighborsEvaluator
from vit_jax.evaluators.objective import ObjectiveEvaluator

# Each has `metric_names`, and returns `{metric: float}` when called with parameters.
# These are built as `Kind(objective, reader, *, key=default, ...)`,
OF_OUTPUTS: dict[str, Any] = {
    "objective": ObjectiveEvaluator,
    "classification": ClassificationEvaluator,
    "average_precision": AveragePrecisionEvaluator,
}
# these as `Kind(features, *, key=default, ...)`.
OF_FEATURES: dict[str, Any] = {
    "few_shot": FewShotEvaluator,
    "linear_probe": LinearProbeEvaluator,
    "nearest_neighbors": NearestNeighborsEvaluator,
}
EVALUATORS = {**OF_OUTPUTS, **OF_FEATURES}
