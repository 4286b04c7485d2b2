"""Evaluations of frozen features: fitted on one split, measured on another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Hook, OutputStep, Reader, compile_outputs, nothing


def feature_step(feature_of: Callable[[Any, Any], jax.Array], mesh: Mesh) -> OutputStep:
    """The step shared by all evaluators of `feature_of(params, batch) -> [B, D]`."""
    return compile_outputs(
        lambda params, batch: {"x": feature_of(params, batch), "y": batch["label"]}, mesh
    )


class Split(NamedTuple):
    """What is known of the images of a split."""

    x: np.ndarray  # features [N, D]
    y: np.ndarray  # labels [N]


class Features:
    """A feature and the labels of two splits, computed once for all their evaluators."""

    def __init__(self, step: OutputStep, reader: Reader, train_reader: Reader):
        """`step`, of `feature_step`, compiles once; `train_reader` reads the images to fit."""
        self.reader, self.train_reader = reader, train_reader
        self.num_users = 0
        self._step = step
        # For ImageNet these are gigabytes: released after the last user has asked.
        self._of: Any = None  # the parameters
        self._splits: tuple[Split, ...] = ()
        self._num_asked = 0

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> tuple[Split, ...]:
        """The images of `train_reader`, then those of `reader`.

        The same `params` object returns the same arrays. `on_batch`: see `stream_outputs`.
        """
        if self._of is not params:
            self._of, self._splits = None, ()  # free before computing the next
            readers = (self.train_reader, self.reader)
            outputs = (reader.outputs(self._step, params, on_batch) for reader in readers)
            computed = tuple(Split(**arrays) for arrays in outputs)
            self._of, self._splits, self._num_asked = params, computed, 0
        splits = self._splits
        self._num_asked += 1
        if self._num_asked >= self.num_users:
            self._of, self._splits = None, ()
        return splits


class FrozenFeaturesEvaluator:
    """Calls `measure`, on the host, with the features of two splits.

    It may have its own data set, whose classes need not be those of the training.
    """

    example_keys: tuple[str, ...] = ("image", "label")  # whatever the objective's are
    metric_names: tuple[str, ...]

    def __init__(
        self, features: Features, *, train_split: str = "train", feature: str = "pre_logits"
    ):
        """Raises UserError for several labels per image, or splits with different classes.

        Args:
          train_split: split expression of the images to fit.
          feature: a feature of `scripts/extract_features.py` that is one vector per image.
        """
        data: Any = features.reader.dataset
        train_data: Any = features.train_reader.dataset
        if data.element_spec["label"].shape or train_data.element_spec["label"].shape:
            raise UserError(f"{data.name} has several labels per image; use data with one.")
        if data.class_names != train_data.class_names:
            raise UserError(
                f"the {len(data.class_names)} classes of split {data.split!r} are not those of "
                f"train_split={train_split!r}, or differ in their order."
            )
        features.num_users += 1
        self._features, self._feature = features, feature
        self._num_classes = len(data.class_names)

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, float]:
        """`metric_names` to numbers; UserError if a feature is not finite."""
        train, test = self._features(params, on_batch=on_batch)
        if not (np.isfinite(train.x).all() and np.isfinite(test.x).all()):
            raise UserError(f"{self._feature} is not finite; the parameters are corrupt.")
        return {**self.measure(train, test), "num_examples": len(test.y)}

    def measure(self, train: Split, test: Split) -> dict[str, float]:
        """Metrics of what was fitted on `train`, on `test`."""
        raise NotImplementedError


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(predictions == labels))
