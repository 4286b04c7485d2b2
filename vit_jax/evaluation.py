"""The evaluators of a config, each with its data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import evaluator_keys
from vit_jax.data.datasets import Dataset
from vit_jax.errors import UserError, as_user_error
from vit_jax.evaluators.create import EVALUATORS, OF_FEATURES
from vit_jax.evaluators.frozen_features import Features, feature_step
from vit_jax.evaluators.stream import OutputStep, Reader
from vit_jax.objectives.objective import Objective
from vit_jax.parameters.sharding import check_batch_size

# Of an evaluator: what decides on its data, besides `train_split`.
_OF_DATA = ("dataset", "data_dir", "split", "label_key", "preprocess")


def open_eval_data(
    config: ConfigDict, open_dataset: Callable[..., Dataset], expected: tuple[int, int, int]
) -> dict[str, Dataset]:
    """The data of each evaluator by its key: its own, or else that of the training.

    Those of features read two splits: `KEY` and `KEY/train`.

    Raises:
      UserError: see `create_dataset`; or images of another shape than `expected`, [H, W, C].
    """
    data, opened = config.dataset, {}
    for key, evaluator in config.evaluators.items():
        splits, label = {key: evaluator.split}, {}
        if of_features(evaluator):  # whatever the training needs
            splits[f"{key}/train"], label = evaluator.train_split, {"needs_label": True}
        label_key = evaluator.label_key or ("" if evaluator.dataset else data.label_key)
        for name, split in splits.items():
            try:
                opened[name] = open_dataset(
                    name=evaluator.dataset or data.name,
                    data_dir=evaluator.data_dir or data.data_dir,
                    split=split,
                    label_key=label_key,
                    preprocess=evaluator.preprocess or data.eval_preprocess,
                    on_bad_image=data.on_bad_image,
                    **label,
                )
            except UserError as error:
                # The reader's message names dataset.split, but means the evaluator's.
                message = f"evaluators.{key} (split={split!r}): {error}"
                raise as_user_error(message, error) from error
            if (found := image_shape(opened[name])) != expected:
                raise UserError(
                    f"evaluators.{key} reads images of {found}, training of {expected}; make "
                    f"dataset.eval_preprocess={data.eval_preprocess!r} give the same size."
                )
    return opened


def create_evaluators(
    config: ConfigDict, datasets: Mapping[str, Dataset], objective: Objective, mesh: Mesh
) -> dict[str, Any]:
    """The evaluators by their keys, see `EVALUATORS`.

    Raises:
      UserError: classes that the training does not have, a feature that the model does not have, or
        a batch that does not divide over the devices.
    """
    evaluators: dict[str, Any] = {}
    steps: dict[str, OutputStep] = {}  # by feature: it compiles once for all its evaluators
    features: dict[Any, Features] = {}  # and is computed once for those of the same data
    for key in config.evaluators:
        dataset, keys = datasets[key], dict(config.evaluators[key])
        batch_size = keys["batch_size"] or config.dataset.batch_size
        check_batch_size(f"evaluators.{key}.batch_size", batch_size, mesh)
        loader = dict(config.loader)
        shared = ("name", *inspect.signature(evaluator_keys).parameters)
        own_keys = {name: value for name, value in keys.items() if name not in shared}
        kind = EVALUATORS[keys["name"]]
        if of_features(config.evaluators[key]):
            feature = keys["feature"]
            if feature not in steps:
                steps[feature] = _feature_step(key, objective, feature, image_shape(dataset), mesh)
            data = feature, batch_size, *(keys[name] for name in _OF_DATA), keys["train_split"]
            if data not in features:
                readers = [
                    Reader(each, mesh, batch_size, loader)
                    for each in (dataset, datasets[f"{key}/train"])
                ]
                features[data] = Features(steps[feature], *readers)
            try:
                evaluators[key] = kind(features[data], **own_keys)
            except UserError as error:
                raise as_user_error(f"evaluators.{key}: {error}", error) from error
            continue
        if objective.class_names and dataset.class_names != objective.class_names:
            dataset = _with_our_labels(key, dataset, objective.class_names)
        reader = Reader(dataset, mesh, batch_size, loader, objective.example_keys)
        evaluators[key] = kind(objective, reader, **own_keys)
    return evaluators


def of_features(evaluator: ConfigDict) -> bool:
    """Whether it measures features, so that its labels need not be those of the training."""
    return evaluator.name in OF_FEATURES


def _feature_step(
    key: str, objective: Objective, feature: str, shape: tuple[int, int, int], mesh: Mesh
) -> OutputStep:
    from vit_jax.inference.features import one_feature

    name = f"evaluators.{key}.feature"
    return feature_step(one_feature(objective.model, feature, shape, key=name), mesh)


def _with_our_labels(key: str, dataset: Dataset, class_names: tuple[str, ...]) -> Dataset:
    """Relabels data whose classes are a subset or another order of the training's, by name."""
    from vit_jax.inference.class_order import match_classes, relabel  # knows the lists of names

    way_out = "classes of an evaluator must be among those of the training"
    try:
        outputs = match_classes(dataset.class_names, class_names, len(class_names), way_out=way_out)
    except UserError as error:
        raise as_user_error(f"evaluators.{key}: {error}", error) from error
    return relabel(dataset, outputs, len(class_names))


def image_shape(dataset: Dataset) -> tuple[int, int, int]:
    height, width, channels = dataset.element_spec["image"].shape
    return height, width, channels
