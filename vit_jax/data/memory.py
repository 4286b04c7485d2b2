"""Data of the caller's own in place of a data set's name: arrays, lists of files, objects."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index as index_of
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.decode import pillow_pixels
from vit_jax.data.folder import FolderSource
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import (
    Part,
    SlicedSource,
    check_classes,
    check_columns,
    describe,
    in_order,
    resolve_split,
)
from vit_jax.errors import UserError, check_known, list_names

_MOST_CLASSES = 1_000_000
FORMS = "(images, labels), or an object with len(), [i] -> (image, label) and .classes"


def open_given(splits: Mapping[str, Any], name: str) -> Callable[..., Dataset]:
    """`create_dataset`, but `name` stands for `splits`.

    They are by name, such as `train` and `test`, one of
      * images and labels: uint8 [N, H, W, C] or [N, H, W], or a sequence of such images of any
        size, of Pillow's, of paths or of the bytes of files; integers [N], or names of classes;
      * an object with a length, which gives (image, label) by index, and its `classes`.
    UserError for something else, or splits with other classes.
    """
    if not isinstance(splits, Mapping) or not splits:
        found = type(splits).__name__
        raise UserError(f"dataset is {found}; it must be {{'train': {FORMS}, ...}}.")
    for split in splits:
        if not isinstance(split, str) or not re.fullmatch(r"[\w-]+", split):
            raise UserError(f"dataset has a split {split!r}; its name must be a word.")
    halves = {split: _half(split, data) for split, data in splits.items()}
    classes = _class_names(halves)
    check_classes("dataset", classes, len(halves.get("train", next(iter(halves.values())))))
    _say_shared(halves)

    def open_dataset(**kwargs: Any) -> Dataset:
        if kwargs["name"] != name:
            return create_dataset(**kwargs).check()
        check_known("dataset.on_bad_image", kwargs["on_bad_image"], ("error", "skip"))
        if kwargs["label_key"]:
            raise UserError(f"dataset.label_key={kwargs['label_key']!r} is for TFDS names.")
        parts = resolve_split(kwargs["split"], halves, lambda each: len(halves[each]))
        chain = parse(kwargs["preprocess"])
        check_columns(name, chain.columns, [])
        source = MemorySource(halves, parts, classes, getattr(chain.ops[0], "exif", True))
        return Dataset(
            name, kwargs["split"], source, chain, classes, kwargs["on_bad_image"]
        ).check()

    return open_dataset


class _Pair:
    """Images and labels of a split, as they were given."""

    def __init__(self, images: Any, labels: list[Any]):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def _half(split: str, data: Any) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "__len__"):
        images, labels = data[0], np.asarray(data[1], object)
        if len(images) != len(labels) or not len(labels):
            raise UserError(f"split {split!r}: {len(images)} images, {len(labels)} labels.")
        is_array = isinstance(images, np.ndarray)
        if is_array and (images.dtype != np.uint8 or images.ndim not in (3, 4)):
            found = f"split {split!r}: images are {describe(images)}"
            raise UserError(f"{found}; they must be uint8 [N, H, W, C] or [N, H, W], 0 to 255.")
        kinds = (str, int | np.integer)
        if labels.ndim != 1 or not any(all(isinstance(i, kind) for i in labels) for kind in kinds):
            found = f"split {split!r}: labels {list(labels.shape)}"
            raise UserError(f"{found} must be integers or names of classes, one for each image.")
        return _Pair(images, labels.tolist())
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and hasattr(data, "classes"):
        return data
    # Without an index the order could not be a function of (seed, step), and no run resumed.
    raise UserError(f"split {split!r} is {type(data).__name__}; it must be {FORMS}.")


def _class_names(halves: Mapping[str, Any]) -> tuple[str, ...]:
    """Of all splits: `classes`, the names among the labels in order, or 0 to the largest label."""
    for split, half in halves.items():
        if not isinstance(getattr(half, "classes", ()), list | tuple):
            raise UserError(f"split {split!r}: .classes is {half.classes!r:.80}, no list of names.")
    given = {tuple(map(str, half.classes)) for half in halves.values() if hasattr(half, "classes")}
    if len(given) > 1:
        raise UserError("the splits have other .classes, or in another order.")
    if given:
        return given.pop()
    labels = {name: set(half.labels) for name, half in halves.items()}
    known = labels.get("train", set().union(*labels.values()))
    are_names = any(isinstance(label, str) for each in labels.values() for label in each)
    for name, each in labels.items():
        if unknown := sorted(map(str, each - known if are_names else ())):
            found = list_names(unknown)
            raise UserError(f"split {name!r} has classes that 'train' has not: {found}.")
        if not are_names and not 0 <= min(each, default=0) <= max(each, default=0) < _MOST_CLASSES:
            found = f"split {name!r} has labels from {min(each)} to {max(each)}"
            raise UserError(f"{found}; they are 0, 1, ... below {_MOST_CLASSES:,}, or names.")
        if not are_names and max(each, default=0) > max(known, default=0):
            found = f"split {name!r} has label {max(each)}, 'train' none above {max(known)}"
            raise UserError(f"{found}; give an object with .classes, if that is meant.")
    if are_names:
        return tuple(in_order(map(str, known)))
    return tuple(map(str, range(1 + max(known, default=0))))


def _say_shared(halves: Mapping[str, Any]) -> None:
    """Warns of files that two splits have."""
    seen: dict[str, str] = {}
    for split, half in halves.items():
        images = half.images if isinstance(half, _Pair) else ()
        if isinstance(images, np.ndarray) and images.ndim > 1:
            continue
        for image in images:
            if isinstance(image, str | os.PathLike):
                other = seen.setdefault(os.path.realpath(image), split)
                if other != split:
                    logging.warning(f"dataset: {image} is in {other!r} and in {split!r}.")
                    return


class MemorySource(SlicedSource):
    """Parts of given splits, one after the other; see `open_given`."""

    def __init__(
        self, halves: Mapping[str, Any], parts: Sequence[Part], classes: Sequence[str], exif: bool
    ):
        super().__init__(halves, parts)
        self._exif = exif
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._kept = np.arange(super().__len__())

    def __len__(self) -> int:
        return len(self._kept)

    def locate(self, index: int) -> tuple[str, int]:
        return super().locate(int(self._kept[index]))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """`label` [N], unless an object has to be asked for each."""
        if not all(isinstance(half, _Pair) for half in self.sources.values()):
            return {}
        labels = (self.sources[split].labels[i] for split, i in map(self.locate, range(len(self))))
        return {"label": np.array([self._numbers.get(each, each) for each in labels])}

    def check(self, on_bad_image: str) -> MemorySource:
        """Images that are given by their paths are checked as those of a folder."""
        paths, places = [], []
        for index, (split, i) in enumerate(map(self.locate, range(len(self)))):
            half = self.sources[split]
            if isinstance(half, _Pair) and isinstance(half.images[i], str | os.PathLike):
                paths.append(os.fsencode(half.images[i]))
                places.append(index)
        if not paths:
            return self
        files = FolderSource("", np.array(paths), {"place": np.array(places)})
        lost = np.setdiff1d(places, files.check(on_bad_image).columns["place"])
        if len(lost):
            self = copy.copy(self)
            self._kept = np.delete(self._kept, lost)
        return self

    def __getitem__(self, index: int) -> dict[str, Any]:
        split, i = self.locate(index)
        image, label = self.sources[split][i]
        try:
            number = self._numbers.get(label, -1) if isinstance(label, str) else index_of(label)
        except TypeError as error:
            raise ValueError(f"label {label!r} is neither an integer nor a name") from error
        if not 0 <= number < len(self._numbers):
            raise ValueError(f"label {label!r} is not among the {len(self._numbers)} classes")
        if isinstance(image, str | os.PathLike):
            image = Path(image).read_bytes()
        elif hasattr(image, "convert"):
            image = pillow_pixels(image, exif=self._exif)
        return {"image": image if isinstance(image, bytes) else np.asarray(image), "label": number}

    def identity(self) -> Iterable[str]:
        """Digests of arrays and bytes, names of files; of an object its length only."""
        digest = hashlib.blake2b()
        for split, i in map(self.locate, range(len(self))):
            if isinstance(half := self.sources[split], _Pair):
                image, label = half[i]
                if isinstance(image, str | os.PathLike):
                    image = os.fsencode(image)
                elif not isinstance(image, bytes):
                    image = np.ascontiguousarray(np.asarray(image))
                digest.update(image)
                digest.update(str(label).encode() + b"\0")
        return [digest.hexdigest()]
