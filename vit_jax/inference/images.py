"""Input of a loaded model: its preprocessing, matching batches, and images on disk."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vit_jax.data.decode import decode_image, remark
from vit_jax.data.folder import EXTENSIONS, find_below, warn_unused
from vit_jax.data.ops import Decode, Normalize, ValueRange
from vit_jax.data.pillow_reader import pillow_pixels
from vit_jax.data.preprocess import Chain, parse
from vit_jax.data.sized import at_size, spell
from vit_jax.data.sources import ArraySpec, Source, by_place, describe
from vit_jax.errors import UserError, naming
from vit_jax.files.paths import read_file
from vit_jax.models.create import create_model
from vit_jax.models.description import Description
from vit_jax.patches import Patches


def input_chain(description: Description) -> tuple[Chain, dict[str, ArraySpec]]:
    """The ops from a stored image to the model's input, without those of other columns; its specs.

    UserError for invalid ops, or if their output is not the size that the model takes.
    """
    spec = description.eval_preprocess
    chain = Chain(tuple(op for op in parse(spec).ops if not op.columns))
    black = np.zeros(description.image_shape, np.uint8)
    try:
        example = chain({"image": black}, np.random.default_rng(0))
    except ValueError as error:
        raise UserError(f"preprocess {spec!r}: {error}") from error
    shape, channels = example["image"].shape, description.image_shape[2]
    if op := chain.patchify:
        if op.patch_size != (size := description.model["patch_size"]) or channels != 3:
            raise UserError(f"preprocess {spec!r}: {op} must have patch_size={size}, 3 channels.")
    elif shape != description.image_shape:
        raise UserError(
            f"preprocess {spec!r} gives images of {shape}, but the model takes "
            f"{description.image_shape}; set --preprocess or --image_size."
        )
    keys = ("image", "grid") if op else ("image",)
    return chain, {key: ArraySpec(example[key].shape, example[key].dtype) for key in keys}


def input_range(description: Description) -> tuple[np.ndarray, np.ndarray]:
    """Input values of black and of white pixels: float32 [C] each.

    All our preprocessing is affine in the pixels, so this defines it.
    """
    ends = np.array([[[0], [255]]], np.uint8)
    pixels: Any = ends.repeat(description.image_shape[2], axis=2)  # [1, 2, C]
    for op in parse(description.eval_preprocess).ops:
        if isinstance(op, Normalize | ValueRange):
            pixels = op.apply(pixels, np.random.default_rng(0))
    if pixels.dtype == np.uint8:  # scaled to [-1, 1] on the device
        pixels = pixels / 127.5 - 1.0
    black, white = np.asarray(pixels[0], np.float32)
    return black, white


def at_image_size(description: Description, size: tuple[int, int]) -> Description:
    """The same model for images of another size, [height, width].

    Its preprocessing is kept, at that size: a central crop keeps its fraction; for another aspect
    ratio than before, the whole image is used. UserError if not a multiple of the patch size.
    """
    before = description.image_shape
    with naming(f"--image_size={size[0]},{size[1]}"):
        if min(size) < 1:
            raise UserError("both sides must be positive.")
        grid = create_model(**{"num_classes": 0, **description.model}).token_grid(size)
    ops = at_size(parse(description.eval_preprocess).ops, (before[0], before[1]), size)
    shape, spec = (*size, before[2]), spell(ops)
    return dataclasses.replace(description, image_shape=shape, grid=grid, eval_preprocess=spec)


def find_images(arguments: Iterable[str]) -> list[str]:
    """Files as given; for folders, all images below them by path; UserError if there are none."""
    paths: list[str] = []
    for argument in map(os.path.expanduser, arguments):
        if not os.path.isdir(argument):
            paths.append(argument)
            continue
        images, others = find_below(argument)
        warn_unused(argument, others)
        below = sorted((os.path.join(argument, name) for name in images), key=Path)
        if not below:
            kinds = ", ".join(EXTENSIONS)
            raise UserError(f"{argument}: no images in this folder or below ({kinds}).")
        paths += below
    return paths


def example_names(source: Source) -> list[str]:
    """Where each example is stored: a path, or a file and a record number."""
    return [source.describe(index) for index in range(len(source))]


class Images:
    """Images of any kind, see `Model`, as unlabelled examples for the pipeline."""

    def __init__(self, images: Sequence[Any], description: Description):
        # By index, what was wrong with an image that was read, and is replaced by a black one.
        self.failures: dict[int, str] = {}
        self._remarks: dict[str, str] = {}  # and the first image that each is about
        self._images = by_place(images, "images")
        if not len(self._images):
            raise UserError("no images given.")
        self._channels = description.image_shape[2]
        self._chain, self.element_spec = input_chain(description)

    @property
    def num_examples(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        image = self._images[index]
        return str(image) if isinstance(image, str | os.PathLike) else f"image {index}"

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        spec = self.element_spec["image"]
        try:
            example = self._chain({"image": self._stored(index)}, rng)
            image = example["image"]
            if (image.shape, image.dtype) == (spec.shape, spec.dtype):
                return example
            self.failures[index] = f"preprocess gives {describe(image)}, not {describe(spec)}"
        except (ValueError, OSError, cv2.error) as error:
            self.failures[index] = str(getattr(error, "strerror", None) or error)
        specs = self.element_spec.items()
        return {key: np.full(one.shape, key == "grid", one.dtype) for key, one in specs}

    def _stored(self, index: int) -> bytes | np.ndarray:
        """The image as input of the first op."""
        image, decode = self._images[index], self._chain.ops[0]
        if isinstance(image, str | os.PathLike):
            image = read_file(image)
        elif hasattr(image, "convert"):
            image = pillow_pixels(image, exif=getattr(decode, "exif", True))
        stored: Any = image if isinstance(image, bytes) else np.asarray(image)
        name, what = self.name(index), remark(stored)
        if what and self._remarks.setdefault(what, name) == name:
            logging.warning("%s: %s; others like it are not named.", name, what)
        if isinstance(decode, Decode):
            return stored
        return decode_image(stored, channels=self._channels, exif=True)


class Inputs:
    """Model inputs as examples for the pipeline: float images, or text tokens [B, T]."""

    def __init__(self, inputs: np.ndarray | Patches):
        if isinstance(inputs, Patches):
            self._arrays = {"image": np.asarray(inputs.pixels), "grid": np.asarray(inputs.grid)}
        else:
            self._arrays = {"text" if inputs.ndim == 2 else "image": np.asarray(inputs)}
        self.failures: dict[int, str] = {}
        arrays = self._arrays.items()
        self.element_spec = {key: ArraySpec(x.shape[1:], x.dtype) for key, x in arrays}

    @property
    def num_examples(self) -> int:
        return len(next(iter(self._arrays.values())))

    def example(self, index: int, _rng: np.random.Generator) -> dict[str, Any]:
        return {key: array[index] for key, array in self._arrays.items()}
