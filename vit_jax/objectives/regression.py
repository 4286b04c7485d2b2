"""Regression of one or several numbers per image: an age, a dose, coordinates.

A batch holds `image` [B, H, W, C], `target` [B, K] float32 and `mask` [B]. Outputs are in standard
deviations of the training targets around their mean, so that targets of any units weigh alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, images_of, masked_mean

# Of differences in standard deviations.
_DISTANCES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "l2": jnp.square,
    "l1": jnp.abs,
    "huber": optax.huber_loss,
}


class Regression(Objective):
    """The mean loss over all numbers of an image."""

    example_keys = ("image", "target")
    any_patch_size = any_shape = True
    probabilities_by = "none"

    def __init__(self, task: Task, *, distance: str = "l2"):
        """
        Args:
          task: its model maps images to outputs [B, K].
          distance: the loss of a difference: `l2`, `l1`, or `huber`, quadratic up to one deviation.

        Raises:
          UserError: an unknown distance, a target that is the same everywhere, or another model.
        """
        super().__init__()
        check_known("objective.distance", distance, _DISTANCES)
        assert task.read_targets is not None
        names, targets = task.read_targets()
        targets = np.asarray(targets, np.float64)
        self._mean, self._std = (f(targets, 0).astype(np.float32) for f in (np.mean, np.std))
        if len(constant := np.flatnonzero(self._std == 0)):
            value = self._mean[constant[0]]
            raise UserError(f"{names[constant[0]]!r} is {value} for all images; predict another.")
        self.numbers = {
            "names": tuple(names),
            "mean": tuple(self._mean.tolist()),
            "std": tuple(self._std.tolist()),
            "log": False,
        }
        self._distance, self.num_outputs = _DISTANCES[distance], len(names)
        self.model = task.build_model(self.num_outputs)
        if getattr(self.model, "outputs_per", "image") != "image":
            raise UserError(
                f"model.classifier={self.model.classifier!r} has outputs per "
                f"{self.model.outputs_per}; regression requires token, gap or map."
            )

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """The mean over the real examples."""
        outputs, _, seen = self.apply_train(params, images_of(batch), rng)
        return masked_mean(self.values(outputs, batch)["loss"], batch["mask"]), seen

    def measure(self, params: Any, batch: Batch) -> Metrics:
        """For a full evaluation: `loss` [B]; `value` and `target` [B, K] in the targets' units."""
        outputs = self.predict(params, batch)
        value = outputs * self._std[None] + self._mean[None]
        return {**self.values(outputs, batch), "value": value, "target": batch["target"]}

    def values(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """`loss` [B] of outputs [B, K]."""
        if (count := batch["target"].shape[-1]) != self.num_outputs:
            raise UserError(
                f"{count} numbers per image, where the training has {self.num_outputs}."
            )
        targets = (batch["target"] - self._mean[None]) / self._std[None]
        return {"loss": jnp.mean(self._distance(outputs - targets), axis=-1)}
