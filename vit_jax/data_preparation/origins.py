"""Where images come from: a row of ORIGINS per kind of source."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data import tfds_reader
from vit_jax.data.folder import open_folder, split_folders
from vit_jax.data_preparation import imagenet
from vit_jax.data_preparation.listing import Listing, make_rows
from vit_jax.data_preparation.parallel import Map
from vit_jax.data_preparation.readers import IMAGES, RECORDS
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Origin:
    """A source, before any of its images is read.

    Attributes:
      name: of the set that it becomes, a TFDS name.
      version: of the set; `config/version` where TFDS has configs.
      root: what the paths of `files` are told relative to.
      files: lists the files that it consists of.
      make_listing: (folder for what has to be unpacked, map) -> its examples.
      reader: kind of the reader, `readers.IMAGES` or `readers.RECORDS`.
      no_resize: why none of its images may become a smaller JPEG, if there is a reason.
    """

    name: str
    version: str
    root: str
    files: Callable[[], list[str]]
    make_listing: Callable[[Path, Map], Listing]
    reader: str = IMAGES
    no_resize: str = ""


def _imagenet2012(source: str) -> Origin:
    return Origin(
        "imagenet2012",
        "5.1.0",
        source,
        lambda: imagenet.imagenet2012_files(source),
        lambda _, run: imagenet.list_imagenet2012(source, run),
    )


def _imagenet21k(source: str) -> Origin:
    return Origin(
        "imagenet21k",
        "1.0.0",
        os.path.dirname(source),
        lambda: imagenet.imagenet21k_files(source),
        lambda work, run: imagenet.list_imagenet21k(source, work, run),
    )


def _folder(source: str) -> Origin:
    def files() -> list[str]:
        return [
            each.path
            for split, classes in split_folders(source).items()
            for name in classes
            for each in os.scandir(f"{source}/{split}/{name}")
        ]

    name = re.sub(r"\W", "_", os.path.basename(source), flags=re.ASCII)
    name = name if re.match(r"[A-Za-z]", name) else f"images_{name}"
    return Origin(name, "1.0.0", source, files, lambda *_: _list_folder(source))


def _list_folder(source: str) -> Listing:
    """The order is the folder's own (see data/folder.py): every slice is what it was."""
    paths: list[bytes] = []
    splits = {}
    for split in split_folders(source):
        images, class_names = open_folder(source, split)
        _check_class_names(source, class_names)
        found = [images.path(index) for index in range(len(images))]
        splits[split] = make_rows(
            np.arange(len(paths), len(paths) + len(found)),
            np.zeros(len(found)),
            [os.path.getsize(path) for path in found],
            images.labels,
            [os.path.relpath(path, os.fsencode(f"{source}/{split}")) for path in found],
        )
        paths += found
    return Listing(class_names, np.array(paths, np.bytes_), splits)


def _check_class_names(source: str, class_names: Sequence[str]) -> None:
    """Raises UserError for a name that TFDS's file of names, one per line, would not give back."""
    for name in class_names:
        printable = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if printable != name or name != name.strip() or "\n" in name:
            raise UserError(
                f"{source}: the class folder {printable!r} cannot be the name of a class: it has "
                "to be UTF-8, on one line, without blanks at its ends. Rename the folder."
            )


def _tfds(source: str) -> Origin:
    """A prepared directory; the examples keep their order and all their features."""
    try:
        builder = tfds.builder_from_directory(source)
    except Exception as error:  # TFDS raises many kinds, over several lines
        reason = str(error).splitlines()[0]
        raise UserError(f"{source}: is no directory that TFDS has prepared ({reason}).") from None
    info = builder.info
    config = f"{info.config_name}/" if info.config_name else ""

    def files() -> list[str]:
        shards = [path for each in info.splits.values() for path in each.filenames]
        return [f"{source}/{name}" for name in (tfds_reader.INFO_FILE, *shards)]

    def make_listing(*_: object) -> Listing:
        splits = {}
        for split, each in info.splits.items():
            count = each.num_examples
            if not count:
                logging.warning("%s: split %r has no examples and is left out", source, split)
                continue
            zeros, size = np.zeros(count), each.num_bytes // max(count, 1)
            names = np.zeros(count, "S1")
            splits[split] = make_rows(zeros, np.arange(count), zeros + size, zeros, names)
        if not splits:
            raise UserError(f"{source}: has no examples.")
        return Listing((), np.array([os.fsencode(source)], np.bytes_), splits)

    version = f"{config}{info.version}"
    no_resize = why_not_resize(info.features[tfds_reader.image_key(info)])
    return Origin(info.name, version, source, files, make_listing, RECORDS, no_resize)


def why_not_resize(image: tfds.features.Image) -> str:
    """What a feature promises that a JPEG of 8-bit RGB of another size would break, if anything."""
    if None not in image.shape[:2]:
        return "all its images are of one size"
    if np.dtype(image.np_dtype) != np.uint8:
        return f"its images are {np.dtype(image.np_dtype).name}, which JPEG cannot hold"
    if image.shape[2] != 3:
        return f"its images have {image.shape[2]} channels, not the 3 of a resized one"
    return ""


ORIGINS: dict[str, Callable[[str], Origin]] = {
    "imagenet2012": _imagenet2012,
    "imagenet21k": _imagenet21k,
    "folder": _folder,
    "tfds": _tfds,
}
