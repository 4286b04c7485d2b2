"""The sections that ask the trained model: what it takes for what, and what is inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import cv2
import numpy as np

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.errors import UserError, counted, import_extra
from vit_jax.evaluators.classification import confusion_matrix
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
from vit_jax.report.page import Html, details, figure_picture, note, picture, table, tag
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


class Sample:
    """At most so many examples of a source, evenly spread.

    Attributes:
      names: where each is stored.
      of: how many there are in all.
    """

    def __init__(self, data: Dataset, count: int):
        names = example_names(data.source, data.split)
        self._source, self._indices = data.source, spread(range(len(names)), count)
        self.names, self.of = [names[i] for i in self._indices], len(names)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._indices[index]]


def load_subject(run: Run, max_examples: int) -> tuple[Model, Dataset | UserError]:
    """The model, and a `Sample` of what it is evaluated on, or why there is none.

    Raises:
      UserError: there are no parameters yet, or they cannot be read.
    """
    if not (run.folder / PARAMS_FILE).exists():
        raise UserError(f"The run has not written {PARAMS_FILE} yet, which comes at its end.")
    source, config = str(run.folder), run.config
    # Others read features, not what the model answers.
    own = {key: each for key, each in config["evaluators"].items() if "feature" not in each}
    if not own:
        why = "The config has no evaluator that reads images for this model."
        return load_model(source), UserError(why)
    evaluator = own.get(run.main_metric.partition("/")[0]) or next(iter(own.values()))
    preprocess = evaluator["preprocess"] or config["dataset"]["eval_preprocess"]
    model = load_model(source, preprocess=preprocess)
    if not max_examples:
        return model, UserError("No examples were asked for (--max_examples=0).")
    is_other, data = bool(evaluator["dataset"]), config["dataset"]
    try:
        opened = create_dataset(
            name=evaluator["dataset"] or data["name"],
            split=evaluator["split"],
            preprocess=preprocess,
            data_dir=evaluator["data_dir"] or data["data_dir"],
            label_key=evaluator["label_key"] or ("" if is_other else data["label_key"]),
            on_bad_image=data["on_bad_image"],
            needs_label=bool(model.class_names),
        )
        if opened.on_bad_image == "skip":  # it reads every image
            opened = opened.check()
    except UserError as error:
        return model, error
    return model, dataclasses.replace(opened, source=Sample(opened, max_examples))


def predictions(run: Run, model: Model, data: Dataset | UserError) -> list[Html]:
    """Confusion matrix, and the mistakes that the model is surest of.

    Raises:
      UserError: there are no examples, or none of one label.
    """
    name = run.config["objective"]["name"]
    if not model.class_names or name == "multi_label":
        raise UserError(f"There is no confusion matrix: objective.name={name!r} has no one label.")
    if isinstance(data, UserError):
        raise data
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(data.class_names, model.class_names, num_outputs)
    arrays = measure_examples(model, data, outputs)
    labels, guesses = arrays["label"], arrays["prediction"]
    wrong = np.flatnonzero(labels != guesses)
    sample: Any = data.source
    used = counted(len(labels), "example")
    if len(labels) < sample.of:
        used += f", evenly spread over the {sample.of:,},"
    times = f"{counted(len(wrong), 'time')} ({len(wrong) / len(labels):.2%})"
    text = f"On {used} of {data.name} {data.split}, the model is wrong {times}."
    return [
        tag("p", text),
        tag("h3", "Confusion matrix"),
        *_confusion(labels, guesses, model.class_names),
        tag("h3", "Most confident mistakes"),
        *_mistakes(model, sample, arrays, wrong),
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


def _mistakes(
    model: Model, sample: Sample, arrays: dict[str, np.ndarray], wrong: np.ndarray
) -> list[Html]:
    surest = wrong[np.argsort(-arrays["confidence"][wrong], kind="stable")][:_MISTAKES]
    if not len(surest):
        return [note("There is none.")]
    shown = pixels_of(model, model.preprocess([sample[i]["image"] for i in surest]))
    figures = []
    for i, pixels in zip(surest, shown, strict=True):
        label, guess = (model.class_names[arrays[k][i]] for k in ("label", "prediction"))
        sure = f"{arrays['confidence'][i]:.1%}"
        alt = f"{sample.names[i]}: label {label}, predicted {guess} with {sure}"
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


def inside(model: Model, data: Dataset | UserError) -> list[Html]:
    """The pictures that the model has; those of images only where there are examples.

    Raises:
      UserError: matplotlib is not installed.
    """
    import_extra("A picture of the model", "matplotlib", "embedded")
    drawings, numbers = of_parameters(model), list[Html]()
    if isinstance(data, UserError):
        reason = str(data).rstrip(".")
        drawings |= dict.fromkeys(("attention_distance", "rollout"), lambda: reason)
    else:
        sample: Any = data.source
        few = spread(range(len(sample)), _LOOKED_AT)
        images = [sample[i]["image"] for i in few]
        drawings |= of_images(model, images, [sample.names[i] for i in few], _BATCH)
        if model.module.num_layers:
            distances, uniform = head_distances(model, images, _BATCH)
            drawings["attention_distance"] = lambda: draw_distances(distances, uniform)
            columns = ["block", *(f"head {i}" for i in range(1, distances.shape[1] + 1))]
            rows = [(i, *(f"{x:.1f}" for x in row)) for i, row in enumerate(distances, start=1)]
            label = f"Mean attention distance in pixels, over {counted(len(few), 'image')}"
            found = table(columns, rows, label=label, kind="numbers")
            numbers = [details("Numbers", note(f"{label}."), found)]
    content: list[Html] = []
    for name, (title, alt, caption) in _PICTURES.items():
        figure = drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
            continue
        kind = "jpeg" if name == "rollout" else "png"  # photos would be a megabyte
        content.append(figure_picture(figure, kind=kind, alt=alt, caption=caption))
        content += numbers if name == "attention_distance" else []
    return content
