"""Objective names to objects."""

from __future__ import annotations

from typing import Any

from vit_jax.objectives.classification import Classification, MultiLabel
from vit_jax.objectives.distillation import HardDistillation, SoftDistillation
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective, Task

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "masked_patch": MaskedPatch,
    "hard_distillation": HardDistillation,
    "soft_distillation": SoftDistillation,
}


def create_objective(name: str, *, task: Task, **kwargs: Any) -> Any:
    """Builds the objective called `name` and its model; UserError for an invalid value."""
    return OBJECTIVES[name](task, **kwargs)  # type: ignore[call-arg]
