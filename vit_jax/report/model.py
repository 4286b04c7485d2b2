"""The sections that ask the trained model: what it takes for what, and what is inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import cv2
import numpy as np

from vit_jax.errors import UserError, counted, import_extra
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.evaluate import measure_examples
from vit_jax.inference.evaluation_tables import confusion_matrix
from vit_jax.inference.images import example_names
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.visualize import of_images, of_parameters, pixels_of, spread
from vit_jax.report.page import Html, figure_picture, note, picture, table, tag
from vit_jax.report.runs import Run
from vit_jax.workdir.description import PARAMS_FILE

MOST_CLASSES = 30  # of a confusion matrix; with more, a list of pairs
_PAIRS = 20
_MISTAKES = 12
_PIXELS = 160  # of an image's longer side
_LOOKED_AT = 32  # images of the attention distance
_BATCH = 8
# How to read each picture.
_CAPTIONS = {
    "filters": "Principal components of the embedding filters, each in a range of its own, and "
    "the share of the variance that it explains.",
    "positions": "Of some places the similarity of their embedding with those of all places.",
    "attention_distance": "How far each head looks, and (dashed) one that looks everywhere alike.",
    "rollout": "What the output sees of evaluation images: bright is more.",
}


class Sample:
    """At most so many examples, evenly spread; `names` say where they are, `of` how many exist."""

    def __init__(self, data: Any, count: int):
        names = example_names(data.source)
        self._source, self._indices = data.source, spread(range(len(names)), count)
        self.names, self.of = [names[i] for i in self._indices], len(names)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._indices[index]]

    def describe(self, index: int) -> str:
        return self.names[index]


def load_subject(run: Run, max_examples: int) -> tuple[Model, Any]:
    """The model, and a dataset with a `Sample` of what it is evaluated on, or a UserError.

    Raises one where there are no parameters yet, or they cannot be read.
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
        opened = model.open_dataset(
            name=evaluator["dataset"] or data["name"],
            split=evaluator["split"],
            data_dir=evaluator["data_dir"] or data["data_dir"],
            label_key=evaluator["label_key"] or ("" if is_other else data["label_key"]),
            on_bad_image=data["on_bad_image"],
            needs_label=bool(model.class_names),
        )
        if opened.on_bad_image == "skip":  # it reads every image
            opened = opened.check()
    except UserError as error:
        return model, error
    sample: Any = Sample(opened, max_examples)
    return model, dataclasses.replace(opened, source=sample)


def predictions(run: Run, model: Model, data: Any) -> list[Html]:
    """Confusion matrix and surest mistakes; a UserError without examples, or any of one label."""
    name = run.config["objective"]["name"]
    if not model.class_names or name == "multi_label":
        raise UserError(f"There is no confusion matrix: objective.name={name!r} has no one label.")
    if isinstance(data, UserError):
        raise data
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(data.class_names, model.class_names, num_outputs)
    arrays = measure_examples(model, data, outputs)
    labels, guesses = arrays["label"], arrays["prediction"]
    wrong, sample = np.flatnonzero(labels != guesses), data.source
    used = f"{len(labels):,} of {counted(sample.of, 'example')} of {data.name} {data.split}"
    times = f"{counted(len(wrong), 'time')} ({len(wrong) / len(labels):.2%})"
    return [
        tag("p", f"On {used}, evenly spread, the model is wrong {times}."),
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
        image: Any = np.asarray(np.round(255 * pixels[..., ::-1]), np.uint8)  # BGR
        scale = min(1.0, _PIXELS / max(image.shape[:2]))
        image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        data, caption = cv2.imencode(".jpg", image)[1].tobytes(), tag("span", *texts)
        figures.append(picture(data, kind="jpeg", alt=alt, caption=caption, class_="mistake"))
    return [tag("div", *figures, class_="mistakes")]


def inside(model: Model, data: Any) -> list[Html]:
    """The pictures that the model has; those of images only where there are examples."""
    import_extra("A picture of the model", "matplotlib", "embedded")
    drawings, content = of_parameters(model), list[Html]()
    if isinstance(data, UserError):
        reason = str(data).rstrip(".")
        drawings |= dict.fromkeys(("attention_distance", "rollout"), lambda: reason)
    else:
        sample = data.source
        few = spread(range(len(sample)), _LOOKED_AT)
        images = [sample[i]["image"] for i in few]
        drawings |= of_images(model, images, [sample.names[i] for i in few], _BATCH)
        content.append(note(f"Attention distances are means over {counted(len(few), 'image')}."))
    for name, caption in _CAPTIONS.items():
        title, figure = name.capitalize().replace("_", " "), drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
            continue
        kind = "jpeg" if name == "rollout" else "png"  # photos would be a megabyte
        alt = f"{title} of this model, as a picture"
        content.append(figure_picture(figure, kind=kind, alt=alt, caption=caption))
    return content
