"""Any number of labels per image: a sigmoid for each class."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.objectives.losses import sigmoid_cross_entropy
from vit_jax.objectives.objective import (
    Batch,
    Metrics,
    Objective,
    Task,
    check_logits_per_image,
    masked_mean,
    scale_images,
)


class MultiLabel(Objective):
    """Binary cross-entropy of every class, summed over the classes.

    A batch holds `image` [B, H, W, C], `label` [B, K] of 0 and 1, and `mask` [B]. A mixed batch
    also has `other_label` [B, K] and `label_weight` [B]: its targets are mixed by that weight.
    """

    several_labels = True
    probabilities_by = "sigmoid"

    def __init__(self, task: Task):
        """
        Args:
          task: its model gives logits [B, K] of images.

        Raises:
          UserError: a model without one row of logits per image.
        """
        super().__init__()
        self.class_names = task.class_names
        self.num_outputs = len(task.class_names)
        self.model = task.build_model(self.num_outputs)
        check_logits_per_image(self.model)

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean over the real examples."""
        images = scale_images(batch["image"])
        logits = self.model.apply({"params": params}, images, train=True, rngs={"dropout": rng})
        targets = jnp.asarray(batch["label"], jnp.float32)
        if "other_label" in batch:
            weight = batch["label_weight"][:, None]
            targets = weight * targets + (1.0 - weight) * batch["other_label"]
        return masked_mean(sigmoid_cross_entropy(logits, targets), batch["mask"]), {}

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """`loss` [B]."""
        return self.values(self.predict(params, batch), batch)

    def values(self, logits: jax.Array, batch: Batch) -> Metrics:
        """`loss` [B] of logits [B, K]."""
        return {"loss": sigmoid_cross_entropy(logits, jnp.asarray(batch["label"], jnp.float32))}

    def predict(self, params: Any, batch: Batch) -> jax.Array:
        """Logits [B, K]."""
        return self.model.apply({"params": params}, scale_images(batch["image"]), train=False)
