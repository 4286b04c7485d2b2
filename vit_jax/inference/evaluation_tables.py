"""The files that an evaluation writes (CSV), and the text it prints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.evaluators.classification import average_precisions, class_scores
from vit_jax.files.paths import csv_text, write_atomically
from vit_jax.wording import counted

_ROWS = {
    "mAP": "mAP                {:9.2%}",
    "mIoU": "mean IoU           {:9.2%}",
    "pixel_accuracy": "pixel accuracy     {:9.2%}",
    "mae": "MAE                {:9.4g}",
    "rmse": "RMSE               {:9.4g}",
    "r2": "R2                 {:9.4f}",
    "abs_rel": "relative error     {:9.2%}",
    "delta1": "delta1             {:9.2%}",
    "accuracy": "top-1 accuracy     {:9.2%}",
    "accuracy_top5": "top-5 accuracy     {:9.2%}",
    "accuracy_real": "ReaL accuracy      {:9.2%}",
    "macro_f1": "mean F1 of classes {:9.2%}",
    "calibration_error": "calibration error  {:9.2%}",
    "loss": "mean loss          {:9.4f}",
}


def write_examples(
    folder: Path, examples: Sequence[str], names: Mapping[int, str], arrays: dict[str, np.ndarray]
) -> None:
    """`examples.csv`, one line per example: names in the order of `arrays`.

    `names`: of the model's outputs, which without a name use their number; `arrays`: see
    `ClassificationEvaluator.examples`.
    """
    columns = [arrays[key].tolist() for key in ("label", "prediction", "confidence", "loss")]
    rows = [
        [example, names.get(label, label), names.get(guess, guess), f"{sure:.6f}", f"{loss:.6g}"]
        for example, label, guess, sure, loss in zip(examples, *columns, strict=True)
    ]
    header = ["example", "label", "prediction", "confidence", "loss"]
    write_atomically(folder / "examples.csv", csv_text([header, *rows]))


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes [K] among labels or predictions [N], and int [K, K]: i predicted as j."""
    classes, places = np.unique(np.stack([labels, predictions]), return_inverse=True)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, tuple(places.reshape(2, -1)), 1)
    return classes, counts


def write_confusion(folder: Path, names: Mapping[int, str], arrays: dict[str, np.ndarray]) -> None:
    """`confusion.csv`, one row per class and one column per prediction; see `confusion_matrix`."""
    classes, counts = confusion_matrix(arrays["label"], arrays["prediction"])
    columns = [names.get(number, number) for number in classes.tolist()]
    rows = [[name, *row] for name, row in zip(columns, counts.tolist(), strict=True)]
    write_atomically(folder / "confusion.csv", csv_text([["label \\ prediction", *columns], *rows]))


def per_class_scores(
    names: Mapping[int, str], arrays: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """`class_scores` of each class, by its name; for `names` and `arrays` see `write_examples`."""
    scores = class_scores(arrays["label"], arrays["prediction"])
    columns = {name: column.tolist() for name, column in scores.items()}
    columns["class"] = [str(names.get(number, number)) for number in columns["class"]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write_classes(folder: Path, scores: Sequence[Mapping[str, Any]]) -> None:
    """`classes.csv`: `per_class_scores`, in percent."""
    measures = ("accuracy", "precision", "f1")
    rows = [
        [row["class"], row["images"], *(f"{100 * row[name]:.2f}" for name in measures)]
        for row in scores
    ]
    header = ["class", "images", *(f"{name}_percent" for name in measures)]
    write_atomically(folder / "classes.csv", csv_text([header, *rows]))


def write_average_precisions(
    folder: Path, class_names: Sequence[str], outputs: np.ndarray, arrays: dict[str, np.ndarray]
) -> None:
    """`classes.csv`: each class, its number of images, and its average precision.

    `class_names` are the dataset's, `outputs` [K] the model's; `arrays`: see
    `AveragePrecisionEvaluator.examples`.
    """
    precisions = average_precisions(arrays["logits"], arrays["label"])[outputs]
    counts = arrays["label"].sum(axis=0)[outputs]
    rows = [
        [name, int(count), f"{precision:.6f}" if count else ""]
        for name, count, precision in zip(class_names, counts, precisions, strict=True)
    ]
    header = ["class", "images", "average_precision"]
    write_atomically(folder / "classes.csv", csv_text([header, *rows]))


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    count = counted(results["num_examples"], "example")
    lines = [f"{count} of {results['dataset']} {results['split']}"]
    lines += [text.format(results[key]) for key, text in _ROWS.items() if key in results]
    if "num_examples_real" in results:
        lines.append(f"(ReaL over the {results['num_examples_real']} images with labels)")
    if "per_class" in results:
        lines += ["", *_class_lines(results["per_class"])]
    return "\n".join(lines)


def _class_lines(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per class; if there are more than 20, the 10 with the lowest accuracy."""
    shown, title = list(scores), "class"
    if "IoU" in shown[0]:
        cells = ["no pixels" if row["IoU"] is None else f"{row['IoU']:9.2%}" for row in shown]
        rows = zip(shown, cells, strict=True)
        return [f"{row['class'][:30]:30} {cell} of {row['pixels']:,}" for row, cell in rows]
    if len(shown) > 20:
        with_images = [row for row in shown if row["images"]]
        shown = sorted(with_images, key=lambda row: (row["accuracy"], -row["images"]))[:10]
        title = f"worst of {len(scores)} classes"
    width = max(len(title), *(min(len(row["class"]), 30) for row in shown))
    lines = [f"{title:{width}}  images  accuracy  precision       F1"]
    for row in shown:
        shares = f"{row['accuracy']:9.2%} {row['precision']:10.2%} {row['f1']:8.2%}"
        lines.append(f"{row['class'][:30]:{width}} {row['images']:7} {shares}")
    return lines
