"""Data passed by the caller instead of a dataset name: arrays, lists of files, objects."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index as index_of
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.check_images import usable_images
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.decode import pillow_pixels
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

_MAX_CLASSES = 1_000_000
_FILES = (str, os.PathLike, bytes)  # images as paths, or as the contents of files
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
        found = type(splits).__name__
        raise UserError(f"dataset is {found}; it must be {{'train': {FORMS}, ...}}.")
    for split in splits:
        if not isinstance(split, str) or not re.fullmatch(r"[\w-]+", split):
            raise UserError(f"dataset has a split {split!r}; a name has letters, digits, _ and -.")
    splits = {split: _read_split(split, data) for split, data in splits.items()}
    classes = _class_names(splits)
    check_classes("dataset", classes, len(splits.get("train", next(iter(splits.values())))))
    _warn_of_shared(splits)

    def open_dataset(**kwargs: Any) -> Dataset:
        if kwargs["name"] != name:
            return create_dataset(**kwargs).check()
        check_known("dataset.on_bad_image", kwargs["on_bad_image"], ("error", "skip"))
        if kwargs["label_key"]:
            raise UserError(f"dataset.label_key={kwargs['label_key']!r} is for TFDS names.")
        parts = resolve_split(kwargs["split"], splits, lambda each: len(splits[each]))
        chain = parse(kwargs["preprocess"])
        check_columns(name, chain.columns, [])
        source = MemorySource(splits, parts, classes, getattr(chain.ops[0], "exif", True))
        return Dataset(
            name, kwargs["split"], source, chain, classes, kwargs["on_bad_image"]
        ).check()

    return open_dataset


class _Pair:
    """Images and labels of a split, as given."""

    def __init__(self, images: Any, labels: list[Any]):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def _read_split(split: str, data: Any) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[1], "__len__"):
        images, labels = data[0], np.asarray(data[1], object)
        if len(images) != len(labels) or not len(labels):
            raise UserError(f"split {split!r}: {len(images)} images but {len(labels)} labels.")
        is_array = isinstance(images, np.ndarray)
        if is_array and (images.dtype != np.uint8 or images.ndim not in (3, 4)):
            found = f"split {split!r}: images are {describe(images)}"
            raise UserError(f"{found}; they must be uint8 [N, H, W, C] or [N, H, W], 0 to 255.")
        kinds = (str, int | np.integer)
        if labels.ndim != 1 or not any(all(isinstance(i, kind) for i in labels) for kind in kinds):
            found = f"split {split!r}: labels {list(labels.shape)}"
            raise UserError(f"{found} must be integers or class names, one per image.")
        return _Pair(images, labels.tolist())
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and hasattr(data, "classes"):
        return data
    # Without an index the order could not be a function of (seed, step), and no run could resume.
    raise UserError(f"split {split!r} is {type(data).__name__}; it must be {FORMS}.")


def _class_names(splits: Mapping[str, Any]) -> tuple[str, ...]:
    """Of all splits: `classes`, the names among the labels, sorted, or 0 to the largest label."""
    for split, data in splits.items():
        if not isinstance(getattr(data, "classes", ()), list | tuple):
            raise UserError(f"split {split!r}: .classes is {data.classes!r:.80}, not a list.")
    given = {tuple(map(str, data.classes)) for data in splits.values() if hasattr(data, "classes")}
    if len(given) > 1:
        raise UserError("the splits must have the same .classes in the same order.")
    if given:
        return given.pop()
    labels = {name: set(data.labels) for name, data in splits.items()}
    known = labels.get("train", set().union(*labels.values()))
    are_names = any(isinstance(label, str) for each in labels.values() for label in each)
    for name, each in labels.items():
        if unknown := sorted(map(str, each - known if are_names else ())):
            found = list_names(unknown)
            raise UserError(f"split {name!r} has classes that are not in 'train': {found}.")
        if not are_names and not 0 <= min(each, default=0) <= max(each, default=0) < _MAX_CLASSES:
            found = f"split {name!r} has labels from {min(each)} to {max(each)}"
            raise UserError(f"{found}; use 0, 1, ... below {_MAX_CLASSES:,}, or names.")
        if not are_names and max(each, default=0) > max(known, default=0):
            found = f"split {name!r} has label {max(each)}, 'train' only up to {max(known)}"
            raise UserError(f"{found}; if intended, pass an object with .classes.")
    if are_names:
        return tuple(in_order(map(str, known)))
    return tuple(map(str, range(1 + max(known, default=0))))


def _warn_of_shared(splits: Mapping[str, Any]) -> None:
    """Warns of files that are in two splits."""
    seen: dict[str, str] = {}
    for split, data in splits.items():
        images = data.images if isinstance(data, _Pair) else ()
        if isinstance(images, np.ndarray) and images.ndim > 1:
            continue
        for image in images:
            if isinstance(image, str | os.PathLike):
                other = seen.setdefault(os.path.realpath(image), split)
                if other != split:
                    logging.warning(f"dataset: {image} is in {other!r} and in {split!r}.")
                    return


def _content(image: Any) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()


class MemorySource(SlicedSource):
    """Concatenated parts of the given splits; see `open_given`."""

    def __init__(
        self, splits: Mapping[str, Any], parts: Sequence[Part], classes: Sequence[str], exif: bool
    ):
        super().__init__(splits, parts)
        self._exif = exif
        self._numbers = {name: number for number, name in enumerate(classes)}

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """`label` [N], unless labels have to be read from an object one by one."""
        if not all(isinstance(data, _Pair) for data in self.sources.values()):
            return {}
        labels = (self.sources[split].labels[i] for split, i in map(self.locate, range(len(self))))
        return {"label": np.array([self._numbers.get(each, each) for each in labels])}

    def check(self, on_bad_image: str) -> MemorySource:
        """Decodes images given as paths or bytes, see `usable_images`."""
        checked = [n for n in range(len(self)) if isinstance(self._stored(n), _FILES)]
        if not checked:
            return self
        usable = usable_images(
            len(checked),
            lambda n: _content(self._stored(checked[n])),
            lambda n: self.describe(checked[n]),
            on_bad_image,
        )
        lost = np.delete(checked, usable)
        return self.keep(np.delete(np.arange(len(self)), lost)) if len(lost) else self

    def describe(self, index: int) -> str:
        stored = self._stored(index)
        is_path = isinstance(stored, str | os.PathLike)
        return os.fspath(stored) if is_path else super().describe(index)

    def _stored(self, index: int) -> Any:
        """An image as it was given; None if only an object knows it."""
        split, i = self.locate(index)
        data = self.sources[split]
        return data.images[i] if isinstance(data, _Pair) else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        split, i = self.locate(index)
        image, label = self.sources[split][i]
        try:
            number = self._numbers.get(label, -1) if isinstance(label, str) else index_of(label)
        except TypeError as error:
            raise ValueError(f"label {label!r} is neither an integer nor a name") from error
        if not 0 <= number < len(self._numbers):
            raise ValueError(f"label {label!r} is not among the {len(self._numbers)} classes")
        if isinstance(image, _FILES):
            return {"image": _content(image), "label": number}
        if hasattr(image, "convert"):
            image = pillow_pixels(image, exif=self._exif)
        return {"image": np.asarray(image), "label": number}

    def identity(self) -> Iterable[str]:
        """Digests of arrays and bytes, names of files; for an object only its length."""
        digest = hashlib.blake2b()
        for split, i in map(self.locate, range(len(self))):
            if isinstance(data := self.sources[split], _Pair):
                image, label = data[i]
                if isinstance(image, str | os.PathLike):
                    image = os.fsencode(image)
                elif not isinstance(image, bytes):
                    image = np.ascontiguousarray(np.asarray(image))
                digest.update(image)
                digest.update(str(label).encode() + b"\0")
        return [digest.hexdigest()]
