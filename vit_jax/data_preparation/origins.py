"""Sources of images: one row of ORIGINS per kind. It lists what the prepared set will contain.

ImageNet is read as downloaded, as tars of tars, or from the unpacked folders. ImageNet-21k has
21,841 classes in the fall 2011 release and 19,167 in that of winter 2021; the published heads have
21,843 outputs. Labels here number the classes present in the source, sorted by WordNet id; scripts
match them to the outputs of a published head by WordNet id, never by number.
"""

import hashlib
import itertools
import logging
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import ArrayLike
from tqdm import tqdm

from vit_jax.data.class_names import LABELS, wordnet_ids
from vit_jax.data.folder import EXTENSIONS, is_image, open_folder, split_folders
from vit_jax.data.sources import Request, map_threads, named_splits
from vit_jax.errors import UserError

NUM_IMAGES = {"train": 1_281_167, "validation": 50_000}
PLACES = {  # the first that exists is used
    "train": ("ILSVRC2012_img_train.tar", "train"),
    "validation": ("ILSVRC2012_img_val.tar", "validation", "val"),
}

_CLASS = re.compile(r"(n\d{8})(\.tar)?")
_CLASS_TAR = re.compile(r"n\d{8}\.tar")
_VALIDATION = re.compile(rb"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)


class Listing(NamedTuple):
    """The examples of a dataset, by split, in the order in which they will be stored."""

    class_names: Sequence[str]
    splits: dict[str, np.ndarray]  # name to rows [N], see `_rows`


class Place(NamedTuple):
    """Location of images: a folder, a tar, or `size` bytes of a tar of tars."""

    name: str  # WordNet id of their class
    path: str
    start: int = 0
    size: int | None = None


def _rows(container: str, names: Sequence[bytes], **columns: ArrayLike) -> np.ndarray:
    """A row per image [N]: tar or folder, first byte in the tar (0: a file), bytes, class, name."""
    text = np.array(names, np.bytes_)
    numbers = [("offset", "<i8"), ("size", "<i8"), ("label", "<i4")]
    rows = np.zeros(len(text), [("container", object), *numbers, ("name", text.dtype)])
    for key, values in {**columns, "container": container, "name": text}.items():
        rows[key] = values
    return rows  # [N]


def _imagenet2012_parts(source: str) -> list[str]:
    """Tar or folder of each split; UserError if there is none."""
    parts = []
    for names in PLACES.values():
        parts += [path for name in names if os.path.exists(path := f"{source}/{name}")][:1]
    if not parts:
        raise UserError(f"{source}: has none of {', '.join(sum(PLACES.values(), ()))}.")
    return parts


def list_imagenet2012(source: str) -> Listing:
    """The splits `train` and `validation`, if present, with TFDS's labels and order.

    A split is its original tar, or `train/WORDNET_ID/*.JPEG` and `val/`, flat or in such folders.
    """
    ids = wordnet_ids("imagenet2012")
    splits = {}
    for path in _imagenet2012_parts(source):
        split = next(split for split in PLACES if os.path.basename(path) in PLACES[split])
        if classes := _classes(path):
            if unknown := sorted({place.name for place in classes} - set(ids)):
                raise UserError(f"{path}: {unknown[0]} is not a class of ILSVRC 2012.")
            splits[split] = _list_classes(classes, ids)
        elif split == "validation":
            splits[split] = _list_validation(path, ids)
        else:
            raise UserError(f"{path}: has no class folders or class tars such as n01440764.")
        count, expected = len(splits[split]), NUM_IMAGES[split]
        if count != expected:
            logging.warning("%s: %s has %d images, not %d", source, split, count, expected)
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
    ids = [place.name for place in classes]
    rows = _list_classes(classes, ids)
    used, rows["label"] = np.unique(rows["label"], return_inverse=True)  # some have no images
    counts = f"{len(used)} classes (fall 2011: 21841; winter 2021: 19167), {len(rows)} images"
    logging.info("%s; published heads have %d outputs", counts, LABELS["imagenet21k"])
    return _in_order(source, [ids[number] for number in used], {"full": rows})


def validation_labels() -> list[str]:
    """WordNet ids of ILSVRC 2012's validation images 1 .. 50,000, from the TFDS package."""
    path = Path(tfds.__file__).parent / "datasets/imagenet2012/validation_labels.txt"
    return path.read_text(encoding="utf-8").split()


def _classes(path: str) -> list[Place]:
    """The classes in a tar of tars, or in a folder of tars and folders, by WordNet id."""
    if os.path.isfile(path):
        inner = _list_tar(Place("", path), _CLASS_TAR.fullmatch)
        return sorted(
            Place(os.path.basename(tar.name)[:9], path, tar.offset_data, tar.size) for tar in inner
        )
    places = {}
    for name in sorted(os.listdir(path)):  # a tar comes after the folder that it unpacks to
        match = _CLASS.fullmatch(name)
        if match and (match[2] or os.path.isdir(f"{path}/{name}")):
            places[match[1]] = Place(match[1], f"{path}/{name}")
    return list(places.values())


def _list_classes(classes: Sequence[Place], ids: Sequence[str]) -> np.ndarray:
    """Rows [N] of all classes; labels index the WordNet ids."""
    labels = {wordnet_id: number for number, wordnet_id in enumerate(ids)}
    listed = map_threads(_list_place, classes, chunk=1)
    parts = list(tqdm(listed, "listing classes", len(classes), mininterval=10))
    for place, rows in zip(classes, parts, strict=True):
        rows["label"] = labels[place.name]
    return np.concatenate(parts)


def _list_place(place: Place) -> np.ndarray:
    """The images of one folder or tar, with labels still 0."""
    if os.path.isdir(place.path):
        names = sorted(map(os.fsencode, filter(is_image, os.listdir(place.path))))
        sizes = [os.path.getsize(os.path.join(os.fsencode(place.path), name)) for name in names]
        return _rows(place.path, names, size=sizes)
    members = _list_tar(place, is_image)
    return _rows(
        place.path,
        [os.fsencode(os.path.basename(member.name)) for member in members],
        size=[member.size for member in members],
        offset=[member.offset_data for member in members],
    )


def _list_tar(place: Place, wanted: Callable[[str], object]) -> list[tarfile.TarInfo]:
    """A tar's members `wanted` by name, from headers alone; UserError: no tar, or truncated."""
    name, path, start, size = place
    where = f"{path}: {name}" if name else path
    end = os.path.getsize(path) if size is None else start + size
    with open(path, "rb") as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members = [info for info in tar if wanted(os.path.basename(info.name))]
                last = tar.offset
        except tarfile.TarError as error:
            reason = "truncated" if "unexpected end" in str(error) else f"not a tar ({error})"
            raise UserError(f"{where}: {reason}; copy it again.") from None
        # tarfile stops silently at a damaged header, and an inner tar must not run on.
        file.seek(last)
        if last + 512 > end or file.read(512) != bytes(512):
            raise UserError(f"{where}: truncated or damaged at byte {last}; copy it again.")
    return members


def _list_validation(path: str, ids: Sequence[str]) -> np.ndarray:
    """Validation images without class folders, numbered by their names."""
    rows = _list_place(Place("", path))
    labels = [ids.index(wordnet_id) for wordnet_id in validation_labels()]
    for row in rows:
        match = _VALIDATION.fullmatch(row["name"])
        if match is None or not 1 <= int(match[1]) <= len(labels):
            name = os.fsdecode(bytes(row["name"]))
            raise UserError(f"{path}: {name!r} is not named like ILSVRC2012_val_00000001.JPEG.")
        row["label"] = labels[int(match[1]) - 1]
    return rows


def _in_order(source: str, class_names: Sequence[str], splits: dict[str, np.ndarray]) -> Listing:
    """The splits, each in TFDS's order: by the MD5 of split and image name.

    So `train[99%:]` has the images that TFDS gives it. UserError if a split has no images.
    """
    ordered = {}
    for split, rows in splits.items():
        if not len(rows):
            raise UserError(f"{source}: no images of {split!r} ending in {', '.join(EXTENSIONS)}.")
        keys = [hashlib.md5(split.encode() + name).digest() for name in rows["name"]]
        ordered[split] = rows[np.argsort(np.array(keys, "S16"), kind="stable")]
    return Listing(class_names, ordered)


def _list_folder(source: str) -> Listing:
    """The order is the folder's own (see data/labelled.py), so slices stay the same."""
    splits = {}
    for split, written in named_splits(split_folders(source)).items():
        images, class_names = open_folder(Request(name=source, split=split))
        if odd := [name for name in class_names if name != name.strip()]:  # TFDS would strip it
            raise UserError(f"{source}: {odd[0]!r} cannot be a class name; rename the folder.")
        folder = "" if images.drawn else f"{written}/"
        splits[split] = _rows(
            f"{source}/{folder}",
            [os.fsencode(path.removeprefix(folder)) for path in images.relative_paths()],
            size=[os.path.getsize(images.describe(index)) for index in range(len(images))],
            label=images.columns["label"],
        )
    return Listing(class_names, splits)


def _folder_parts(source: str) -> list[str]:
    folders = itertools.chain(*split_folders(source).values())
    return sorted({f"{source}/{folder}" for folder in folders})


class Origin(NamedTuple):
    """A kind of source: what the prepared set is called, and how its images are listed."""

    name: str  # "": after the folder
    version: str
    parts: Callable[[str], Sequence[str]]  # the files and folders that a source consists of
    list_images: Callable[[str], Listing]


ORIGINS = {
    "imagenet2012": Origin("imagenet2012", "5.1.0", _imagenet2012_parts, list_imagenet2012),
    "imagenet21k": Origin("imagenet21k", "1.0.0", lambda source: [source], list_imagenet21k),
    "folder": Origin("", "1.0.0", _folder_parts, _list_folder),
}


def fingerprint(source: str, parts: Sequence[str]) -> str:
    """Hash of relative path, size and modification time of all tars and images in `parts`."""
    digest = hashlib.sha256()
    root = os.fsencode(source if os.path.isdir(source) else os.path.dirname(source))
    paths = [os.fsencode(part) for part in parts if os.path.isfile(part)]
    for part in parts:
        for folder, _, names in os.walk(os.fsencode(part), followlinks=True):
            # A log written beside them does not count.
            used = (name for name in names if name.endswith(b".tar") or is_image(os.fsdecode(name)))
            paths += [os.path.join(folder, name) for name in used]
    for path in sorted(paths):
        status = os.stat(path)
        line = f" {status.st_size} {status.st_mtime_ns}\n"
        digest.update(os.path.relpath(path, root) + line.encode())
    return digest.hexdigest()
