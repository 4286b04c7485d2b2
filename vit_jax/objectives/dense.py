"""Predictions for every pixel: its class, or a value such as its depth.

The model is `dense`: a linear head on every patch, interpolated to the pixels, as in DINOv2's
linear evaluation (2304.07193, section 7.4). A batch holds `image` [B, H, W, C], `label_map` uint8
[B, H, W] or `value_map` float32 [B, H, W], and `mask` [B]. The loss is the mean over all pixels of
the batch that count.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images


class _Dense(Objective):
    """Common to both kinds; a subclass has `num_outputs` before it calls `_build`.

    `values` are means over the pixels that count of each image, 0 without one, from outputs
    [B, H, W, K]; [B] each.
    """

    any_patch_size = True
    counts: Callable[[Batch], jax.Array]  # which pixels count, bool [B, H, W]

    def _build(self, task: Task) -> None:
        """Raises UserError unless the model has outputs per pixel."""
        self.model = task.build_model(self.num_outputs)
        if getattr(self.model, "outputs_per", "image") != "pixel":
            raise UserError(
                "this objective predicts every pixel: use a Vision Transformer with "
                "model.classifier='dense' ('token_dense' with a class token if model.name='vit')."
            )

    def prepare(self, batch: Batch) -> Batch:
        """Adds the mean number of pixels that count, over the whole batch: `mean_pixels` [B]."""
        if "mean_pixels" in batch:
            return batch
        mean = masked_mean(_pixels(self.counts(batch)), batch["mask"])
        return {**batch, "mean_pixels": jnp.full_like(batch["mask"], jnp.maximum(mean, 1.0))}

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """Means over the pixels that count."""
        outputs, _, seen = self.apply_train(params, scale_images(batch["image"]), rng)
        share = _pixels(self.counts(batch)) / self.prepare(batch)["mean_pixels"]  # [B]
        values = self.values(outputs, batch)
        means = {name: masked_mean(value * share, batch["mask"]) for name, value in values.items()}
        return means.pop("loss"), {**means, **seen}

    def measure(self, params: Any, batch: Batch) -> Metrics:
        """`measures_of` the outputs."""
        return self.measures_of(self.predict(params, batch), batch)

    def measures_of(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """For a full evaluation, [B, ...]: `values`, and `pixels`, how many count."""
        return {**self.values(outputs, batch), "pixels": _pixels(self.counts(batch))}


class Segmentation(_Dense):
    """A class per pixel, by cross-entropy; a `label_map` of another number is not counted."""

    example_keys = ("image", "label_map")
    measures = ("loss", "accuracy")

    def __init__(self, task: Task):
        """UserError unless the task's model maps images to logits [B, H, W, K]."""
        super().__init__()
        self.class_names = task.class_names
        self.num_outputs = len(task.class_names)
        self._build(task)

    def counts(self, batch: Batch) -> jax.Array:
        return batch["label_map"] < self.num_outputs

    def values(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """`loss`, and `accuracy` of the pixels."""
        valid = self.counts(batch)
        labels = jnp.where(valid, jnp.asarray(batch["label_map"], jnp.int32), 0)
        hits = jnp.asarray(jnp.argmax(outputs, axis=-1) == labels, jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return {"loss": _mean(losses, valid), "accuracy": _mean(hits, valid)}

    def measures_of(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """Also numbers of pixels by class, [B, K] each: `hits`, `labelled`, `predicted`."""
        valid, labels = self.counts(batch), batch["label_map"]
        predicted = jnp.argmax(outputs, axis=-1)

        def by_class(classes: jax.Array, where: jax.Array) -> jax.Array:
            hot = jax.nn.one_hot(classes, self.num_outputs)
            return jnp.sum(hot * where[..., None], axis=(1, 2))  # [B, K]

        return {
            **super().measures_of(outputs, batch),
            "hits": by_class(labels, valid & (labels == predicted)),
            "labelled": by_class(labels, valid),
            "predicted": by_class(predicted, valid),
        }


# Differences [B, H, W] of output and target, and which count, to losses [B].
_DISTANCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "l1": lambda error, valid: _mean(jnp.abs(error), valid),
    "l2": lambda error, valid: _mean(jnp.square(error), valid),
    # Eigen et al., 1406.2283, equation 4 with a weight of 1/2.
    "scale_invariant": lambda error, valid: (
        _mean(jnp.square(error), valid) - 0.5 * jnp.square(_mean(error, valid))
    ),
}


class PixelRegression(_Dense):
    """A value per pixel, such as its depth; pixels whose value is unknown are not counted."""

    example_keys = ("image", "value_map")
    num_outputs = 1
    probabilities_by = "none"

    def __init__(
        self,
        task: Task,
        *,
        distance: str = "l1",
        log: bool = True,
        unit: float = 1.0,
        min_value: float = 0.0,
        max_value: float = 0.0,
    ):
        """
        Args:
          task: its model maps images to [B, H, W, 1].
          distance: the loss of the difference: `l1`, `l2`, or `scale_invariant` (1406.2283).
          log: whether the output is the value's logarithm, as for depths.
          unit: of the stored values: 0.001 for millimetres if results are to be in metres.
          min_value: pixels count above it; with `log` at least 0.
          max_value: pixels count up to it; 0: any.

        Raises:
          UserError: an unknown distance, numbers out of range, or another model.
        """
        super().__init__()
        check_known("objective.distance", distance, _DISTANCES)
        if unit <= 0.0 or (log and min_value < 0.0) or 0.0 < max_value <= min_value:
            raise UserError(
                f"objective.unit={unit} must be positive, objective.min_value={min_value} at least "
                f"0 with objective.log, and objective.max_value={max_value} above it, or 0."
            )
        self._distance, self._log, self._unit = _DISTANCES[distance], log, unit
        self._range = min_value, max_value or float(jnp.finfo(jnp.float32).max)
        self.measures = ("loss", "mae", "rmse", *(("abs_rel", "delta1") if log else ()))
        self.numbers = {"names": ("value",), "mean": (0.0,), "std": (1.0,), "log": log}
        self._build(task)

    def counts(self, batch: Batch) -> jax.Array:
        values = batch["value_map"] * self._unit
        return (values > self._range[0]) & (values <= self._range[1])  # not NaN or infinite

    def values(self, outputs: jax.Array, batch: Batch) -> Metrics:
        """`loss`; `mae` and `rmse` in units; for logarithms also `abs_rel` and `delta1`.

        The mean of |error| / value, and the share of pixels whose ratio is below 1.25 (1406.2283).
        """
        valid, output = self.counts(batch), outputs[..., 0]
        target = jnp.where(valid, batch["value_map"] * self._unit, 1.0)
        value = jnp.exp(output) if self._log else output
        error = value - target
        values = {
            "loss": self._distance(output - (jnp.log(target) if self._log else target), valid),
            "mae": _mean(jnp.abs(error), valid),
            "rmse": jnp.sqrt(_mean(jnp.square(error), valid)),
        }
        if self._log:
            ratio = jnp.maximum(value / target, target / value)
            values["abs_rel"] = _mean(jnp.abs(error) / target, valid)
            values["delta1"] = _mean(jnp.asarray(ratio < 1.25, jnp.float32), valid)
        return values


def _pixels(valid: jax.Array) -> jax.Array:
    """How many count, [B] float32."""
    return jnp.sum(valid, axis=(1, 2), dtype=jnp.float32)


def _mean(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Over the pixels that count, [B, H, W] -> [B]; 0 if there are none."""
    return jnp.sum(values * valid, axis=(1, 2)) / jnp.maximum(_pixels(valid), 1.0)
