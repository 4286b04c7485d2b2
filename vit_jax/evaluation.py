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
from vit_jax.evaluators.create import create_evaluator
from vit_jax.evaluators.stream import Reader
from vit_jax.objectives.objective import Objective
from vit_jax.parameters.sharding import check_batch_size


def open_eval_data(
    config: ConfigDict, open_dataset: Callable[..., Dataset], expected: tuple[int, int, int]
) -> dict[str, Dataset]:
    """The data of each evaluator by its key: its own, or else that of the training.

    Raises:
      UserError: see `create_dataset`; or images of another shape than `expected`, [H, W, C].
    """
    data, opened = config.dataset, {}
    for key, evaluator in config.evaluators.items():
        label_key = evaluator.label_key or ("" if evaluator.dataset else data.label_key)
        try:
            opened[key] = open_dataset(
                name=evaluator.dataset or data.name,
                data_dir=evaluator.data_dir or data.data_dir,
                split=evaluator.split,
                label_key=label_key,
                preprocess=evaluator.preprocess or data.eval_preprocess,
                on_bad_image=data.on_bad_image,
            )
        except UserError as error:
            # The reader's message names dataset.split, but means the evaluator's.
            message = f"evaluators.{key} (split={evaluator.split!r}): {error}"
            raise as_user_error(message, error) from error
        if (found := image_shape(opened[key])) != expected:
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
      UserError: classes that the training does not have, or a batch that does not divide over the
        devices.
    """
    evaluators = {}
    for key, dataset in datasets.items():
        keys = dict(config.evaluators[key])
        if objective.class_names and dataset.class_names != objective.class_names:
            dataset = _with_our_labels(key, dataset, objective.class_names)
        batch_size = keys["batch_size"] or config.dataset.batch_size
        check_batch_size(f"evaluators.{key}.batch_size", batch_size, mesh)
        reader = Reader(dataset, mesh, batch_size, dict(config.loader), objective.example_keys)
        shared = ("name", *inspect.signature(evaluator_keys).parameters)
        own_keys = {name: value for name, value in keys.items() if name not in shared}
        evaluators[key] = create_evaluator(
            keys["name"], objective=objective, reader=reader, **own_keys
        )
    return evaluators


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
