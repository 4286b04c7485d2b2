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

from vit_jax.data.decode import decode_image
from vit_jax.errors import UserError, check_known, import_extra
from vit_jax.evaluators.stream import compile_outputs, stream_outputs
from vit_jax.inference.inputs import (
    ForgivingImages,
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
PICTURE_ENDINGS = (".png", ".jpg", ".pdf")


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
    loss: str = "",
    batch_size: int = 64,
    as_json: bool = False,
    picture: str = "",
    **model_options: Any,
) -> int:
    """Loads a model and prints what it sees on images; unreadable ones are named on stderr.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: files, and folders of which all images are taken.
      top, loss, batch_size: see `predict_images`.
      as_json: print one JSON object per line.
      picture: file to draw the first `MAX_PICTURES` images into.

    Returns:
      How many images could not be read.

    Raises:
      UserError: before any image is read.
    """
    paths = find_images(images)
    if picture:  # what else would go wrong after all images are done
        import_extra("--picture", "matplotlib", "embedded")
        check_known("the ending of --picture", Path(picture).suffix, PICTURE_ENDINGS)
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
    model = load_model(source, **model_options)
    readable: list[Prediction] = []
    for prediction in predict_images(model, paths, top=top, loss=loss, batch_size=batch_size):
        if prediction.error:
            message = f"error: {printable(prediction.image)}: {prediction.error}"
            print(message, file=sys.stderr, flush=True)
        else:
            readable.append(prediction)
        if as_json or not prediction.error:
            print(prediction.to_json() if as_json else prediction, flush=True)
    if picture and readable:
        draw_predictions(readable[:MAX_PICTURES], picture)
        logging.info("Wrote %s.", picture)
    return len(paths) - len(readable)


def predict_images(
    model: PretrainedModel,
    paths: list[str],
    *,
    top: int = 5,
    loss: str = "",
    batch_size: int = 64,
) -> Iterator[Prediction]:
    """The most probable classes of image files, in their order.

    Args:
      model: from `load_model`.
      paths: of image files.
      top: how many classes; no more than there are.
      loss: `softmax`, where the probabilities of all classes add up to 1, or `sigmoid`, one
        probability for each; "" for the one that the model was trained with, if that is known.
      batch_size: over all devices; rounded up to what they can share.

    Raises:
      UserError: the model does not classify, or its preprocessing does not fit. An image that
        cannot be read is a prediction with an `error`.
    """
    num_outputs = model.description.model["num_classes"]
    if top < 1:
        raise UserError(f"--top={top} must be at least 1.")
    if not num_outputs:
        raise UserError("the model has no head, so it names no class; extract features instead.")
    chain, spec = input_chain(model.description, encoded=True)
    loss = loss or model.description.probabilities_by
    objective = Classification(Task.of(model.module), loss=loss)
    images = ForgivingImages(file_source(paths), chain, spec)
    reader = create_reader(images, batch_size)
    names = model.description.class_names or [f"class {i}" for i in range(num_outputs)]

    def best(params: Any, batch: Any) -> dict[str, jax.Array]:
        probabilities = objective.probabilities(params, batch)  # [B, K]
        values, outputs = jax.lax.top_k(probabilities, min(top, num_outputs))  # [B, top]
        return {"probabilities": values, "outputs": outputs}

    index = 0
    params = jax.device_put(model.params, replicated(reader.mesh))
    for part in stream_outputs(compile_outputs(best, reader.mesh), params, reader):
        for outputs, values in zip(part["outputs"], part["probabilities"], strict=True):
            if index in images.failures:
                yield Prediction(paths[index], error=images.failures[index])
            else:
                classes = tuple(names[output] for output in outputs)
                yield Prediction(
                    paths[index], classes, tuple(outputs.tolist()), tuple(values.tolist())
                )
            index += 1


def draw_predictions(predictions: list[Prediction], path: str) -> None:
    """A sheet of the images, each above its most probable classes."""
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure

    noto = (name for name in font_manager.get_font_names() if name.startswith("Noto Sans"))
    family = [*rcParams["font.family"], *sorted(noto)]  # for names in any script
    style: Any = {"fontsize": 9, "parse_math": False, "family": family}
    columns = min(len(predictions), 4)
    rows = -(-len(predictions) // columns)
    height = 2.8 + 0.2 * len(predictions[0].classes)  # inches
    figure = Figure(figsize=(3.2 * columns, height * rows), layout="constrained")
    bare = {"xticks": [], "yticks": [], "frame_on": False}
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw=bare)
    for axis, prediction in zip(axes.flat, predictions, strict=False):
        pixels = decode_image(Path(prediction.image).read_bytes(), channels=3, exif=True)
        step = max(1, max(pixels.shape[:2]) // 600)  # enough for the sheet, and 48 photographs fit
        axis.imshow(pixels[::step, ::step])
        _, *lines = str(prediction).splitlines()
        axis.set_title(printable(Path(prediction.image).name)[-34:], **style)
        text = "\n".join(line[:40] for line in lines)
        axis.set_xlabel(text, loc="left", **style)
    figure.savefig(path, dpi=110)


def printable(path: str) -> str:
    """A file's name is any bytes; what is no UTF-8 cannot be printed."""
    return os.fsencode(path).decode(errors="replace")
