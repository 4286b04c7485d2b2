"""What can be told from a model's features alone: fitted on one split, measured on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluators.stream import OutputStep, Reader, compile_outputs, stream_outputs


def feature_step(feature_of: Callable[[Any, Any], jax.Array], mesh: Mesh) -> OutputStep:
    """The step of all evaluators that measure `feature_of(params, batch) -> [B, D]`."""

    def outputs(params: Any, batch: Any) -> Any:
        return {"feature": feature_of(params, batch), "label": batch["label"]}

    return compile_outputs(outputs, mesh)


class FrozenFeaturesEvaluator:
    """Computes the features of two splits once, then calls `measure` on the host.

    Its data set is its own: its classes need not be those of the training.
    """

    metric_names: tuple[str, ...]

    def __init__(
        self,
        step: OutputStep,
        reader: Reader,
        train_reader: Reader,
        *,
        train_split: str = "train",
        feature: str = "pre_logits",
    ):
        """Takes its features from `step`.

        Args:
          step: from `feature_step`; evaluators of one feature share it.
          train_split: split expression of the images that it is fitted on, which `train_reader`
            reads.
          feature: a feature of `scripts/extract_features.py` that is one vector per image.

        Raises:
          UserError: images of several labels, or splits of other classes.
        """
        data: Any = reader.dataset
        train_data: Any = train_reader.dataset
        if data.element_spec["label"].shape or train_data.element_spec["label"].shape:
            raise UserError(f"{data.name} has several labels per image; this is for one.")
        if data.class_names != train_data.class_names:
            raise UserError(
                f"the {len(data.class_names)} classes of split {data.split!r} are not those of "
                f"train_split={train_split!r}, or in another order."
            )
        self._step, self._feature = step, feature
        self._readers = train_reader, reader
        self._num_classes = len(data.class_names)

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """`metric_names` to numbers; see `arrays`."""
        arrays = self.arrays(params, on_batch=on_batch)
        return {**self.measure(*arrays), "num_examples": len(arrays[-1])}

    def arrays(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> tuple[np.ndarray, ...]:
        """What `measure` takes.

        Args:
          params: on the devices.
          on_batch: called before each batch, by every process; its errors pass through.

        Raises:
          UserError: a feature is not finite.
        """
        found = []
        for reader in self._readers:
            parts = list(stream_outputs(self._step, params, reader, on_batch=on_batch))
            features, labels = (
                np.concatenate([part[name] for part in parts]) for name in ("feature", "label")
            )
            if not np.isfinite(features).all():
                raise UserError(f"{self._feature} is not finite; the parameters are damaged.")
            found += [features, labels]
        return tuple(found)

    def measure(
        self, x_train: np.ndarray, y_train: np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> dict[str, float]:
        """Features [N, D] and labels [N] of both splits to metrics."""
        raise NotImplementedError


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(predictions == labels))
