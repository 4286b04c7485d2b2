"""What a model sees on photographs: the most probable classes, as text, JSON or a picture."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.data.decode import decode_image
from vit_jax.data.folder import ForgivingImages
from vit_jax.errors import UserError
from vit_jax.evaluators.stream import stream_outputs
from vit_jax.inference.inputs import (
    create_reader,
    file_source,
    find_images,
    input_chain,
)
from vit_jax.inference.load import PretrainedModel, load_model
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import replicated

MAX_PICTURES = 48
NUM_IMAGENET21K = 21843


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, or why there are none.

    Attributes:
      image: path as given, or found in a folder.
      classes: their names, the most probable one first.
      outputs: their numbers.
      probabilities: in [0, 1].
      error: "" where all went well; else the rest is empty.
    """

    image: str
    classes: tuple[str, ...] = ()
    outputs: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        """One line."""
        if self.error:
            return json.dumps({"image": self.image, "error": self.error})
        rows = zip(self.classes, self.outputs, self.probabilities, strict=True)
        keys = ("class", "output", "probability")
        predictions = [dict(zip(keys, row, strict=True)) for row in rows]
        return json.dumps({"image": self.image, "predictions": predictions})

    def __str__(self) -> str:
        rows = zip(self.classes, self.probabilities, strict=True)
        return "\n".join(
            [printable(self.image), *(f"{100 * p:9.2f} %  {name}" for name, p in rows)]
        )


def predict(
    source: str,
    images: Iterable[str],
    *,
    top: int = 5,
    loss: str = "softmax",
    preprocess: str = "",
    batch_size: int = 64,
    as_json: bool = False,
    picture: str = "",
    **model_options: Any,
) -> int:
    """Loads a model and prints what it sees on images; unreadable ones are named on stderr.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: files, and folders of which all images are taken.
      top: how many classes per image.
      loss, preprocess, batch_size: see `predict_images`.
      as_json: print one JSON object per line.
      picture: .png, .jpg or .pdf file to draw the first images with their classes into.

    Returns:
      How many images could not be read.

    Raises:
      UserError: before any image is read.
    """
    paths = find_images(images)
    if picture:
        _check_picture(picture)
    model = load_model(source, **model_options)
    if model.description.model["num_classes"] == NUM_IMAGENET21K and loss == "softmax":
        logging.info(
            "Google's ImageNet-21k models were trained with a sigmoid per class, as an image may "
            "show several; --loss=sigmoid gives those probabilities (the order is the same)."
        )
    shown: list[Prediction] = []
    failed = 0
    for prediction in predict_images(
        model, paths, top=top, loss=loss, preprocess=preprocess, batch_size=batch_size
    ):
        if prediction.error:
            failed += 1
            message = f"error: {printable(prediction.image)}: {prediction.error}"
            print(message, file=sys.stderr, flush=True)
        elif len(shown) < MAX_PICTURES:
            shown.append(prediction)
        if as_json or not prediction.error:
            print(prediction.to_json() if as_json else prediction, flush=True)
    if picture and shown:
        if len(paths) - failed > MAX_PICTURES:
            logging.info("The picture shows the first %d images.", MAX_PICTURES)
        draw_predictions(shown, picture)
        logging.info("Wrote %s.", picture)
    return failed


def predict_images(
    model: PretrainedModel,
    paths: list[str],
    *,
    top: int = 5,
    loss: str = "softmax",
    preprocess: str = "",
    batch_size: int = 64,
) -> Iterator[Prediction]:
    """The most probable classes of image files, in their order.

    Args:
      model: from `load_model`.
      paths: of image files.
      top: how many classes; no more than there are.
      loss: `softmax`, where the probabilities of all classes add up to 1, or `sigmoid`, one
        probability for each, for models that were trained so.
      preprocess: ops; "" for the checkpoint's own.
      batch_size: over all devices; rounded up to what they can share.

    Raises:
      UserError: the model does not classify, or `preprocess` does not fit it. An image that
        cannot be read is a prediction with an `error`.
    """
    num_outputs = model.description.model["num_classes"]
    if top < 1:
        raise UserError(f"--top={top} must be at least 1.")
    if not num_outputs:
        raise UserError("the model has no head, so it names no class; extract features instead.")
    chain, spec = input_chain(model.description, preprocess, encoded=True)
    objective = Classification(Task.of(model.module), loss=loss)
    images = ForgivingImages(file_source(paths), chain, spec)
    reader = create_reader(images, batch_size)
    names = model.description.class_names or [f"class {i}" for i in range(num_outputs)]

    def best(params: Any, batch: Any) -> dict[str, jax.Array]:
        probabilities = objective.probabilities(params, batch)  # [B, K]
        values, outputs = jax.lax.top_k(probabilities, min(top, num_outputs))  # [B, top]
        return {"probabilities": values, "outputs": outputs}

    index = 0
    for part in stream_outputs(best, jax.device_put(model.params, replicated(reader.mesh)), reader):
        for outputs, values in zip(part["outputs"], part["probabilities"], strict=True):
            if index in images.failures:
                yield Prediction(paths[index], error=images.failures[index])
            else:
                classes = tuple(names[output] for output in outputs)
                yield Prediction(
                    paths[index], classes, tuple(outputs.tolist()), tuple(values.tolist())
                )
            index += 1


def _check_picture(path: str) -> None:
    """Raises UserError for what would go wrong after all images are done."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError(
            '--picture draws with matplotlib: pip install "vit_jax[embedded]".'
        ) from None
    known = FigureCanvasBase.filetypes
    if Path(path).suffix.removeprefix(".") not in known:
        raise UserError(f"--picture={path}: its name must end in one of {', '.join(known)}.")
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"--picture={path}: there is no folder {Path(path).absolute().parent}.")


def draw_predictions(predictions: list[Prediction], path: str) -> None:
    """A sheet of the images, each above bars of its classes' probabilities."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(predictions), 4)
    rows = -(-len(predictions) // columns)
    top = len(predictions[0].classes)
    image_height, bars_height = 2.4, 0.28 * top + 0.1  # inches
    figure, axes = plt.subplots(
        2 * rows,
        columns,
        figsize=(3.2 * columns, rows * (image_height + bars_height + 0.5)),
        height_ratios=[image_height, bars_height] * rows,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.axis("off")
    for number, prediction in enumerate(predictions):
        row, column = divmod(number, columns)
        _draw_image(axes[2 * row, column], prediction)
        _draw_bars(axes[2 * row + 1, column], prediction)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_image(axis: Any, prediction: Prediction) -> None:
    pixels = decode_image(Path(prediction.image).read_bytes(), channels=3, exif=True)
    step = max(1, max(pixels.shape[:2]) // 600)  # enough for the sheet, and 48 photographs fit
    axis.imshow(pixels[::step, ::step], interpolation="antialiased")
    axis.set_anchor("S")
    axis.set_title(_shorten(printable(Path(prediction.image).name), 34), fontsize=9).set_parse_math(
        False
    )


def _draw_bars(axis: Any, prediction: Prediction) -> None:
    places = np.arange(len(prediction.classes))
    axis.barh(places, prediction.probabilities, height=0.86, color="#9ecae1")
    for place, name, value in zip(
        places, prediction.classes, prediction.probabilities, strict=True
    ):
        style = {"va": "center", "fontsize": 9, "parse_math": False}
        axis.text(0.19, place, f"{100 * value:.1f} %", ha="right", **style)
        axis.text(0.22, place, _shorten(name, 28), ha="left", **style)
    axis.set_xlim(0, 1)
    axis.set_ylim(len(places) - 0.5, -0.5)


def printable(path: str) -> str:
    """A file's name is any bytes; what is no UTF-8 cannot be printed."""
    return os.fsencode(path).decode(errors="replace")


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
