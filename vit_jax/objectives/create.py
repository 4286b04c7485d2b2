"""Objectives by name; each is built as `Kind(task, *, key=default, ...)`."""

from __future__ import annotations

from typing import Any

from vit_jax.objectives.classification import Classification, MultiLabel
from vit_jax.objectives.contrastive import Contrastive, SigmoidContrastive
from vit_jax.objectives.distillation import HardDistillation, SoftDistillation
from vit_jax.objectives.mae import MaskedAutoencoding
from vit_jax.objectives.masked_patch import MaskedPatch
from vit_jax.objectives.objective import Objective, Task

OBJECTIVES: dict[str, Any] = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "masked_patch": MaskedPatch,
    "mae": MaskedAutoencoding,
    "hard_distillation": HardDistillation,
    "soft_distillation": SoftDistillation,
    "contrastive": Contrastive,
    "sigmoid_contrastive": SigmoidContrastive,
}


def create_objective(task: Task, *, name: str, **keys: Any) -> Objective:
    """The objective called `name`."""
    return OBJECTIVES[name](task, **keys)
