"""What the model takes for what, and where it is surest and wrong."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from vit_jax.errors import UserError, counted
from vit_jax.evaluators.classification import confusion_matrix
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.evaluate import measure_examples
from vit_jax.inference.model import Model
from vit_jax.inference.visualize import pixels_of
from vit_jax.report.facts import Facts
from vit_jax.report.page import Html, cell, note, picture, table, tag
from vit_jax.report.subject import Examples, Subject

MOST_CLASSES = 30  # of a confusion matrix; with more, a list of pairs
_PAIRS = 20
_MISTAKES = 12
_PIXELS = 160  # of an image's longer side


def predictions(facts: Facts, subject: Subject) -> list[Html]:
    """Confusion matrix, and the mistakes that the model is surest of.

    Raises:
      UserError: there are no examples, or none of one label.
    """
    if "label" not in facts.objective.example_keys or facts.objective.several_labels:
        name = facts.config["objective"]["name"]
        raise UserError(f"There is no confusion matrix: objective.name={name!r} has no one label.")
    model, examples = subject.model, subject.examples
    if isinstance(examples, UserError):
        raise examples
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(examples.data.class_names, model.class_names, num_outputs)
    arrays = measure_examples(model, examples.data, outputs)
    labels, guesses = arrays["label"], arrays["prediction"]
    wrong = np.flatnonzero(labels != guesses)
    used = counted(len(labels), "example")
    if len(labels) < examples.of:
        used += f", evenly spread over the {examples.of:,},"
    where = f"{examples.data.name} {examples.data.split}"
    share = f"{len(wrong) / len(labels):.2%}"
    text = f"On {used} of {where}, the model is wrong {counted(len(wrong), 'time')} ({share})."
    return [
        tag("p", text),
        tag("h3", "Confusion matrix"),
        *_confusion(labels, guesses, model.class_names),
        tag("h3", "Most confident mistakes"),
        *_mistakes(model, examples, arrays, wrong),
    ]


def _confusion(labels: np.ndarray, guesses: np.ndarray, names: tuple[str, ...]) -> list[Html]:
    found, counts = confusion_matrix(labels, guesses)
    classes = [names[i] for i in found]
    if len(found) > MOST_CLASSES:
        return _pairs(counts, classes)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [
        (name, *(_count(counts[i, j], shares[i, j], i == j) for j in range(len(found))))
        for i, name in enumerate(classes)
    ]
    text = "A row is a class, a column what its images were taken for; blue is right."
    columns = ["label", *classes]
    return [note(text), table(columns, rows, label="Confusion matrix", kind="confusion")]


def _count(count: int, share: float, right: bool) -> Html:
    kind = "none" if not count else "right" if right else "wrong"
    # The root, or one mistake of thirty would be pale.
    return cell(int(count), class_=kind, style=f"--share:{share**0.5:.2f}")


def _pairs(counts: np.ndarray, classes: list[str]) -> list[Html]:
    """The most frequent confusions of many classes."""
    apart = counts * (1 - np.eye(len(counts), dtype=int))
    order = np.argsort(-apart, axis=None, kind="stable")[:_PAIRS]
    pairs = [np.unravel_index(i, counts.shape) for i in order if apart.flat[i]]
    rows = [(classes[i], classes[j], int(apart[i, j]), int(counts[i].sum())) for i, j in pairs]
    if not rows:
        return [note("Nothing was confused.")]
    columns = ["label", "taken for", "times", "images of the label"]
    text = f"The most frequent of {len(classes)} classes' confusions."
    return [note(text), table(columns, rows, label="Confusions", kind="text")]


def _mistakes(
    model: Model, examples: Examples, arrays: dict[str, np.ndarray], wrong: np.ndarray
) -> list[Html]:
    surest = wrong[np.argsort(-arrays["confidence"][wrong], kind="stable")][:_MISTAKES]
    if not len(surest):
        return [note("There is none.")]
    shown = pixels_of(model, model.preprocess(examples.images(surest)))
    figures = []
    for i, pixels in zip(surest, shown, strict=True):
        label, guess = (model.class_names[arrays[k][i]] for k in ("label", "prediction"))
        sure = f"{arrays['confidence'][i]:.1%}"
        alt = f"{examples.names[i]}: label {label}, predicted {guess} with {sure}"
        caption = tag(
            "span", "label ", tag("b", label), ", predicted ", tag("b", guess), f", {sure}"
        )
        kind, data = _encode(pixels)
        figures.append(picture(data, kind=kind, alt=alt, caption=caption, class_="mistake"))
    return [tag("div", *figures, class_="mistakes")]


def _encode(pixels: np.ndarray) -> tuple[str, bytes]:
    """An image [H, W, C] in [0, 1] as a small file: its format and content."""
    image: Any = np.asarray(np.round(255 * pixels[..., ::-1]), np.uint8)  # BGR
    scale = _PIXELS / max(image.shape[:2])
    if scale < 1:
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    kind = "png" if max(image.shape[:2]) < 64 else "jpeg"
    return kind, cv2.imencode(f".{kind}", image)[1].tobytes()
