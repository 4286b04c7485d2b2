"""Evaluates a run that predicts pixels or numbers: mIoU, depth errors, MAE, R2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.console import watched
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.evaluators import dense as metrics
from vit_jax.inference.class_order import match_classes, relabel
from vit_jax.inference.dense import is_dense, pixel_outputs, resized
from vit_jax.inference.model import Model
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.dense import Segmentation
from vit_jax.objectives.objective import Task


def evaluate_dense(
    model: Model, options: Mapping[str, str], *, on_bad_image: str, batch_size: int, short_side: int
) -> dict[str, Any]:
    """Metrics by name, of segmentation also `per_class`; pixels by windows, see `pixel_outputs`.

    `options`: of `create_dataset`, those of a split. UserError unless the model is of a run.
    """
    on_bad_image = on_bad_image or model.on_bad_image
    if not is_dense(model):
        values: Any = model.description.values
        keys = {**options, "label_key": options["label_key"] or ",".join(values.names)}
        data = model.open_dataset(**keys, on_bad_image=on_bad_image, needs=("target",)).check()
        parts = [part["logits"] for part in model.stream(["logits"], data, batch_size)]
        predicted, targets = values.of(np.concatenate(parts)), data.targets("")[1]
        return metrics.number_errors(metrics.error_names(values.names), predicted, targets)
    objective = model.objective()
    kind = OBJECTIVES[objective["name"]]
    data = create_dataset(
        **options, preprocess=_decode(model), on_bad_image=on_bad_image, needs=kind.example_keys
    ).check()
    sizes = {"short_side": short_side, "batch_size": batch_size}
    arrays = evaluate_pixels(model, data, objective, **sizes)
    if not issubclass(kind, Segmentation):
        return metrics.PixelRegressionEvaluator.summarize(arrays)
    overlaps, pixels = metrics.class_overlaps(arrays).tolist(), arrays["labelled"].sum(axis=0)
    rows = zip(model.class_names, pixels.tolist(), overlaps, strict=True)
    per_class = [{"class": name, "pixels": int(n), "IoU": iou} for name, n, iou in rows]
    return {**metrics.SegmentationEvaluator.summarize(arrays), "per_class": per_class}


def _decode(model: Model) -> str:
    return model.description.eval_preprocess.partition("|")[0]


def evaluate_pixels(
    model: Model, data: Dataset, objective: Mapping[str, Any], **options: Any
) -> dict[str, np.ndarray]:
    """`measures_of` the objective for every image in its own size, by windows: [N, ...] each.

    Args:
      data: with the keys of the objective, and images of any size.
      objective: the section of the run's config.
      **options: of `pixel_outputs`.

    UserError for data with classes that the model does not have.
    """
    known, given = model.description.class_names, dict(objective)
    if known:
        data = relabel(data, match_classes(data.class_names, known, len(known)), len(known))
    task = Task(build_model=lambda _: model.module, class_names=known)
    measured = OBJECTIVES[given.pop("name")](task, **given)
    rows = []
    for index in watched(range(data.num_examples), "image", data.num_examples):
        example = data.example(index, np.random.default_rng(0))
        image = example.pop("image")
        outputs = pixel_outputs(model, image, **options)
        whole = np.stack([*resized(outputs, image.shape[:2])], axis=-1)
        batch = {key: jnp.asarray(value[None]) for key, value in example.items()}
        rows.append(measured.measures_of(jnp.asarray(whole[None]), batch))
    return {name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in rows[0]}
