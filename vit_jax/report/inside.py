"""The sections that ask the model: what it confuses, where it is wrong, what is inside."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np

from vit_jax.analysis.pictures import draw_distances
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.errors import UserError, counted, import_extra
from vit_jax.evaluators.classification import confusion_matrix
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.evaluate import measure_examples
from vit_jax.inference.inputs import example_names
from vit_jax.inference.model import Model, load_model
from vit_jax.inference.visualize import (
    head_distances,
    of_images,
    of_parameters,
    pixels_of,
    spread,
)
from vit_jax.report.facts import Facts
from vit_jax.report.page import Html, cell, details, note, picture, section, table, tag
from vit_jax.workdir.description import PARAMS_FILE

MOST_CLASSES = 30  # of a confusion matrix; with more, a list of pairs
_PAIRS = 20
_MISTAKES = 12
_LOOKED_AT = 32  # images of the attention distance
_BATCH = 8
_PIXELS = 160  # of an image's longer side
_DPI = 100
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


@dataclasses.dataclass(frozen=True)
class Spread:
    """A source of the examples `indices` of another one."""

    source: Any
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[self.indices[index]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model, and some examples of its evaluation data with their names."""

    model: Model
    data: Dataset
    names: list[str]
    of: int  # examples in all

    def images(self, indices: Any) -> list[Any]:
        return [self.data.source[int(i)]["image"] for i in indices]


def load_subject(facts: Facts, max_examples: int) -> Subject:
    """Loads the parameters and opens the data of the evaluator that stands for the run.

    Raises:
      UserError: there are no parameters yet, no evaluator, or its data cannot be read.
    """
    if not (facts.folder / PARAMS_FILE).exists():
        raise UserError(f"The run has not written {PARAMS_FILE} yet, which comes at its end.")
    if not max_examples:
        raise UserError("No examples were asked for (--max_examples=0).")
    model = load_model(str(facts.folder))
    data, evaluator = facts.config["dataset"], facts.config["evaluators"][facts.own_evaluator]
    preprocess = evaluator["preprocess"] or data["eval_preprocess"]
    opened = create_dataset(
        name=evaluator["dataset"] or data["name"],
        split=evaluator["split"],
        preprocess=preprocess,
        data_dir=evaluator["data_dir"] or data["data_dir"],
        label_key=evaluator["label_key"] or ("" if evaluator["dataset"] else data["label_key"]),
        on_bad_image=data["on_bad_image"],
        needs_label="label" in facts.objective.example_keys,
    )
    if opened.on_bad_image == "skip":  # reads every image
        opened = opened.check()
    indices = spread(range(opened.num_examples), max_examples)
    names = example_names(opened.source, opened.split)
    description = dataclasses.replace(model.description, eval_preprocess=preprocess)
    return Subject(
        dataclasses.replace(model, description=description),
        dataclasses.replace(opened, source=Spread(opened.source, indices)),
        [names[i] for i in indices],
        opened.num_examples,
    )


def predictions(facts: Facts, subject: Subject) -> list[Html]:
    """What is taken for what, and the mistakes that the model is surest of."""
    if "label" not in facts.objective.example_keys or facts.objective.several_labels:
        name = facts.config["objective"]["name"]
        raise UserError(f"There is no confusion matrix: objective.name={name!r} has no one label.")
    known, total = subject.model.class_names, subject.model.description.model["num_classes"]
    outputs = match_classes(subject.data.class_names, known, total)
    arrays = measure_examples(subject.model, subject.data, outputs)
    labels, guesses = arrays["label"], arrays["prediction"]
    wrong = np.flatnonzero(labels != guesses)
    used = counted(len(labels), "example")
    if len(labels) < subject.of:
        used += f", evenly spread over the {subject.of:,},"
    where = f"{subject.data.name} {subject.data.split}"
    share = f"{len(wrong) / len(labels):.2%}"
    text = f"On {used} of {where}, the model is wrong {counted(len(wrong), 'time')} ({share})."
    return [
        tag("p", text),
        tag("h3", "What is taken for what"),
        *_confusion(labels, guesses, known),
        tag("h3", "Surest mistakes"),
        *_mistakes(subject, arrays, wrong),
    ]


def _confusion(labels: np.ndarray, guesses: np.ndarray, names: tuple[str, ...]) -> list[Html]:
    found, places = np.unique(np.stack([labels, guesses]), return_inverse=True)
    counts = confusion_matrix(*places.reshape(2, -1), len(found))
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


def _mistakes(subject: Subject, arrays: dict[str, np.ndarray], wrong: np.ndarray) -> list[Html]:
    surest = wrong[np.argsort(-arrays["confidence"][wrong], kind="stable")][:_MISTAKES]
    if not len(surest):
        return [note("There is none.")]
    shown = pixels_of(subject.model, subject.model.preprocess(subject.images(surest)))
    figures = []
    for i, pixels in zip(surest, shown, strict=True):
        label, guess = (subject.model.class_names[arrays[k][i]] for k in ("label", "prediction"))
        sure = f"{arrays['confidence'][i]:.1%}"
        alt = f"{subject.names[i]}: label {label}, predicted {guess} with {sure}"
        caption = tag(
            "span", "label ", tag("b", label), ", predicted ", tag("b", guess), f", {sure}"
        )
        kind, data = encode(pixels)
        figures.append(picture(data, kind=kind, alt=alt, caption=caption, class_="mistake"))
    return [tag("div", *figures, class_="mistakes")]


def encode(pixels: np.ndarray) -> tuple[str, bytes]:
    """An image [H, W, C] in [0, 1] as a small file: its format and content."""
    image: Any = np.asarray(np.round(255 * pixels[..., ::-1]), np.uint8)  # BGR
    scale = _PIXELS / max(image.shape[:2])
    if scale < 1:
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    kind = "png" if max(image.shape[:2]) < 64 else "jpeg"
    return kind, cv2.imencode(f".{kind}", image)[1].tobytes()


def inside(_: Facts, subject: Subject) -> list[Html]:
    """Figure 7 of this model, and attention rollout."""
    import_extra("A picture of the model", "matplotlib", "embedded")
    model, few = subject.model, spread(range(len(subject.names)), _LOOKED_AT)
    images, names = subject.images(few), [subject.names[i] for i in few]
    drawings = of_parameters(model) | of_images(model, images, names, _BATCH)
    distances: list[Html] = []
    if model.module.num_layers:
        found, uniform = head_distances(model, images, _BATCH)
        drawings["attention_distance"] = lambda: draw_distances(found, uniform)
        heads = [f"head {i}" for i in range(1, found.shape[1] + 1)]
        rows = [(block, *(f"{x:.1f}" for x in row)) for block, row in enumerate(found, start=1)]
        label = f"Mean attention distance in pixels, over {counted(len(images), 'image')}"
        numbers = table(["block", *heads], rows, label=label, kind="numbers")
        distances = [details("Numbers", note(f"{label}."), numbers)]
    content: list[Html] = []
    for name, (title, alt, caption) in _PICTURES.items():
        figure = drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
        else:
            content.append(picture(_png(figure), kind="png", alt=alt, caption=caption))
        content += distances if name == "attention_distance" else []
    return content


def _png(figure: Any) -> bytes:
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=_DPI)
        return file.getvalue()


SECTIONS: dict[str, tuple[str, Callable[[Facts, Subject], list[Html]]]] = {
    "predictions": ("Predictions", predictions),
    "inside": ("Inside the model", inside),
}


def model_sections(facts: Facts, max_examples: int) -> Iterator[tuple[str, str, Html]]:
    """`SECTIONS` as `page` takes them; each says in a sentence why it is empty, if it is."""
    subject: Subject | UserError
    try:
        subject = load_subject(facts, max_examples)
    except UserError as error:
        subject = error
    for key, (title, content) in SECTIONS.items():
        try:
            if isinstance(subject, UserError):
                raise subject
            yield section(key, title, *content(facts, subject))
        except UserError as error:
            yield section(key, title, note(f"Not shown. {error}"))
