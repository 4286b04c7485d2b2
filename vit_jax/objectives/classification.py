"""Supervised classification (paper, section 4.1): one label per image, or several."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.objectives.class_weights import create_class_weights
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, images_of, masked_mean


def sigmoid_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Binary cross-entropy summed over the classes: [B, K], [B, K] -> [B].

    The loss of the released ImageNet-21k models (vision_transformer, issue 34).
    """
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, targets), axis=-1)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Binary cross-entropy averaged over the classes: [B, K], [B, K] -> [B].

    Any positive target counts as 1: both labels of a mixed image are there (DeiT III, 2204.07118,
    `engine.py`; "ResNet strikes back", 2110.00476).
    """
    present = jnp.asarray(targets > 0.0, logits.dtype)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, present), axis=-1)


# Logits and targets, [B, K] each, to losses [B].
LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": optax.softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
    "binary": binary_cross_entropy,
}


def one_hot_targets(labels: jax.Array, num_classes: int, label_smoothing: float) -> jax.Array:
    """Integer labels [B] -> [B, K]: 1 - s + s/K for the label, s/K for the others."""
    return optax.smooth_labels(jax.nn.one_hot(labels, num_classes), label_smoothing)


# From logits to the probability of each class, by training loss.
PROBABILITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}


class _LabelObjective(Objective):
    """Common to both kinds: a model with a logit per class and image.

    Evaluation is without label smoothing and weights, to compare recipes.
    """

    any_patch_size = any_shape = True

    def __init__(self, task: Task, *, class_weights: str | Sequence[Any] = ""):
        """
        Args:
          task: its model maps images to logits [B, K].
          class_weights: balanced (by class frequency), a number per class in the order of the
            classes, or pairs such as (("cat", 2.0),). See `create_class_weights`, and the class
            for their effect on the loss; evaluations ignore them.

        Raises:
          UserError: invalid weights, or a model without one row of logits per image.
        """
        super().__init__()
        self.class_names = task.class_names
        self.num_outputs = len(task.class_names)
        self.model = task.build_model(self.num_outputs)
        if getattr(self.model, "outputs_per", "image") != "image":
            raise UserError(
                f"model.classifier={self.model.classifier!r} gives logits per "
                f"{self.model.outputs_per}; classification requires token, gap or map."
            )
        self._class_weights: Any = None  # [1, K]
        if class_weights:
            weights = create_class_weights(class_weights, task.class_names, task.read_labels)
            self._class_weights = weights[None]


class Classification(_LabelObjective):
    """One label per image.

    A batch holds `image` [B, H, W, C] (uint8, or float scaled by the preprocessing), `label` [B]
    int32 and `mask` [B] float32, 1 for real examples. A mixed batch (training/mixing.py) also has
    `other_label` [B] and `label_weight` [B], the share of `label`. Its loss is label_weight *
    L(label) + (1 - label_weight) * L(other_label) with both labels smoothed, as in timm; losses but
    `binary` are linear in the targets, so we compute one loss of mixed targets. Accuracy refers to
    the label with the larger weight.

    With class weights w, the target of each class is multiplied by its w, and the sum over
    the batch is divided by the sum of the weights of its labels, as in PyTorch's
    `CrossEntropyLoss(weight=w, label_smoothing=s)`. The batch is the global one, over all devices
    and accumulation steps.
    """

    measures = ("loss", "accuracy")

    def __init__(
        self, task: Task, *, loss: str = "softmax", label_smoothing: float = 0.0, **kwargs: Any
    ):
        """
        Args:
          task: its model maps images to logits [B, K].
          loss: `softmax`; `sigmoid` summed over the classes; or `binary`, its mean over the
            classes, to which both labels of a mixed image count fully.
          label_smoothing: probability taken from the label and spread over all classes.
          **kwargs: class_weights.

        Raises:
          UserError: unknown loss, smoothing outside [0, 1) or with `binary`, invalid weights, or a
            model without one row of logits per image.
        """
        super().__init__(task, **kwargs)
        check_known("objective.loss", loss, LOSSES)
        if not 0.0 <= label_smoothing < 1.0:
            raise UserError(f"objective.label_smoothing={label_smoothing} must be in [0, 1).")
        if label_smoothing and loss == "binary":
            raise UserError(
                f"objective.label_smoothing={label_smoothing} gives every class a target above 0, "
                "which objective.loss='binary' counts as 1; set it to 0."
            )
        self._loss = LOSSES[loss]
        self.probabilities_by = "softmax" if loss == "softmax" else "sigmoid"
        self._label_smoothing = label_smoothing

    def prepare(self, batch: Batch) -> Batch:
        """With class weights, adds their mean over the labels of the batch: `mean_weight` [B]."""
        if self._class_weights is None or "mean_weight" in batch:
            return batch
        targets, _ = _targets(batch, self.num_outputs, label_smoothing=0.0)
        mean = masked_mean(jnp.sum(targets * self._class_weights, axis=-1), batch["mask"])
        return {**batch, "mean_weight": jnp.full_like(batch["mask"], mean)}

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean loss over the real examples, and `accuracy`; both are scalars."""
        logits, _, seen = self.apply_train(params, images_of(batch), rng)
        values = self.train_values(logits, batch)
        means = {name: masked_mean(value, batch["mask"]) for name, value in values.items()}
        return means.pop("loss"), {**means, **seen}

    def measure(self, params: Any, batch: Batch) -> Metrics:
        """Metrics of every example for a full evaluation, [B] each.

        `loss` and `accuracy` as in `evaluate`; `accuracy_top5`, with more than five classes;
        `prediction`, the arg-max as int32; `confidence`, its probability.
        """
        logits = self.predict(params, batch)
        values = self.values(logits, batch)
        if logits.shape[-1] > 5:
            _, best = jax.lax.top_k(logits, 5)  # [B, 5]
            hits = jnp.any(best == batch["label"][:, None], axis=-1)
            values["accuracy_top5"] = jnp.asarray(hits, jnp.float32)
        values["prediction"] = jnp.asarray(jnp.argmax(logits, axis=-1), jnp.int32)
        values["confidence"] = jnp.max(PROBABILITIES[self.probabilities_by](logits), axis=-1)
        return values

    def train_values(self, logits: jax.Array, batch: Batch) -> Metrics:
        """`values` with label smoothing and class weights; their mean is the training loss."""
        values = self.values(logits, batch, label_smoothing=self._label_smoothing)
        if self._class_weights is not None:
            targets, _ = _targets(batch, logits.shape[-1], self._label_smoothing)
            shares = targets * self._class_weights  # [B, K]
            total = jnp.sum(shares, axis=-1)  # [B]
            loss = total * self._loss(logits, shares / total[:, None])
            values["loss"] = loss / self.prepare(batch)["mean_weight"]
        return values

    def values(self, logits: jax.Array, batch: Batch, *, label_smoothing: float = 0.0) -> Metrics:
        """`loss` and `accuracy` of logits [B, K] against the labels of the batch, [B] each."""
        targets, label = _targets(batch, logits.shape[-1], label_smoothing)
        correct = jnp.argmax(logits, axis=-1) == label
        return {"loss": self._loss(logits, targets), "accuracy": jnp.asarray(correct, jnp.float32)}


def _targets(batch: Batch, num_classes: int, label_smoothing: float) -> tuple[jax.Array, jax.Array]:
    """Soft targets [B, K] that sum to 1, and the label [B] with the larger weight."""
    label = batch["label"]
    targets = one_hot_targets(label, num_classes, label_smoothing)  # [B, K]
    if "other_label" not in batch:
        return targets, label
    other_label, weight = batch["other_label"], batch["label_weight"]
    others = one_hot_targets(other_label, num_classes, label_smoothing)  # [B, K]
    mixed = weight[:, None] * targets + (1.0 - weight[:, None]) * others
    return mixed, jnp.where(weight >= 0.5, label, other_label)


class MultiLabel(_LabelObjective):
    """Binary cross-entropy of every class, summed over the classes.

    A batch holds `image` [B, H, W, C], `label` [B, K] of 0 and 1, and `mask` [B]. A mixed batch
    also has `other_label` [B, K] and `label_weight` [B]: its targets are mixed with that weight.
    Class weights multiply the loss of the images that have a class, like `pos_weight` of PyTorch's
    `BCEWithLogitsLoss`.
    """

    several_labels = True
    probabilities_by = "sigmoid"

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Mean over the real examples."""
        logits, _, seen = self.apply_train(params, images_of(batch), rng)
        targets = jnp.asarray(batch["label"], jnp.float32)
        if "other_label" in batch:
            weight = batch["label_weight"][:, None]
            targets = weight * targets + (1.0 - weight) * batch["other_label"]
        losses = sigmoid_cross_entropy(logits, targets)  # [B]
        if self._class_weights is not None:
            having = -targets * jax.nn.log_sigmoid(logits)  # [B, K]
            losses += jnp.sum((self._class_weights - 1.0) * having, axis=-1)
        return masked_mean(losses, batch["mask"]), seen

    def values(self, logits: jax.Array, batch: Batch) -> Metrics:
        """`loss` [B] of logits [B, K]."""
        return {"loss": sigmoid_cross_entropy(logits, jnp.asarray(batch["label"], jnp.float32))}
