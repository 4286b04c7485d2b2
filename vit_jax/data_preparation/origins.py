"""Sources of images: one row of ORIGINS per kind.

ImageNet is read as downloaded, as tars of tars, or from the unpacked folders.

ImageNet-21k has 21,841 classes in the fall 2011 release (14,197,122 images) and 19,167 in that
of winter 2021 (13,153,500); the published heads have 21,843 outputs. Labels here number the classes
present in the source, sorted by WordNet id, so a new head fits the data; `evaluate.py` and
`predict.py` match labels to the outputs of a published head by WordNet id, never by number.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from tqdm import tqdm

from vit_jax.data.class_names import LABELS, wordnet_ids
from vit_jax.data.folder import EXTENSIONS, open_folder, split_folders
from vit_jax.data.sources import Request, map_threads
from vit_jax.data_preparation.listing import (
    FilesAndRows,
    Listing,
    Place,
    is_image,
    join,
    list_splits,
    list_tar,
    make_rows,
)
from vit_jax.errors import UserError

NUM_IMAGES = {"train": 1_281_167, "validation": 50_000}
PLACES = {  # the first that exists is used
    "train": ("ILSVRC2012_img_train.tar", "train"),
    "validation": ("ILSVRC2012_img_val.tar", "validation", "val"),
}

_CLASS = re.compile(r"(n\d{8})(\.tar)?")
_CLASS_TAR = re.compile(r"n\d{8}\.tar")
_VALIDATION = re.compile(rb"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)


def imagenet2012_parts(source: str) -> dict[str, str]:
    """Tar or folder of each split; UserError if there is none."""
    found = {}
    for split, names in PLACES.items():
        if paths := [path for name in names if os.path.exists(path := f"{source}/{name}")]:
            found[split] = paths[0]
    if not found:
        raise UserError(f"{source}: has none of {', '.join(sum(PLACES.values(), ()))}.")
    return found


def list_imagenet2012(source: str) -> Listing:
    """The splits `train` and `validation`, if present, with TFDS's labels and order.

    A split is its original tar, or `train/WORDNET_ID/*.JPEG` and `val/`, flat or in such folders.
    """
    ids = wordnet_ids("imagenet2012")
    splits = {}
    for split, path in imagenet2012_parts(source).items():
        if classes := _classes(path):
            if unknown := sorted({each.name for each in classes} - set(ids)):
                raise UserError(f"{path}: {unknown[0]} is not a class of ILSVRC 2012.")
            splits[split] = _list_classes(classes, ids)
        elif split == "validation":
            splits[split] = _list_validation(path, ids)
        else:
            raise UserError(f"{path}: has no class folders or class tars such as n01440764.")
        found, expected = len(splits[split][1]), NUM_IMAGES[split]
        if found != expected:
            logging.warning("%s: %s has %d images, not %d", source, split, found, expected)
    return _in_order(source, ids, splits)


def list_imagenet21k(source: str) -> Listing:
    """One split, `full`, in TFDS's order, from the tar of class tars (`winter21_whole.tar`, after
    gunzip), or from a folder with `n00004475.tar`, or a folder of that name, for each class.
    """
    if source.endswith((".gz", ".tgz")):
        raise UserError(f"{source}: a compressed tar has no random access; gunzip it first.")
    classes = _classes(source)
    if not classes:
        raise UserError(f"{source}: has no class tars such as n00004475.tar.")
    ids = [each.name for each in classes]
    files, rows = _list_classes(classes, ids)
    used, rows["label"] = np.unique(rows["label"], return_inverse=True)  # some have no images
    counts = f"{len(used)} classes (fall 2011: 21841; winter 2021: 19167), {len(rows)} images"
    logging.info("%s; published heads have %d outputs", counts, LABELS["imagenet21k"])
    return _in_order(source, [ids[number] for number in used], {"full": (files, rows)})


def validation_labels() -> list[str]:
    """WordNet ids of ILSVRC 2012's validation images 1 .. 50,000, from the TFDS package."""
    path = Path(tfds.__file__).parent / "datasets/imagenet2012/validation_labels.txt"
    return path.read_text(encoding="utf-8").split()


def _classes(path: str) -> list[Place]:
    """The classes in a tar of tars, or in a folder of tars and folders, by WordNet id."""
    if os.path.isfile(path):
        inner = [
            Place(os.path.basename(each.name)[:9], path, each.offset_data, each.size)
            for each in list_tar(Place("", path), _CLASS_TAR.fullmatch)
        ]
        return sorted(inner)
    places = {}
    for name in sorted(os.listdir(path)):  # a tar comes after the folder that it unpacks to
        match = _CLASS.fullmatch(name)
        if match and (match[2] or os.path.isdir(f"{path}/{name}")):
            places[match[1]] = Place(match[1], f"{path}/{name}")
    return list(places.values())


def _list_classes(classes: Sequence[Place], ids: Sequence[str]) -> FilesAndRows:
    """Files [F] and rows [N] of all classes; labels index the WordNet ids."""
    labels = {each: number for number, each in enumerate(ids)}
    listed = map_threads(_list_place, classes, chunk=1)
    found = list(tqdm(listed, "listing classes", len(classes), mininterval=10))
    for place, (_, rows) in zip(classes, found, strict=True):
        rows["label"] = labels[place.name]
    return join(found)


def _list_place(place: Place) -> FilesAndRows:
    """The images of one folder or tar, with labels still 0."""
    path = os.fsencode(place.path)
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if is_image(os.fsdecode(name)))
        files = [os.path.join(path, name) for name in names]
        sizes = list(map(os.path.getsize, files))
        return np.array(files, np.bytes_), make_rows(names, size=sizes, file=np.arange(len(names)))
    members = list_tar(place, is_image)
    rows = make_rows(
        [os.fsencode(os.path.basename(each.name)) for each in members],
        size=[each.size for each in members],
        offset=[each.offset_data for each in members],
    )
    return np.array([path], np.bytes_), rows


def _list_validation(path: str, ids: Sequence[str]) -> FilesAndRows:
    """Validation images without class folders, numbered by their names."""
    files, rows = _list_place(Place("", path))
    labels = [ids.index(each) for each in validation_labels()]
    for row in rows:
        match = _VALIDATION.fullmatch(row["name"])
        if match is None or not 1 <= int(match[1]) <= len(labels):
            name = os.fsdecode(bytes(row["name"]))
            raise UserError(f"{path}: {name!r} is not named like ILSVRC2012_val_00000001.JPEG.")
        row["label"] = labels[int(match[1]) - 1]
    return files, rows


def _in_order(source: str, class_names: Sequence[str], splits: dict[str, FilesAndRows]) -> Listing:
    """The splits, each in TFDS's order: by the MD5 of split and image name.

    `train[99%:]` has the same images as in a dataset prepared by TFDS itself, and any slice is
    a random sample of the classes. UserError if a split has no images.
    """
    if empty := [split for split, (_, rows) in splits.items() if not len(rows)]:
        endings = ", ".join(EXTENSIONS)
        raise UserError(f"{source}: no images of split {empty[0]!r} ending in {endings}.")
    ordered = {}
    for split, (files, rows) in splits.items():
        keys = [hashlib.md5(split.encode() + name).digest() for name in rows["name"]]
        ordered[split] = files, rows[np.argsort(np.array(keys, "S16"), kind="stable")]
    return list_splits(class_names, ordered)


class Origin(NamedTuple):
    """A source, before any of its images are read."""

    name: str  # of the prepared dataset
    version: str
    parts: Sequence[str]  # the files and folders it consists of
    make_listing: Callable[[str], Listing]


def _folder(source: str) -> Origin:
    name = re.sub(r"\W", "_", os.path.basename(source), flags=re.ASCII)
    name = name if re.match(r"[A-Za-z]", name) else f"images_{name}"
    splits = split_folders(source)
    parts = sorted({f"{source}/{folder}" for folders in splits.values() for folder in folders})
    return Origin(name, "1.0.0", parts, _list_folder)


def _list_folder(source: str) -> Listing:
    """The order is the folder's own (see data/labelled.py), so slices stay the same."""
    splits = {}
    for split in split_folders(source):
        images, class_names = open_folder(Request(name=source, split=split))
        # TFDS stores them in a text file, one per line.
        if odd := [each for each in class_names if each != each.strip() or not each.isprintable()]:
            rule = "use UTF-8, one line, no spaces at the ends. Rename the folder."
            raise UserError(f"{source}: {odd[0]!r} cannot be a class name: {rule}")
        inside = b"" if images.drawn else os.fsencode(f"{split}/")
        paths = [images.describe(index) for index in range(len(images))]
        rows = make_rows(
            [bytes(path).removeprefix(inside) for path in images.places],
            size=list(map(os.path.getsize, paths)),
            file=np.arange(len(paths)),
            label=images.columns["label"],
        )
        splits[split] = np.array(list(map(os.fsencode, paths)), np.bytes_), rows
    return list_splits(class_names, splits)


def _imagenet2012(source: str) -> Origin:
    parts = list(imagenet2012_parts(source).values())
    return Origin("imagenet2012", "5.1.0", parts, list_imagenet2012)


ORIGINS: dict[str, Callable[[str], Origin]] = {
    "imagenet2012": _imagenet2012,
    "imagenet21k": lambda source: Origin("imagenet21k", "1.0.0", [source], list_imagenet21k),
    "folder": _folder,
}
