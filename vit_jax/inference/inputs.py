"""What a loaded model is fed with: its preprocessing, fitting batches, and images on disk."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable
from typing import Any

import cv2
import numpy as np

from vit_jax.data.folder import EXTENSIONS, FolderSource
from vit_jax.data.ops import CentralCrop, Resize, ResizeSmall
from vit_jax.data.preprocess import OPS, Chain, parse
from vit_jax.data.sources import ArraySpec, CheckedSource
from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Reader
from vit_jax.models.tokens import pixels_per_token, token_grid
from vit_jax.parameters.sharding import BATCH_AXES, create_mesh
from vit_jax.pretrained.formats.description import Description


def input_chain(
    description: Description, preprocess: str = "", *, encoded: bool = False
) -> tuple[Chain, ArraySpec]:
    """The ops from a stored image to the model's input, and what comes out of them.

    Args:
      description: its `eval_preprocess` is taken where `preprocess` is "".
      encoded: whether they will be given image files, rather than whatever a dataset stores.

    Raises:
      UserError: a mistake in the ops, or they end in another size than the model takes.
    """
    spec = preprocess or description.eval_preprocess
    if not spec:
        raise UserError(
            "the checkpoint does not say how images are to be preprocessed; give --preprocess, as "
            f"'official_eval({description.image_shape[0]})'."
        )
    origin = "--preprocess" if preprocess else "the checkpoint's"
    logging.info("Preprocessing (%s): %s", origin, spec)
    chain = parse(spec)
    black: Any = np.zeros(description.image_shape, np.uint8)
    if encoded:
        black = cv2.imencode(".png", black)[1].tobytes()
    try:
        image = chain({"image": black, "label": 0}, np.random.default_rng(0))["image"]
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"preprocess {spec!r}: {error}.") from error
    if image.shape != description.image_shape:
        raise UserError(
            f"preprocess {spec!r} gives images of {_text(image.shape)}, the model takes "
            f"{_text(description.image_shape)}; make them agree, with --preprocess or --image_size."
        )
    return chain, ArraySpec(image.shape, image.dtype)


def input_range(description: Description) -> tuple[np.ndarray, np.ndarray]:
    """What a model is given for black and for white pixels: float32 [C] each.

    Every preprocessing that we know is affine in the pixels, so this is all of it.
    """
    chain = parse(description.eval_preprocess)
    rng = np.random.default_rng(0)
    found = []
    for value in (0, 255):
        pixels = np.full(description.image_shape, value, np.uint8)
        file = cv2.imencode(".png", pixels)[1].tobytes()
        image = chain({"image": file, "label": 0}, rng)["image"][0, 0]  # [C]
        is_raw = image.dtype == np.uint8  # scaled to [-1, 1] on the device
        found.append(np.asarray(image / 127.5 - 1.0 if is_raw else image, np.float32))
    return found[0], found[1]


def _text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def at_image_size(description: Description, size: tuple[int, int]) -> Description:
    """The same model for images of another size, [height, width].

    Its preprocessing stays what it was, at that size: where it cuts a part from the middle, the
    same part; a rectangle of another shape than before takes the whole image.

    Raises:
      UserError: the patches do not divide the images.
    """
    model = description.model
    patch_size = model.get("patch_size")  # a ResNet has none, and takes any size
    pixels = (1, 1)
    if patch_size is not None:
        pixels = pixels_per_token(patch_size, model["resnet_layers"])
    if min(size) < 1 or size[0] % pixels[0] or size[1] % pixels[1]:
        raise UserError(
            f"--image_size={size[0]},{size[1]} does not divide into tokens of "
            f"{pixels[0]}x{pixels[1]} pixels; choose multiples."
        )
    before = description.image_shape
    spec = description.eval_preprocess or f"official_eval({before[:2]})"
    is_scaled = size[0] * before[1] == size[1] * before[0]
    scale = size[0] / before[0]
    ops: list[Any] = []
    for op in parse(spec).ops:
        if isinstance(op, ResizeSmall) and is_scaled:
            op = dataclasses.replace(op, size=round(op.size * scale))
        elif isinstance(op, Resize) and is_scaled:
            height, width = round(op.height * scale), round((op.width or op.height) * scale)
            op = dataclasses.replace(op, height=height, width=width)
        elif isinstance(op, Resize | ResizeSmall):
            op = Resize(*size, method=op.method)
        elif isinstance(op, CentralCrop):
            if not is_scaled:
                continue
            op = dataclasses.replace(op, height=size[0], width=size[1])
        ops.append(op)
    return dataclasses.replace(
        description,
        image_shape=(*size, before[2]),
        grid=token_grid(size, patch_size, model["resnet_layers"]),
        eval_preprocess="|".join(map(spell, ops)),
    )


def spell(op: Any) -> str:
    """An op as `parse` reads it: `resize(height=224, width=224, method='bilinear')`."""
    name = next(name for name, row in OPS.items() if row is type(op))
    fields = ((field.name, getattr(op, field.name)) for field in dataclasses.fields(op))
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in fields)})"


def create_reader(dataset: Any, batch_size: int) -> Reader:
    """Reads a split on all devices, with a thread for every core.

    Args:
      dataset: see `pipeline.Examples`.
      batch_size: over all devices; becomes the nearest size that they can share, no larger than
        the examples need.

    Raises:
      UserError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size={batch_size} must be at least 1.")
    mesh = create_mesh()
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    fitting = -(-min(batch_size, dataset.num_examples) // shards) * shards
    loader = {"num_threads": min(os.cpu_count() or 1, 16), "num_workers": 0, "prefetch": 2}
    return Reader(dataset, mesh, fitting, loader)


def find_images(arguments: Iterable[str]) -> list[str]:
    """Files as they are given; of folders, all images below them, sorted by path.

    Raises:
      UserError: a folder without images, or nothing given.
    """
    found: list[str] = []
    for argument in map(os.path.expanduser, arguments):
        if not os.path.isdir(argument):
            found.append(argument)
            continue
        below = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(argument)
            for name in names
            if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
        ]
        if not below:
            raise UserError(
                f"{argument}: no image in this folder or below; it takes files that end in "
                f"{', '.join(EXTENSIONS)}."
            )
        found += sorted(below)
    if not found:
        raise UserError("no image is given; name files or folders.")
    return found


def file_source(paths: Iterable[str]) -> FolderSource:
    """Image files without labels (all 0)."""
    encoded = np.array([os.fsencode(path) for path in paths], np.bytes_)
    return FolderSource("", encoded, np.zeros(len(encoded), np.int32))


def example_names(source: Any, split: str) -> list[str]:
    """Where each example is stored: a path, or a file and a record's number."""
    if isinstance(source, CheckedSource):
        return [source.describe(index) for index in range(len(source))]
    return [f"{split} {index}" for index in range(len(source))]
