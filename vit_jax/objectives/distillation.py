"""Distillation as in DeiT ("Training data-efficient image transformers", 2012.12877, section 4).

A student learns from the labels and from a teacher that sees the same augmented and mixed images.
A distilled model has a separate head for the teacher's predictions (the distillation token,
equation 3); other models learn both with a single head. At test time both heads are averaged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Batch, Metrics, Task, masked_mean, scale_images

TEACHER = "teacher"  # prefix of its parameters


class Distillation(Classification):
    """(1 - weight) * loss of the labels + weight * loss of the teacher's predictions.

    The teacher's parameters are the constant `teacher`.
    """

    any_shape = False

    def __init__(self, task: Task, *, teacher: str = "", weight: float = 0.5, **kwargs: Any):
        """
        Args:
          task: its model is the student.
          teacher: source of the teacher's weights, see `pretrained.source`.
          weight: of the teacher's loss; the labels' loss gets 1 - weight.
          **kwargs: of `Classification`, for the labels.

        Raises:
          UserError: no teacher, or one with other classes or images.
        """
        super().__init__(task, **kwargs)
        if not teacher:
            raise UserError(
                "--config.objective.teacher is missing: set the teacher's weights: a file, a work "
                "directory, hf://, gs://, https:// or a name from scripts/zoo.py list."
            )
        if not 0.0 <= weight <= 1.0:
            raise UserError(f"objective.weight={weight} must be in [0, 1].")
        assert task.load_teacher is not None
        self._teacher = task.load_teacher(teacher)
        self._weight = weight
        self.constants = {TEACHER: self._teacher.params}

    @property
    def models(self) -> dict[str, Any]:
        return {**super().models, TEACHER: self._teacher.module}

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """The mean over the real examples; `accuracy` is the class head's."""
        images = scale_images(batch["image"])
        mean, outputs, seen = self.apply_train(params, images, rng)
        student = outputs.get("distillation_logits", mean)  # [B, K]
        answers = jax.lax.stop_gradient(self._teacher.logits(params[TEACHER], images))
        values = self.train_values(outputs.get("class_logits", mean), batch)
        values["distillation_loss"] = self._distill(student, answers)
        means = {name: masked_mean(value, batch["mask"]) for name, value in values.items()}
        loss = (1.0 - self._weight) * means.pop("loss") + self._weight * means["distillation_loss"]
        return loss, {**means, **seen}

    def _distill(self, logits: jax.Array, answers: jax.Array) -> jax.Array:
        """The student's and the teacher's logits, [B, K] each, to losses [B]."""
        raise NotImplementedError


class HardDistillation(Distillation):
    """The teacher's arg-max serves as a second label (equation 3)."""

    def _distill(self, logits: jax.Array, answers: jax.Array) -> jax.Array:
        targets = jax.nn.one_hot(jnp.argmax(answers, axis=-1), answers.shape[-1])
        return self._loss(logits, targets)


class SoftDistillation(Distillation):
    """tau^2 * KL(softmax(teacher / tau) || softmax(student / tau)) (equation 2)."""

    def __init__(self, task: Task, *, weight: float = 0.1, temperature: float = 3.0, **kwargs: Any):
        """
        Args:
          weight: lambda, of the teacher's loss; the labels' loss gets 1 - weight.
          temperature: tau, by which both logits are divided.
          **kwargs: of `Distillation`.

        Raises:
          UserError: see `Distillation`; or a temperature that is not positive.
        """
        super().__init__(task, weight=weight, **kwargs)
        if not temperature > 0.0:
            raise UserError(f"objective.temperature={temperature} must be positive.")
        self._temperature = temperature

    def _distill(self, logits: jax.Array, answers: jax.Array) -> jax.Array:
        tau = self._temperature
        targets = jax.nn.softmax(answers / tau)
        entropy = optax.softmax_cross_entropy(answers / tau, targets)  # [B]
        return tau**2 * (optax.softmax_cross_entropy(logits / tau, targets) - entropy)
