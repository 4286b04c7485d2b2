"""Evaluates a model of any format on a labelled dataset."""

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.console import watched
from vit_jax.data.datasets import Dataset
from vit_jax.errors import UserError
from vit_jax.evaluators import classification
from vit_jax.files.paths import to_path, write_json
from vit_jax.inference import evaluation_tables
from vit_jax.inference.class_order import match_classes, relabel
from vit_jax.inference.dense import is_dense
from vit_jax.inference.evaluate_dense import evaluate_dense
from vit_jax.inference.images import example_names
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.real_labels import real_labels
from vit_jax.kinds import check_known
from vit_jax.objectives.classification import Classification, MultiLabel
from vit_jax.objectives.objective import Task


def evaluate(
    source: str,
    *,
    dataset: str = "",
    split: str = "",
    data_dir: str = "",
    label_key: str = "",
    on_bad_image: str = "",
    batch_size: int = 128,
    real: str = "",
    ignore_class_names: bool = False,
    classes: str = "all",
    loss: str = "",
    output: str = "",
    prompts: Sequence[str] = (),
    short_side: int = 0,
    **model_options: Any,
) -> dict[str, Any]:
    """Loads a model and evaluates it on every example of a split.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      dataset, split, data_dir, label_key, on_bad_image: see `create_dataset`; by default those of
        the run and its test data if `source` is a work directory.
      batch_size: over all devices; rounded up to a multiple of their number.
      real: path of `real.json`, see `real_labels`.
      ignore_class_names: see `match_classes`.
      classes: `all` outputs of the model compete, or only those `present` among the labels of
        the split, as in the papers of ImageNet-A (1907.07174), ImageNet-R (2006.16241) and
        ObjectNet.
      loss: key of `LOSSES` that gives the loss and the probabilities; "" for the one in the
        model's description, else softmax.
      output: folder for `evaluation.json`, `classes.csv` (one line per class), and if images
        have one label `examples.csv` (one per example) and `confusion.csv`.
      prompts: texts with {} for a class name, see `data.text.read_prompts`: an image
        tower then classifies by them, with the text tower of the same file (zero-shot); loss and
        calibration need their temperature.
      short_side: of images whose pixels are predicted, see `pixel_outputs`.

    Returns:
      `accuracy`, `accuracy_top5` (with more than 5 outputs), `loss`, `calibration_error`,
      `macro_f1`, `per_class` (see `per_class_scores`), `num_examples`, with ReaL labels
      `accuracy_real` and `num_examples_real`, and what was evaluated on what. If images have
      several labels, `mAP`, `loss` and `num_examples`; for pixels and numbers see `evaluate_dense`.

    Raises:
      UserError: model and dataset do not match, or a file is missing or damaged.
    """
    check_known("--classes", classes, ("all", "present"))
    model = load_model(source, **model_options)
    options = {"name": dataset, "split": "test", "data_dir": "", "label_key": ""}
    options = options if dataset else model.test_data()
    chosen = {"split": split, "data_dir": data_dir, "label_key": label_key}
    options |= {key: value for key, value in chosen.items() if value}
    only = classes if classes != "all" else ""
    start = time.perf_counter()
    if is_dense(model) or model.description.values:
        flags = (("real", real), ("loss", loss), ("prompt", prompts), ("classes", only))
        for flag, value in flags:
            if value:
                raise UserError(f"--{flag} is for classes of images, which {source} has not.")
        if output:  # fail now if it cannot be created
            to_path(output).mkdir(parents=True, exist_ok=True)
        results = evaluate_dense(
            model, options, on_bad_image=on_bad_image, batch_size=batch_size, short_side=short_side
        )
        results["seconds"] = time.perf_counter() - start
    else:
        data = model.open_dataset(**options, on_bad_image=on_bad_image)
        if prompts:
            model = model.with_classes(data.class_names, prompts)
        results = _evaluate_classes(
            model,
            data,
            only=only,
            real=real,
            loss=loss,
            prompts=prompts,
            ignore_names=ignore_class_names,
            batch_size=batch_size,
            output=output,
        )
    results |= {
        "model": model.source,
        "format": model.format,
        "dataset": options["name"],
        "split": options["split"],
        **({"tokens": math.prod(grid)} if (grid := model.description.grid) else {}),
        **model_options,
        "preprocess": model.description.eval_preprocess,
    }
    if output:
        write_json(to_path(output) / "evaluation.json", results)
    return results


def _evaluate_classes(
    model: Model,
    data: Dataset,
    *,
    only: str,
    real: str,
    loss: str,
    prompts: Sequence[str],
    ignore_names: bool,
    batch_size: int,
    output: str,
) -> dict[str, Any]:
    """Of a classifier, see `evaluate`; `only`: the outputs that compete, "" for all."""
    by, known = model.description.probabilities_by, model.description.class_names
    model.check_head()
    if by == "none" and not prompts:
        raise UserError(f"{model.source}: its outputs are regression targets, not classes.")
    outputs = match_classes(data.class_names, known, model.num_outputs, ignore_names=ignore_names)
    data = data.check()
    logging.info(data.summary)
    several = bool(data.element_spec["label"].shape)
    for flag, value in (("real", real), ("loss", loss), ("classes", only)):
        if several and value:
            raise UserError(f"--{flag}={value!r} needs images with one label each.")
    sets = real_labels(data, real) if real else ()
    folder = to_path(output)
    if output:  # fail now if it cannot be created
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    competing = np.unique(outputs[data.labels()]) if only else None
    arrays = measure_examples(
        model, data, outputs, competing=competing, several=several, loss=loss, batch_size=batch_size
    )
    seconds = time.perf_counter() - start
    summarize = classification.summarize_ranking if several else classification.summarize
    results: dict[str, Any] = dict(summarize(arrays))
    if real:
        matched = [outputs[labels].tolist() for labels in sets]
        accuracy, count = classification.real_accuracy(arrays["prediction"], matched)
        results |= {"accuracy_real": accuracy, "num_examples_real": count}
    if prompts:
        results["prompts"] = list(prompts)
    if by == "none":  # cosines of unknown temperature
        results = {k: v for k, v in results.items() if k not in ("loss", "calibration_error")}
    names = dict(zip(outputs.tolist(), data.class_names, strict=True))
    names |= dict(enumerate(known))
    if output and several:
        evaluation_tables.write_average_precisions(folder, data.class_names, outputs, arrays)
    if not several:
        results["per_class"] = evaluation_tables.per_class_scores(names, arrays)
    if output and not several:
        evaluation_tables.write_classes(folder, results["per_class"])
        evaluation_tables.write_examples(folder, example_names(data.source), names, arrays)
        evaluation_tables.write_confusion(folder, names, arrays)
    results["classes"] = len(outputs) if competing is None else len(competing)
    return {**results, "seconds": seconds}


class _SubsetClassification(Classification):
    """Arg-max, probabilities and loss over a subset of the model's outputs."""

    def __init__(self, task: Task, outputs: np.ndarray, **kwargs: Any):
        super().__init__(task, **kwargs)
        self._outputs, self.num_outputs = outputs, len(outputs)

    def predict(self, params: Any, batch: Any) -> jax.Array:
        return super().predict(params, batch)[:, self._outputs]


def measure_examples(
    model: Model,
    data: Dataset,
    outputs: np.ndarray,
    *,
    competing: np.ndarray | None = None,
    several: bool = False,
    loss: str = "",
    batch_size: int = 128,
) -> dict[str, np.ndarray]:
    """`examples` of the evaluator for one label per image, or for several.

    `outputs`: of the model, for each label of the data, [K]. `competing`: those that
    compete, sorted; None: all. `several`, `loss`, `batch_size`: see `evaluate`.
    """
    if competing is None:
        competing = np.arange(model.num_outputs)
    places = np.searchsorted(competing, outputs).clip(max=len(competing) - 1)
    reader = model.reader(relabel(data, places, len(competing)), batch_size)
    task = Task.of(model.text_head or model.module)
    evaluator: Any
    if several:
        task = dataclasses.replace(task, class_names=data.class_names)
        evaluator = classification.AveragePrecisionEvaluator(MultiLabel(task), reader)
    else:
        by = model.description.probabilities_by
        loss = loss or ("softmax" if by == "none" else by)
        objective = _SubsetClassification(task, competing, loss=loss)
        evaluator = classification.ClassificationEvaluator(objective, reader)
    with watched(None, "batch", -(-data.num_examples // reader.batch_size)) as bar:
        arrays = evaluator.examples(model.placed_params, on_batch=bar.update)
    moved = () if several else ("label", "prediction")
    return arrays | {name: competing[arrays[name]] for name in moved}
