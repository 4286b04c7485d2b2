"""The report sections computed with the trained model: its mistakes, and its internals."""

import dataclasses
import os
import re
from typing import Any

import cv2
import numpy as np

from vit_jax.data.decode import resize
from vit_jax.data.ops import IGNORED, LABEL_MAP, MAPS
from vit_jax.data.preprocess import check_no_code
from vit_jax.errors import UserError, import_extra
from vit_jax.evaluators.create import EvaluatorKeys
from vit_jax.inference.class_order import match_classes, relabel
from vit_jax.inference.dense import best_classes, colored, is_dense, shaded, values_of
from vit_jax.inference.evaluate import measure_examples
from vit_jax.inference.evaluation_tables import confusion_matrix
from vit_jax.inference.images import example_names
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.pictures import CLIPPED, Arrays, color_range, overlay
from vit_jax.inference.visualize import of_images, of_parameters, photos, spread
from vit_jax.report.page import Html, chart, note, picture, table, tag
from vit_jax.report.runs import Run, data_title, percent, tail
from vit_jax.wording import counted
from vit_jax.workdir.description import CONFIG_FILE, PARAMS_FILE

MOST_CLASSES = 30  # of a confusion matrix; with more, a list of pairs
_EXAMPLES = 2000
_NAME = re.compile(r"\w+(/[\w.-]+)?(:[\d.]+)?|\w+\(.*\)")  # of data that are no path
_PAIRS = 20
_MISTAKES = 12
_PIXELS = 224  # of an image's height
_ATTENTION_IMAGES = 32  # images for the attention distance
_BATCH = 8
# How to read each picture.
_CAPTIONS = {
    "Embedding filters": "The first principal components of the patch embedding filters, each "
    "scaled to its own range, with its share of the variance.",
    "Position embeddings": "A square per patch, at its row and column: the cosine similarity of "
    "its embedding to that of every patch. The scale excludes its similarity to itself, 1.",
    "Attention distance": "How far each head attends, one point per head: the mean over {images}.",
    "Attention rollout": "What the output attends to, in {images}. Brighter = more attention: the "
    "colours run from {low:.2f} (dark) to {high:.2f} (bright) times the mean of an image; the top "
    f"{CLIPPED} % are clipped.",
}
_DRAWINGS = ("filters", "positions", "attention_distance", "rollout")


class Sample:
    """Up to `count` evenly spaced examples; `names` locate them, `of` is how many exist."""

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


def load_subject(run: Run, max_examples: int | None) -> tuple[Model, Any]:
    """The model, and its evaluation dataset with a `Sample`, or a UserError in its place.

    Raises UserError if there are no parameters yet, or they cannot be read.
    """
    if not (run.folder / PARAMS_FILE).exists():
        raise UserError(f"The run has not finished; {PARAMS_FILE} is written at its end.")
    source, config = str(run.folder), run.config
    # Others use features, not the model's predictions.
    own = {k: section for k, section in config["evaluators"].items() if "feature" not in section}
    if not own:
        why = "No evaluator of the config measures this model on images."
        return load_model(source), UserError(why)
    evaluator = own.get(run.main_metric.partition("/")[0]) or next(iter(own.values()))
    keys, training = EvaluatorKeys.of(evaluator)[0], config["dataset"]
    preprocess = keys.preprocess or training["eval_preprocess"]
    check_no_code(str(run.folder / CONFIG_FILE), preprocess)
    model = load_model(source, preprocess=preprocess)
    options: Any = {**keys.data(training), "on_bad_image": training["on_bad_image"]}
    name = options["name"]  # a path in the config of a stranger may lead anywhere
    is_path = options["data_dir"] or os.path.exists(name) or not _NAME.fullmatch(name)
    if max_examples is None and is_path:
        where = f"Its data, {name!r}, are at a path that only its config names"
        return model, UserError(f"{where}: --max_examples={_EXAMPLES} opens them.")
    if max_examples == 0:
        return model, UserError("Skipped by --max_examples=0.")
    try:
        opened = model.open_dataset(**options, needs=model.example_keys)
        if opened.on_bad_image == "skip":  # this reads every image
            opened = opened.check()
    except UserError as error:
        return model, error
    sample: Any = Sample(opened, max_examples or _EXAMPLES)
    return model, dataclasses.replace(opened, source=sample)


def predictions(run: Run, model: Model, data: Any) -> list[Html]:
    """Confusion matrix and most confident mistakes; UserError without single-label examples."""
    name = run.config["objective"]["name"]
    if is_dense(model) and not isinstance(data, UserError):
        return _pixels(model, data)
    if not model.class_names or name == "multi_label":
        raise UserError(
            f"A confusion matrix needs one label per image, which objective.name={name!r} lacks."
        )
    if isinstance(data, UserError):
        raise data
    num_outputs = model.description.model["num_classes"]
    outputs = match_classes(data.class_names, model.class_names, num_outputs)
    arrays = measure_examples(model, data, outputs)
    labels, guesses, sample = arrays["label"], arrays["prediction"], data.source
    wrong = np.flatnonzero(labels != guesses)
    text = f"The model gets {len(wrong):,} of {counted(len(labels), 'example')} wrong: "
    text += f"{percent(len(wrong) / len(labels))} of {data_title(data.name)} {data.split}."
    if len(labels) < sample.of:
        text += f" These are evenly spaced examples of {sample.of:,}."
    return [
        tag("p", text),
        tag("h3", "Confusion matrix"),
        *_confusion(labels, guesses, model.class_names),
        tag("h3", "Most confident mistakes"),
        *_mistakes(model, sample, arrays, wrong),
    ]


def _pixels(model: Model, data: Any) -> list[Html]:
    """Evenly spaced examples: the image, what is known of its pixels, what is predicted."""
    if names := model.class_names:
        data = relabel(data, match_classes(data.class_names, names, len(names)), len(names))
    few = spread(range(len(data.source)), _MISTAKES)
    examples = [data.example(i, np.random.default_rng(0)) for i in few]
    shown = photos(model, [data.source[i]["image"] for i in few])
    outputs = model.logits([data.source[i]["image"] for i in few], batch_size=_BATCH)
    figures = []
    for i, pixels, example, output in zip(few, shown, examples, outputs, strict=True):
        key = next(key for key in MAPS if key in example)
        size, image = pixels.shape[:2], (255 * pixels).astype(np.uint8)
        known = resize(example[key][..., None], size[0], size[1], "nearest")[..., 0]
        if key == LABEL_MAP:
            maps = [colored(np.where(known == IGNORED, 0, known), image)]
            maps.append(colored(best_classes(output, size), image))
        else:
            values = values_of(output, size, model.description)
            maps = [shaded(np.where(np.isfinite(known), known, 0)), shaded(values)]
        row = np.concatenate([np.broadcast_to(image, maps[0].shape), *maps], axis=1) / 255
        figures.append(_photo(row, alt=data.source.names[i], caption=tail(data.source.names[i])))
    text = "Evenly spaced examples: the image, its map, the prediction."
    return [tag("div", *figures, class_="pairs"), note(text)]


def _confusion(labels: np.ndarray, guesses: np.ndarray, names: tuple[str, ...]) -> list[Html]:
    outputs, counts = confusion_matrix(labels, guesses)
    classes = [names[i] for i in outputs]
    if len(classes) > MOST_CLASSES:
        return _pairs(counts, classes)
    # Square roots of shares, or one mistake of thirty would be pale.
    shades = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))

    def cell(i: int, j: int) -> Html:
        kind = "right" if i == j else "wrong"
        return tag("td", counts[i, j] or "", class_=kind, style=f"--share:{shades[i, j]:.2f}")

    rows = [(name, *(cell(i, j) for j in range(len(classes)))) for i, name in enumerate(classes)]
    text = "Rows are labels, columns predictions; blue is correct, orange a mistake."
    columns = ["Label", *classes]
    return [note(text), table(columns, rows, label="Confusion matrix", kind="confusion")]


def _pairs(counts: np.ndarray, classes: list[str]) -> list[Html]:
    """The most frequent confusions among many classes."""
    mistakes = counts * (1 - np.eye(len(counts), dtype=int))
    order = np.argsort(-mistakes, axis=None, kind="stable")[:_PAIRS]
    pairs = [np.unravel_index(i, counts.shape) for i in order if mistakes.flat[i]]
    rows = [(classes[i], classes[j], int(mistakes[i, j]), int(counts[i].sum())) for i, j in pairs]
    columns = ["Label", "Predicted", "Times", "Images of this label"]
    text = f"The most frequent mistakes among {len(classes)} classes."
    return [note(text), table(columns, rows, label="Confusions")]


def _mistakes(
    model: Model, sample: Sample, arrays: dict[str, np.ndarray], wrong: np.ndarray
) -> list[Html]:
    surest = wrong[np.argsort(-arrays["confidence"][wrong], kind="stable")][:_MISTAKES]
    if not len(surest):
        return [note("The model made no mistakes.")]
    shown = photos(model, [sample[i]["image"] for i in surest])
    figures = []
    for i, pixels in zip(surest, shown, strict=True):
        label, guess = (model.class_names[arrays[k][i]] for k in ("label", "prediction"))
        sure = percent(arrays["confidence"][i])
        alt = f"{sample.names[i]}: {label}, predicted {guess} with {sure}"
        caption = tag("span", tag("b", label), ", predicted ", tag("b", guess), f" ({sure})")
        figures.append(_photo(pixels, alt=alt, caption=caption, class_="mistake"))
    return [tag("div", *figures, class_="mistakes")]


def _photo(pixels: np.ndarray, *, alt: str, caption: object, class_: str = "picture") -> Html:
    """Pixels [H, W, C] in [0, 1] as a JPEG picture."""
    image: Any = np.asarray(np.round(255 * pixels[..., ::-1]), np.uint8)  # BGR
    scale = min(1.0, _PIXELS / image.shape[0])
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes()
    return picture(data, kind="jpeg", alt=alt, caption=caption, class_=class_)


def _rollouts(photos: Arrays, maps: Arrays, names: list[str]) -> list[Html]:
    """Photos [H, W, C] in [0, 1], each next to its overlay with a map [rows, columns]."""
    ends, figures = color_range(maps), []
    for photo, weights, name in zip(photos, maps, names, strict=True):
        shown = np.broadcast_to(photo, (*photo.shape[:2], 3))
        pair = np.concatenate([shown, overlay(photo, weights, ends)], axis=1)
        figures.append(_photo(pair, alt=f"{name}, plain and by attention", caption=tail(name)))
    images = counted(len(photos), "evenly spaced example")
    caption = _CAPTIONS["Attention rollout"].format(images=images, low=ends[0], high=ends[1])
    return [tag("div", *figures, class_="pairs"), note(caption)]


def inside(model: Model, data: Any) -> list[Html]:
    """The figures available for the model; those of images only if there are examples."""
    import_extra("A picture of the model", "matplotlib", "embedded")
    drawings, content, few = of_parameters(model), list[Html](), list[int]()
    if isinstance(data, UserError):
        reason = str(data).rstrip(".")
        drawings |= dict.fromkeys(_DRAWINGS[2:], lambda: reason)
    else:
        few = spread(range(len(data.source)), _ATTENTION_IMAGES)
        images = [data.source[i]["image"] for i in few]
        names = [data.source.names[i] for i in few]
        drawings |= of_images(model, images, names, _BATCH, draw_rollout=_rollouts)
    for name, (title, text) in zip(_DRAWINGS, _CAPTIONS.items(), strict=True):
        figure = drawings[name]()
        content.append(tag("h3", title))
        if isinstance(figure, str):
            content.append(note(f"Not drawn: {figure}."))
        elif isinstance(figure, list):
            content += figure
        else:
            figure.suptitle("")  # the page has a title
            caption = text.format(images=counted(len(few), "image"))
            content.append(chart(figure, alt=f"{title}. {caption}", caption=caption))
    return content
