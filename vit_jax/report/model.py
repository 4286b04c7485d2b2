"""The sections that ask the trained model: what it takes for what, and what is inside."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from typing import Any

import cv2
import numpy as np

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.errors import UserError, counted, import_extra
from vit_jax.evaluators.classification import confusion_matrix
from vit_jax.evaluators.create import OF_FEATURES
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.evaluate import measure_examples
from vit_jax.inference.images import example_names
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.pictures import draw_distances
from vit_jax.inference.visualize import (
    head_distances,
    of_images,
    of_parameters,
    pixels_of,
    spread,
)
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.report.page import Html, details, note, picture, table, tag
from vit_jax.report.runs import Run
from vit_jax.workdir.description import PARAMS_FILE

MOST_CLASSES = 30  # of a confusion matrix; with more, a list of pairs
_PAIRS = 20
_MISTAKES = 12
_PIXELS = 160  # of an image's longer side
_LOOKED_AT = 32  # images of the attention distance
_BATCH = 8
# Of each picture: its title, what it shows to those who do not see it, how to read it.
_PICTURES = {
    "filters": (
        "Embedding filters",
        "A grid of small patches: the principal components of the embedding filters.",
        "Each in a range of its own; below it the share of the variance that it explains.",
    ),
    "positions": (
        "Position embeddings",
        "A grid of maps, one for each of some places, brightest where embeddings are alike.",
        "Of each place the similarity of its embedding with those of all places.",
    ),
    "attention_distance": (
        "Mean attention distance",
        "A dot for each head over the blocks; the table below has the numbers.",
        "How far each head looks, and (dashed) one that looks everywhere alike.",
    ),
    "rollout": (
        "Attention rollout",
        "Evaluation images, each beside itself below a map of the attention that reaches it.",
        "What the output sees of evaluation images: bright is more.",
    ),
}


class Spread:
    """A source of the examples `indices` of another one."""

    def __init__(self, source: Any, indices: list[int]):
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._indices[index]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model, and some of the examples that it is evaluated on.

    Attributes:
      model: with the preprocessing of the evaluator.
      data: the examples, or why there are none.
      names: where each is stored.
      of: how many there are in all.
    """

    model: Model
    data: Dataset | UserError
    names: list[str]
    of: int

    def images(self, indices: Iterable[int]) -> list[Any]:
        """As `Model` takes them."""
        assert isinstance(self.data, Dataset)
        return [self.data.source[int(i)]["image"] for i in indices]


def load_subject(run: Run, max_examples: int) -> Subject:
    """Loads the parameters, and opens the data of the evaluator that stands for the run.

    Raises:
      UserError: there are no parameters yet, or they cannot be read.
    """
    if not (run.folder / PARAMS_FILE).exists():
        raise UserError(f"The run has not written {PARAMS_FILE} yet, which comes at its end.")
    source = str(run.folder)
    try:
        evaluator = _own_evaluator(run)
        preprocess = evaluator["preprocess"] or run.config["dataset"]["eval_preprocess"]
        data = _open_data(run, evaluator, preprocess, max_examples)
    except UserError as error:
        return Subject(load_model(source), error, [], 0)
    names = example_names(data.source, data.split)
    indices = spread(range(len(names)), max_examples)
    some = dataclasses.replace(data, source=Spread(data.source, indices))
    model = load_model(source, preprocess=preprocess)
    return Subject(model, some, [names[i] for i in indices], len(names))


def _own_evaluator(run: Run) -> dict[str, Any]:
    """The evaluator whose data say most about the model's own outputs."""
    evaluators, main = run.config["evaluators"], run.main_metric.partition("/")[0]
    own = [key for key, each in evaluators.items() if each["name"] not in OF_FEATURES]
    if not own:
        raise UserError("The config has no evaluator that reads images for this model.")
    return evaluators[main if main in own else own[0]]


def _open_data(run: Run, evaluator: dict[str, Any], preprocess: str, max_examples: int) -> Dataset:
    if not max_examples:
        raise UserError("No examples were asked for (--max_examples=0).")
    data = run.config["dataset"]
    opened = create_dataset(
        name=evaluator["dataset"] or data["name"],
        split=evaluator["split"],
        preprocess=preprocess,
        data_dir=evaluator["data_dir"] or data["data_dir"],
        label_key=evaluator["label_key"] or ("" if evaluator["dataset"] else data["label_key"]),
        on_bad_image=data["on_bad_image"],
        needs_label="label" in OBJECTIVES[run.config["objective"]["name"]].example_keys,
    )
    return opened.check() if opened.on_bad_image == "skip" else opened  # it reads every image


def predictions(run: Run, subject: Subject) -> list[Html]:
    """Confusion matrix, and the mistakes that the model is surest of.

    Raises:
      UserError: there are no examples, or none of one label.
    """
    name = run.config["objective"]["name"]
    if "label" not in OBJECTIVES[name].example_keys or OBJECTIVES[name].several_labels:
        raise UserError(f"There is no confusion matrix: objective.name={name!r} has no one label.")
    model, data = subject.model, subject.data
    if isinstance(data, UserError):
        raise data
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(data.class_names, model.class_names, num_outputs)
    arrays = measure_examples(model, data, outputs)
    labels, guesses = arrays["label"], arrays["prediction"]
    wrong = np.flatnonzero(labels != guesses)
    used = counted(len(labels), "example")
    if len(labels) < subject.of:
        used += f", evenly spread over the {subject.of:,},"
    times = f"{counted(len(wrong), 'time')} ({len(wrong) / len(labels):.2%})"
    text = f"On {used} of {data.name} {data.split}, the model is wrong {times}."
    return [
        tag("p", text),
        tag("h3", "Confusion matrix"),
        *_confusion(labels, guesses, model.class_names),
        tag("h3", "Most confident mistakes"),
        *_mistakes(subject, arrays, wrong),
    ]


def _confusion(labels: np.ndarray, guesses: np.ndarray, names: tuple[str, ...]) -> list[Html]:
    found, counts = confusion_matrix(labels, guesses)
    classes = [names[i] for i in found]
    if len(found) > MOST_CLASSES:
        return _pairs(counts, classes)
    # Roots of shares, or one mistake of thirty would be pale.
    shades = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))

    def cell(i: int, j: int) -> Html:
        kind = "none" if not counts[i, j] else "right" if i == j else "wrong"
        return tag("td", counts[i, j], class_=kind, style=f"--share:{shades[i, j]:.2f}")

    rows = [(name, *(cell(i, j) for j in range(len(found)))) for i, name in enumerate(classes)]
    text = "A row is a class, a column what its images were taken for; blue is right."
    label = "Confusion matrix"
    return [note(text), table(["label", *classes], rows, label=label, kind="confusion")]


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
    return [note(text), table(columns, rows, label="Confusions")]


def _mistakes(subject: Subject, arrays: dict[str, np.ndarray], wrong: np.ndarray) -> list[Html]:
    model = subject.model
    surest = wrong[np.argsort(-arrays["confidence"][wrong], kind="stable")][:_MISTAKES]
    if not len(surest):
        return [note("There is none.")]
    shown = pixels_of(model, model.preprocess(subject.images(surest)))
    figures = []
    for i, pixels in zip(surest, shown, strict=True):
        label, guess = (model.class_names[arrays[k][i]] for k in ("label", "prediction"))
        sure = f"{arrays['confidence'][i]:.1%}"
        alt = f"{subject.names[i]}: label {label}, predicted {guess} with {sure}"
        texts = ("label ", tag("b", label), ", predicted ", tag("b", guess), f", {sure}")
        kind, data = _encode(pixels)
        caption = tag("span", *texts)
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


def inside(subject: Subject) -> list[Html]:
    """The pictures that the model has; those of images only where there are examples.

    Raises:
      UserError: matplotlib is not installed.
    """
    import_extra("A picture of the model", "matplotlib", "embedded")
    model, numbers = subject.model, list[Html]()
    drawings = of_parameters(model)
    if isinstance(subject.data, UserError):
        reason = str(subject.data).rstrip(".")
        drawings |= dict.fromkeys(("attention_distance", "rollout"), lambda: reason)
    else:
        few = spread(range(len(subject.names)), _LOOKED_AT)
        images = subject.images(few)
        drawings |= of_images(model, images, [subject.names[i] for i in few], _BATCH)
        if model.module.num_layers:
            distances, uniform = head_distances(model, images, _BATCH)
            drawings["attention_distance"] = lambda: draw_distances(distances, uniform)
            numbers = _distances(distances, len(images))
    content: list[Html] = []
    for name, (title, alt, caption) in _PICTURES.items():
        figure = drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
            continue
        kind = "jpeg" if name == "rollout" else "png"  # photos would be a megabyte
        with io.BytesIO() as file:
            figure.savefig(file, format=kind, dpi=100)
            content.append(picture(file.getvalue(), kind=kind, alt=alt, caption=caption))
        content += numbers if name == "attention_distance" else []
    return content


def _distances(distances: np.ndarray, num_images: int) -> list[Html]:
    """The numbers [L, H] behind the picture."""
    columns = ["block", *(f"head {i}" for i in range(1, distances.shape[1] + 1))]
    rows = [(block, *(f"{x:.1f}" for x in row)) for block, row in enumerate(distances, start=1)]
    label = f"Mean attention distance in pixels, over {counted(num_images, 'image')}"
    numbers = table(columns, rows, label=label, kind="numbers")
    return [details("Numbers", note(f"{label}."), numbers)]
