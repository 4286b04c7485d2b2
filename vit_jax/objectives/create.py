"""Objectives by name; each is built as `Kind(task, *, key=default, ...)`."""

from typing import Any

from vit_jax.kinds import Kinds
from vit_jax.objectives.objective import Objective, Task

OBJECTIVES = Kinds(
    classification="vit_jax.objectives.classification:Classification",
    multi_label="vit_jax.objectives.classification:MultiLabel",
    segmentation="vit_jax.objectives.dense:Segmentation",
    pixel_regression="vit_jax.objectives.dense:PixelRegression",
    regression="vit_jax.objectives.regression:Regression",
    masked_patch="vit_jax.objectives.masked_patch:MaskedPatch",
    mae="vit_jax.objectives.mae:MaskedAutoencoding",
    hard_distillation="vit_jax.objectives.distillation:HardDistillation",
    soft_distillation="vit_jax.objectives.distillation:SoftDistillation",
    feature_distillation="vit_jax.objectives.feature_distillation:FeatureDistillation",
    contrastive="vit_jax.objectives.contrastive:Contrastive",
    dino="vit_jax.objectives.dino:Dino",
    ibot="vit_jax.objectives.ibot:Ibot",
    sigmoid_contrastive="vit_jax.objectives.contrastive:SigmoidContrastive",
)


def create_objective(task: Task, *, name: str, **keys: Any) -> Objective:
    """The objective called `name`."""
    return OBJECTIVES[name](task, **keys)
