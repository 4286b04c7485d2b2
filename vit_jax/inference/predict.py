"""Predictions on images: the most probable classes, as text, JSON or a picture."""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vit_jax.data.decode import decode_image
from vit_jax.errors import UserError, import_extra
from vit_jax.files.paths import read_file
from vit_jax.inference.dense import PixelWriter, is_dense
from vit_jax.inference.images import Images, find_images
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.pictures import fitted, name_style, sheet
from vit_jax.kinds import check_known
from vit_jax.wording import escaped, list_names

MAX_PICTURES = 48
PICTURE_ENDINGS = (".png", ".jpg", ".pdf")


def predict(
    source: str,
    images: Iterable[str],
    *,
    top: int = 1,
    loss: str = "",
    batch_size: int = 64,
    as_json: bool = False,
    picture: str = "",
    output: str = "",
    short_side: int = 0,
    **model_options: Any,
) -> int:
    """Loads a model and prints its predictions on images; unreadable ones are listed on stderr.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: files, and folders whose images are all used.
      top, loss, batch_size: see `Model.answers`.
      as_json: print one JSON object per line.
      picture: file in which to draw the first `MAX_PICTURES` images.
      output, short_side: folder for maps and overlays of a model of pixels, see `PixelWriter`.

    Returns how many images could not be read; a UserError comes before any is read.
    """
    paths = find_images(images)
    picture = os.path.expanduser(picture)
    if picture:  # fail before the images, not after
        check_picture("--picture", picture)
    model = load_model(source, **model_options)
    if picture and (is_dense(model) or model.description.values):
        raise UserError("--picture draws classes; a model of pixels writes pictures to --output.")
    readable = []
    rows: Iterator[dict[str, Any]]
    if is_dense(model):
        rows = PixelWriter(model, paths, os.path.expanduser(output), short_side, batch_size).rows()
    elif output or short_side:
        raise UserError(f"--output and --short_side are for models of pixels, not {source}.")
    else:
        rows = predict_images(model, paths, top=top, loss=loss, batch_size=batch_size)
    for row in rows:
        if "error" in row:
            print(f"error: {printable(row['image'])}: {row['error']}", file=sys.stderr, flush=True)
        else:
            readable.append(row)
        if as_json or "error" not in row:
            print(json.dumps(row) if as_json else as_text(row), flush=True)
    if picture and readable:
        drawn = readable[:MAX_PICTURES]
        draw_predictions(drawn, picture)
        part = f": the first {len(drawn)} of {len(readable):,} images" * (
            len(readable) > len(drawn)
        )
        logging.info("Wrote %s%s.", picture, part)
    return len(paths) - len(readable)


def check_picture(flag: str, path: str) -> None:
    """Raises UserError before the work for a picture that could not be drawn."""
    import_extra(flag, "matplotlib", "embedded")
    check_known(f"the ending of {flag}", Path(path).suffix, PICTURE_ENDINGS)
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def predict_images(
    model: Model, paths: list[str], *, top: int = 5, loss: str = "", batch_size: int = 64
) -> Iterator[dict[str, Any]]:
    """`Model.answers` of image files, or numbers, in their order, as what `--json` prints.

    Yields:
      `{"image": path, "predictions": [{"class": name, "output": number, "probability": p}, ...]}`,
      `{"image": path, "values": {name: number}}`, or `{"image": path, "error": why}` if the image
      cannot be read.
    """
    images, values = Images(paths, model.description), model.description.values
    answers: Iterable[dict[str, Any]]
    if values is None:
        found = model.answers(images, top=top, loss=loss, batch_size=batch_size)
        answers = ({"predictions": predictions} for predictions in found)
    else:
        parts = model.stream(["logits"], images, batch_size)
        rows = (values.of(row).tolist() for part in parts for row in part["logits"])
        answers = ({"values": dict(zip(values.names, row, strict=True))} for row in rows)
    for index, answer in enumerate(answers):
        if index in images.failures:
            answer = {"error": images.failures[index]}
        yield {"image": paths[index], **answer}


def as_text(row: dict[str, Any]) -> str:
    """One line, or for several classes a line for the image and one per class."""
    image = printable(row["image"])
    if numbers := row.get("values"):
        return f"{'  '.join(f'{name} {value:.6g}' for name, value in numbers.items())}  {image}"
    if shares := row.get("shares"):
        text = list_names(f"{escaped(name)} {share:.1%}" for name, share in shares.items())
        return f"{text}  {image}"
    lines = _class_lines(row, 9)
    return f"{lines[0].strip()}  {image}" if len(lines) == 1 else "\n".join([image, *lines])


def _class_lines(row: dict[str, Any], width: int) -> list[str]:
    return [
        f"{100 * prediction['probability']:{width}.2f} %  {escaped(prediction['class'])}"
        for prediction in row["predictions"]
    ]


def draw_predictions(rows: list[dict[str, Any]], path: str) -> None:
    """A sheet of the images, each above its most probable classes."""
    style, width = name_style(9), 3.0
    columns = min(len(rows), 4)
    lines = -(-len(rows) // columns)
    height = 2.8 + 0.2 * len(rows[0]["predictions"])  # inches
    figure, axes = sheet(lines, columns, height * lines, width=3.2 * columns)
    for axis, row in zip(axes.flat, rows, strict=False):
        pixels = decode_image(read_file(row["image"]), channels=3, exif=True)
        step = max(1, max(pixels.shape[:2]) // 600)  # enough for the sheet; 48 fit in memory
        axis.imshow(pixels[::step, ::step])
        axis.set_title(fitted(Path(row["image"]).name, width, 9), **style)
        text = "\n".join(fitted(line, width, 9) for line in _class_lines(row, 0))
        axis.set_xlabel(text, loc="left", **style)
    figure.savefig(path, dpi=110)


def printable(path: str) -> str:
    """File names are any bytes; what is not UTF-8 cannot be printed."""
    return escaped(os.fsencode(path).decode(errors="replace"))
