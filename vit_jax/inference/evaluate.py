"""Measures a model, of any format, on a labelled dataset."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.evaluators.classification import ClassificationEvaluator, real_accuracy, summarize
from vit_jax.files.atomic import write_json
from vit_jax.inference.class_order import match_classes, relabel
from vit_jax.inference.inputs import create_reader, example_names, input_chain
from vit_jax.inference.load import load_model
from vit_jax.inference.real_labels import real_labels
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import replicated

RESULTS_FILE = "evaluation.json"
EXAMPLES_FILE = "examples.csv"

# Key of the results, how it is called in the table, and whether it is a share.
ROWS = (
    ("accuracy", "top-1 accuracy", True),
    ("accuracy_top5", "top-5 accuracy", True),
    ("accuracy_real", "ReaL accuracy", True),
    ("calibration_error", "calibration error", True),
    ("loss", "mean loss", False),
)


def evaluate(
    source: str,
    *,
    dataset: str,
    split: str,
    data_dir: str = "",
    label_key: str = "",
    on_bad_image: str = "error",
    preprocess: str = "",
    batch_size: int = 128,
    real: str = "",
    ignore_class_names: bool = False,
    loss: str = "softmax",
    output: str = "",
    **model_options: Any,
) -> dict[str, Any]:
    """Loads a model and measures it on every example of a split.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      dataset, split, data_dir, label_key, on_bad_image: see `create_dataset`.
      preprocess: ops; "" for the checkpoint's own.
      batch_size: over all devices; rounded up to what they can share.
      real: path of `real.json`, see `real_labels`.
      ignore_class_names: see `match_classes`.
      loss: key of `LOSSES` that the model was trained with; also gives the probabilities.
      output: folder for `evaluation.json` and `examples.csv` (one line per example).

    Returns:
      `accuracy`, `accuracy_top5` (with more than 5 outputs), `loss`, `calibration_error`,
      `num_examples`, with ReaL labels `accuracy_real` and `num_examples_real`, and what was
      measured on what.

    Raises:
      UserError: model and dataset do not go together, a file is missing or damaged.
    """
    model = load_model(source, **model_options)
    objective = Classification(Task.of(model.module), loss=loss)
    chain, _ = input_chain(model.description, preprocess)
    data = create_dataset(
        name=dataset,
        split=split,
        preprocess=preprocess or model.description.eval_preprocess,
        data_dir=data_dir,
        label_key=label_key,
        on_bad_image=on_bad_image,
    )
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(
        data.class_names,
        model.description.class_names,
        num_outputs,
        ignore_names=ignore_class_names,
    )
    data = data.check()
    sets = real_labels(data, real)
    if output:
        Path(output).mkdir(parents=True, exist_ok=True)
    relabelled = relabel(dataclasses.replace(data, preprocess=chain), outputs)
    start = time.perf_counter()
    reader = create_reader(relabelled, batch_size)
    evaluator = ClassificationEvaluator(objective, reader)
    arrays = evaluator.examples(jax.device_put(model.params, replicated(reader.mesh)))
    seconds = time.perf_counter() - start
    results = summarize(arrays)
    if sets is not None:
        matched = [[int(outputs[label]) for label in each] for each in sets]
        accuracy, count = real_accuracy(arrays["prediction"], matched)
        results |= {"accuracy_real": accuracy, "num_examples_real": count}
    results |= {
        "model": source,
        "format": model.format,
        "dataset": dataset,
        "split": split,
        "preprocess": preprocess or model.description.eval_preprocess,
        **model_options,
        "seconds": seconds,
    }
    if output:
        write_json(Path(output) / RESULTS_FILE, results)
        names = output_names(model.description.class_names, data.class_names, outputs, num_outputs)
        write_examples(Path(output) / EXAMPLES_FILE, data, names, arrays)
    return results


def output_names(
    model_names: tuple[str, ...],
    dataset_names: tuple[str, ...],
    outputs: np.ndarray,
    num_outputs: int,
) -> list[str]:
    """A name for every output: the model's, else the dataset's, else its number."""
    if model_names:
        return list(model_names)
    names = [str(number) for number in range(num_outputs)]
    for name, number in zip(dataset_names, outputs, strict=True):
        names[number] = name
    return names


def write_examples(
    path: Path, dataset: Dataset, names: list[str], arrays: dict[str, np.ndarray]
) -> None:
    """A CSV file with one line per example, in the order of the split."""
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["example", "label", "prediction", "confidence", "loss"])
        for row in zip(
            example_names(dataset.source, dataset.split),
            (names[number] for number in arrays["label"]),
            (names[number] for number in arrays["prediction"]),
            (f"{value:.6f}" for value in arrays["confidence"]),
            (f"{value:.6g}" for value in arrays["loss"]),
            strict=True,
        ):
            writer.writerow(row)


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{results['num_examples']} examples of {results['dataset']} {results['split']}"]
    for key, text, is_share in ROWS:
        if key in results:
            value = results[key]
            lines.append(
                f"{text:20}{100 * value:8.2f} %" if is_share else f"{text:20}{value:10.4f}"
            )
    if "num_examples_real" in results:
        lines.append(f"(ReaL over the {results['num_examples_real']} images that have labels)")
    return "\n".join(lines)


def print_results(results: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(results) if as_json else table(results))
