"""ImageNet as it is downloaded: tars of tars, or the folders that they unpack to.

ILSVRC 2012 ("ImageNet-1k"): `ILSVRC2012_img_train.tar` holds a tar for each of 1,000 classes,
`ILSVRC2012_img_val.tar` 50,000 images without classes, whose labels come with TFDS.

ImageNet-21k: a tar of one tar per WordNet id. How many classes there are depends on the release:
that of fall 2011 has 21,841 (14,197,122 images), that of winter 2021 has 19,167 (13,153,500; most
of the subtree of people was withdrawn). The published 21k heads have 21,843 outputs, two more than
the release of 2011. Labels here number the classes that the source has, sorted by WordNet id, so
the new head fits the data; `evaluate.py` and `predict.py` match labels to the outputs of a
published head by WordNet id, never by number.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import numpy as np

from vit_jax.data_preparation import class_parts
from vit_jax.data_preparation.class_parts import ClassPart, FilesAndRows
from vit_jax.data_preparation.listing import Listing, in_tfds_order
from vit_jax.data_preparation.parallel import Map, Progress
from vit_jax.data_preparation.tars import is_gzip, unpack_stream
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo.class_names import LABELS, wordnet_ids

NUM_IMAGES = {"train": 1_281_167, "validation": 50_000}
TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
FOLDERS = {"train": ("train",), "validation": ("val", "validation")}

_VALIDATION = re.compile(rb"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)


def imagenet2012_files(source: str) -> list[str]:
    """The files that the set is made of; for `listing.fingerprint`."""
    files = []
    for path in _find_splits(source).values():
        if os.path.isfile(path):
            files.append(path)
        elif classes := class_parts.class_folders(path):
            files += [file for part in classes for file in class_parts.files_of(part)]
        else:
            files += class_parts.image_paths(path)
    return files


def list_imagenet2012(source: str, run: Map) -> Listing:
    """The splits `train` and `validation`, as far as they are there, with TFDS's labels and order.

    Args:
      source: a folder with, for each split, its original tar; or `train/WORDNET_ID/*.JPEG` and
        `val/`, which holds the images either flat or in such folders.
      run: see `parallel.worker_processes`.

    Raises:
      UserError: neither is there, a tar is damaged, a class is unknown.
    """
    ids = wordnet_ids("imagenet2012")
    numbers = {each: number for number, each in enumerate(ids)}
    parts = {}
    for split, path in _find_splits(source).items():
        if os.path.isfile(path) and split == "validation":
            parts[split] = _with_labels(path, class_parts.tar_rows(path), numbers)
            continue
        in_tar = os.path.isfile(path)
        classes = class_parts.inner_tars(path) if in_tar else class_parts.class_folders(path)
        unknown = sorted({each.wordnet_id for each in classes} - set(ids))
        if unknown:
            raise UserError(f"{path}: {unknown[0]} is no class of ILSVRC 2012.")
        if classes:
            parts[split] = class_parts.list_images(classes, numbers, run)
        elif split == "validation":
            parts[split] = _with_labels(path, class_parts.folder_rows(path), numbers)
        else:
            raise UserError(f"{path}: holds no class folders such as n01440764.")
    for split, expected in NUM_IMAGES.items():
        found = len(parts[split][1]) if split in parts else 0
        if found != expected:
            logging.warning("%s: %s has %d images, not %d", source, split, found, expected)
    return _listing(ids, parts)


def _find_splits(source: str) -> dict[str, str]:
    """Tar, or else folder, of each split; UserError where there is none."""
    tars = {
        split: path for split, name in TARS.items() if os.path.isfile(path := f"{source}/{name}")
    }
    folders = {
        split: path
        for split, names in FOLDERS.items()
        for name in names
        if os.path.isdir(path := f"{source}/{name}")
    }
    if not tars and not folders:
        raise UserError(
            f"{source}: holds neither {' nor '.join(TARS.values())}, nor folders train and val."
        )
    found = {**folders, **tars}
    return {split: found[split] for split in TARS if split in found}


def _with_labels(path: str, images: FilesAndRows, numbers: dict[str, int]) -> FilesAndRows:
    """Gives flat validation images their classes, by the number in their names."""
    files, rows = images
    labels = validation_labels()
    for row in range(len(rows)):
        match = _VALIDATION.fullmatch(rows["name"][row])
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(labels):
            raise UserError(
                f"{path}: {os.fsdecode(bytes(rows['name'][row]))!r} is not called "
                "ILSVRC2012_val_00000001.JPEG or so, and no class folder tells its class."
            )
        rows["label"][row] = numbers[labels[number - 1]]
    if not len(rows):
        raise UserError(f"{path}: holds no images.")
    return files, rows


def validation_labels() -> list[str]:
    """WordNet ids of ILSVRC 2012's validation images 1 .. 50,000, from the TFDS package."""
    import tensorflow_datasets

    folder = Path(tensorflow_datasets.__file__).parent
    place = "datasets/imagenet2012/validation_labels.txt"
    if not (folder / place).is_file():
        raise UserError(
            f"the installed tensorflow-datasets lacks {place}; install 4.9.9 or newer, or put the "
            "validation images into class folders."
        )
    return (folder / place).read_text(encoding="utf-8").split()


def imagenet21k_files(source: str) -> list[str]:
    """The files that the set is made of; for `listing.fingerprint`."""
    if os.path.isfile(source):
        return [source]
    return [path for part in _classes(source) for path in class_parts.files_of(part)]


def _classes(folder: str) -> list[ClassPart]:
    """A tar, or else a folder, of each class."""
    parts = [*class_parts.class_folders(folder), *class_parts.class_tars(folder)]
    return sorted({part.wordnet_id: part for part in parts}.values())


def list_imagenet21k(source: str, work: Path, run: Map) -> Listing:
    """One split, `full`, in TFDS's order: `full[:25600]` is a random sample of the classes.

    Args:
      source: the tar of class tars (`winter21_whole.tar.gz`, `fall11_whole.tar`), or a folder that
        holds a tar `n00004475.tar` or a folder `n00004475` of each class.
      work: where class tars are unpacked to from a compressed tar, which takes as much disk again.
      run: see `parallel.worker_processes`.

    Raises:
      UserError: nothing of this is there, or a tar is damaged.
    """
    if os.path.isfile(source):
        parts = _unpack(source, work) if is_gzip(source) else class_parts.inner_tars(source)
    else:
        parts = _classes(source)
    if not parts:
        raise UserError(f"{source}: holds no class tars such as n00004475.tar.")
    ids = sorted(part.wordnet_id for part in parts)
    files, rows = class_parts.list_images(
        parts, {each: number for number, each in enumerate(ids)}, run
    )
    used, rows["label"] = np.unique(rows["label"], return_inverse=True)
    if len(used) < len(ids):
        logging.warning("%d classes without images get no label", len(ids) - len(used))
    logging.info(
        "%d classes (fall 2011: 21841; winter 2021: 19167; published heads: %d), %d images",
        *(len(used), LABELS["imagenet21k"], len(rows)),
    )
    return _listing(tuple(ids[number] for number in used), {"full": (files, rows)})


def _unpack(source: str, work: Path) -> list[ClassPart]:
    folder = work / "unpacked"
    logging.info("%s is compressed: its class tars are unpacked to %s first", source, folder)
    progress = Progress("unpacking", os.path.getsize(source), "bytes")
    unpack_stream(source, folder, class_parts.is_class_tar, progress.reach)
    return class_parts.class_tars(str(folder))


def _listing(class_names: tuple[str, ...], parts: dict[str, FilesAndRows]) -> Listing:
    """Joins the splits, each in TFDS's order."""
    splits = {}
    all_files: list[np.ndarray] = []
    for split, (files, rows) in parts.items():
        splits[split] = in_tfds_order(rows, split, files)
        splits[split]["file"] += sum(map(len, all_files))
        all_files.append(files)
    return Listing(class_names, np.concatenate(all_files), splits)
