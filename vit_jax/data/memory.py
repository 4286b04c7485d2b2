"""Data passed by the caller instead of a dataset name: arrays, lists of files, objects."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index as index_of
from typing import Any

import numpy as np

from vit_jax.data import labelled
from vit_jax.data.datasets import READERS, Dataset, Reader, create_dataset
from vit_jax.data.labelled import LabelledSource, Listing
from vit_jax.data.pillow_reader import is_transparent, pillow_pixels
from vit_jax.data.sources import MOST_CLASSES, Request, by_place, describe, naming_splits
from vit_jax.errors import UserError
from vit_jax.files.paths import read_file

_PATHS = (str, os.PathLike)
FORMS = "(images, labels), or an object with len(), [i] -> (image, label) and .classes"


def open_given(splits: Mapping[str, Any], name: str) -> Callable[..., Dataset]:
    """Returns `create_dataset` in which `name` stands for `splits`.

    Each, by name such as `train` and `test`, is one of
      * images and labels: uint8 [N, H, W, C] or [N, H, W], or a sequence of images of any size,
        each an array, a Pillow image, a path or the bytes of a file; integers [N], or class names;
      * an object with a length, `[i]` -> (image, label), and `classes`.
    UserError for anything else, or if the splits disagree on the classes.
    """
    if not isinstance(splits, Mapping) or not splits:
        raise UserError(f"dataset must be {{'train': {FORMS}, ...}}.")
    for split in splits:
        if not isinstance(split, str) or not re.fullmatch(r"[\w-]+", split):
            raise UserError(f"dataset has a split {split!r}; a name has letters, digits, _ and -.")
    data = {split: _read_split(split, forms) for split, forms in splits.items()}
    labels, classes = _labels(data)
    places, rows = labelled.number_images({split: len(part) for split, part in data.items()})
    numbers = {name: i for i, name in enumerate(classes or ())}
    # Here, not in `open_split`: errors before there is a run.
    source = MemorySource(places, {}, data, numbers)
    listing = Listing("dataset", source, rows, labels, classes=classes)

    def open_split(request: Request) -> tuple[MemorySource, tuple[str, ...]]:
        source, names = listing.open(request.split)
        used = dict.fromkeys(source.places["split"].tolist())  # only these are sent to workers
        splits = {split: data[split] for split in used}
        return dataclasses.replace(source, splits=splits, exif=request.exif), names

    mine = Reader(lambda asked, _: asked == name, open_split)
    return lambda **kwargs: create_dataset(**kwargs, readers=[mine, *READERS.values()]).check()


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Images and labels of a split, as given."""

    images: Any
    labels: list[Any]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def _read_split(split: str, data: Any) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "__len__"):
        images, labels = (by_place(part, f"split {split!r}") for part in data)
        labels = np.asarray(labels, object)
        if len(images) != len(labels) or not len(labels):
            raise UserError(f"split {split!r}: {len(images)} images but {len(labels)} labels.")
        is_array = isinstance(images, np.ndarray)
        if is_array and (images.dtype != np.uint8 or images.ndim not in (3, 4)):
            are = f"split {split!r}: images are {describe(images)}"
            raise UserError(f"{are}; they must be uint8 [N, H, W, C] or [N, H, W], 0 to 255.")
        kinds = (str, int | np.integer)
        if labels.ndim != 1 or not any(all(isinstance(i, kind) for i in labels) for kind in kinds):
            are = f"split {split!r}: labels {list(labels.shape)}"
            raise UserError(f"{are} must be integers or class names, one per image.")
        return _Pair(images, labels.tolist())
    if not all(hasattr(data, name) for name in ("__len__", "__getitem__", "classes")):
        # Without an index the order could not be a function of (seed, step).
        raise UserError(f"split {split!r} is {type(data).__name__}; it must be {FORMS}.")
    if not isinstance(data.classes, list | tuple):
        raise UserError(f"split {split!r}: .classes is {data.classes!r:.80}, not a list.")
    return data


def _labels(splits: Mapping[str, Any]) -> tuple[list[str] | None, Sequence[str] | None]:
    """Labels and classes of a `Listing`: the names, or numbers up to the largest label."""
    objects = [data for data in splits.values() if not isinstance(data, _Pair)]
    classes = {tuple(map(str, data.classes)) for data in objects}
    if len(classes) > 1:
        raise UserError("the splits must have the same .classes in the same order.")
    if classes:
        return None, classes.pop()
    labels = [label for data in splits.values() for label in data.labels]
    if any(isinstance(label, str) for label in labels):
        return list(map(str, labels)), None
    low, high = min(labels), max(labels)
    if not 0 <= low <= high < MOST_CLASSES:
        limits = f"use 0, 1, ... below {MOST_CLASSES:,}, or names"
        raise UserError(f"dataset has labels from {low} to {high}; {limits}.")
    highest = max(label for data in naming_splits(splits) for label in data.labels)
    return [str(int(label)) for label in labels], tuple(map(str, range(1 + highest)))


@dataclasses.dataclass(frozen=True, eq=False)
class MemorySource(LabelledSource):
    """Images of the given splits; `places` are those of `number_images`."""

    splits: Mapping[str, Any]
    numbers: Mapping[str, int]  # of the classes of objects
    exif: bool | None = True  # see `Request`

    def __getitem__(self, index: int) -> dict[str, Any]:
        if "label" in self.columns:
            return super().__getitem__(index)
        split, row = self.places[index].item()
        image, label = self.splits[split][row]
        try:
            number = self.numbers.get(label, -1) if isinstance(label, str) else index_of(label)
        except TypeError as error:
            raise ValueError(f"label {label!r} is neither an integer nor a name") from error
        if not 0 <= number < len(self.numbers):
            raise ValueError(f"label {label!r} is not among the {len(self.numbers)} classes")
        return {"image": self._content(image), "label": number}

    def read(self, index: int) -> Any:
        """Nothing that could be damaged if only an object knows the image."""
        return self._content(self._image(index))

    def _content(self, image: Any) -> Any:
        if isinstance(image, _PATHS):
            return read_file(image)
        if hasattr(image, "convert"):
            image = pillow_pixels(image, exif=self.exif is not False)
            if self.exif is None and is_transparent(image):
                raise ValueError("it has transparent pixels: preprocess must start with decode")
        return image if isinstance(image, bytes) else np.asarray(image)

    def _image(self, index: int) -> Any:
        """An image as it was given; None if only an object knows it."""
        split, row = self.places[index].item()
        data = self.splits[split]
        return data.images[row] if isinstance(data, _Pair) else None

    def describe(self, index: int) -> str:
        image = self._image(index)
        return os.fspath(image) if isinstance(image, _PATHS) else super().describe(index)

    def identity(self) -> Iterable[str]:
        """Digests of arrays and bytes, names of files; for an object only its length."""
        digest = hashlib.blake2b()
        for split, row in self.places.tolist():
            if isinstance(data := self.splits[split], _Pair):
                image, label = data[row]
                if isinstance(image, _PATHS):
                    image = os.fsencode(image)
                elif not isinstance(image, bytes):
                    image = np.ascontiguousarray(np.asarray(image))
                digest.update(image)
                digest.update(str(label).encode() + b"\0")
        return [digest.hexdigest()]
