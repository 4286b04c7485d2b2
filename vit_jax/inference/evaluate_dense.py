"""Evaluates a run that predicts pixels or numbers: mIoU, depth errors, MAE, R2."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.console import watched
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.data.sized import spell
from vit_jax.evaluators import dense as metrics
from vit_jax.inference.class_order import match_classes, relabel
from vit_jax.inference.dense import best_classes, check_short_side, is_dense, pixel_outputs, resized
from vit_jax.inference.model import Model
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.objectives.objective import Task


def evaluate_dense(
    model: Model, options: Mapping[str, str], *, on_bad_image: str, batch_size: int, short_side: int
) -> dict[str, Any]:
    """Metrics by name, of segmentation also `per_class`; pixels by windows, see `pixel_outputs`.

    `options`: of `create_dataset`, those of a split. UserError unless the model is of a run, or if
    the data have classes that it does not have.
    """
    on_bad_image = on_bad_image or model.on_bad_image
    if not is_dense(model):
        values: Any = model.description.values
        keys = {**options, "label_key": options["label_key"] or ",".join(values.names)}
        data = model.open_dataset(**keys, on_bad_image=on_bad_image, needs=("target",)).check()
        parts = [part["logits"] for part in model.stream(["logits"], data, batch_size)]
        predicted, targets = values.of(np.concatenate(parts)), data.targets("")[1]
        return metrics.number_errors(metrics.error_names(values.names), predicted, targets)
    check_short_side(model, short_side)
    sizes = {"short_side": short_side, "batch_size": batch_size}
    objective, known = model.objective(), model.class_names
    kind = OBJECTIVES[objective.pop("name")]
    decode = spell(parse(model.description.eval_preprocess).ops[:1])
    data = create_dataset(
        **options, preprocess=decode, on_bad_image=on_bad_image, needs=kind.example_keys
    ).check()
    if "label_map" not in kind.example_keys:
        measured = kind(Task(build_model=lambda _: model.module), **objective)
        return metrics.PixelRegressionEvaluator.summarize(_values(model, data, measured, sizes))
    data = relabel(data, match_classes(data.class_names, known, len(known)), len(known))
    arrays = _overlaps(model, data, sizes)
    overlaps, pixels = metrics.class_overlaps(arrays).tolist(), arrays["labelled"].sum(axis=0)
    rows = zip(known, pixels.tolist(), overlaps, strict=True)
    per_class = [
        {"class": name, "pixels": int(count), "IoU": None if np.isnan(overlap) else overlap}
        for name, count, overlap in rows
    ]
    return {**metrics.overlap_means(arrays), "per_class": per_class}


def _overlaps(model: Model, data: Dataset, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Pixels by class of every image in its own size, [N, K] each; see `Segmentation`."""
    count, rows = model.num_outputs, []
    for index in watched(range(data.num_examples), "image", data.num_examples):
        example = data.example(index, np.random.default_rng(0))
        image, labels = example["image"], example["label_map"]
        guesses = best_classes(pixel_outputs(model, image, **sizes), image.shape[:2])
        pairs = count * labels.astype(np.int64) + guesses
        table = np.bincount(pairs[labels < count], minlength=count**2).reshape(count, count)
        rows.append((np.diag(table), table.sum(axis=1), table.sum(axis=0)))
    names = ("hits", "labelled", "predicted")
    return dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))


def _values(
    model: Model, data: Dataset, objective: Any, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """`measures_of` the objective for every image in its own size, [N] each."""
    rows = []
    for index in watched(range(data.num_examples), "image", data.num_examples):
        example = data.example(index, np.random.default_rng(0))
        image = example.pop("image")
        outputs = pixel_outputs(model, image, **sizes)
        whole = np.stack([*resized(outputs, image.shape[:2])], axis=-1)
        batch = {key: jnp.asarray(value[None]) for key, value in example.items()}
        rows.append(objective.measures_of(jnp.asarray(whole[None]), batch))
    return {name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in rows[0]}
