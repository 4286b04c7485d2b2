"""Images by class as ImageNet has them: a tar or a folder per WordNet id."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.folder import EXTENSIONS
from vit_jax.data_preparation.listing import join_rows, make_rows
from vit_jax.data_preparation.parallel import Map, Progress
from vit_jax.data_preparation.tars import list_tar
from vit_jax.errors import UserError

_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_CLASS = re.compile(r"n\d{8}")

FilesAndRows = tuple[np.ndarray, np.ndarray]  # paths, bytes [F]; rows [N], see listing.make_rows


class ClassPart(NamedTuple):
    """Where the images of a class are: a folder, a tar, or `size` bytes of a tar of tars."""

    wordnet_id: str
    path: str
    start: int = 0
    size: int | None = None


def is_class_tar(name: str) -> bool:
    return _CLASS_TAR.fullmatch(name) is not None


def inner_tars(path: str) -> list[ClassPart]:
    """The class tars in a tar, at their places; UserError where there is none."""
    parts = []
    for member in list_tar(path, is_class_tar):
        wordnet_id = os.path.basename(member.name).removesuffix(".tar")
        parts.append(ClassPart(wordnet_id, path, member.offset, member.size))
    if not parts:
        raise UserError(f"{path}: holds no class tars such as n01440764.tar.")
    return sorted(parts)


def class_tars(folder: str) -> list[ClassPart]:
    return [
        ClassPart(match[1], os.path.join(folder, name))
        for name in _names(folder)
        if (match := _CLASS_TAR.fullmatch(name))
    ]


def class_folders(folder: str) -> list[ClassPart]:
    return [
        ClassPart(name, path)
        for name in _names(folder)
        if _CLASS.fullmatch(name) and os.path.isdir(path := os.path.join(folder, name))
    ]


def files_of(part: ClassPart) -> list[str]:
    """The files that hold the images of a class: its tar, or each image of its folder."""
    return image_paths(part.path) if os.path.isdir(part.path) else [part.path]


def image_paths(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in _names(folder) if _is_image(name)]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}.") from None


def list_images(
    parts: Sequence[ClassPart], labels: dict[str, int], run: Map
) -> tuple[np.ndarray, np.ndarray]:
    """Files [F] and rows [N] of all classes, with `labels` by WordNet id.

    Raises:
      UserError: a tar is damaged, or there is no image at all.
    """
    progress = Progress("listing", len(parts), "classes")
    found = []
    for part, (files, rows) in zip(parts, run(_images_of, parts), strict=True):
        rows["label"] = labels[part.wordnet_id]
        found.append((files, rows))
        progress.add(1)
    files, rows = join_rows(found)
    if not len(rows):
        raise UserError(f"{parts[0].path}: there is no image that ends in {', '.join(EXTENSIONS)}.")
    return files, rows


def _images_of(part: ClassPart) -> FilesAndRows:
    if os.path.isdir(part.path):
        return folder_rows(part.path)
    return tar_rows(part.path, part.start, part.size, name=part.wordnet_id)


def tar_rows(path: str, start: int = 0, size: int | None = None, *, name: str = "") -> FilesAndRows:
    """The images of one tar, see `list_tar`; their labels are 0 yet."""
    images = list_tar(path, _is_image, start, size, name=name)
    rows = make_rows(
        np.zeros(len(images)),
        [image.offset for image in images],
        [image.size for image in images],
        np.zeros(len(images)),
        [os.fsencode(os.path.basename(image.name)) for image in images],
    )
    return np.array([os.fsencode(path)], np.bytes_), rows


def folder_rows(folder: str) -> FilesAndRows:
    """The images of one folder, sorted; their labels are 0 yet."""
    with os.scandir(folder) as entries:
        images = sorted(
            (each.name, each.stat().st_size) for each in entries if _is_image(each.name)
        )
    names = [os.fsencode(name) for name, _ in images]
    zeros = np.zeros(len(images))
    rows = make_rows(np.arange(len(images)), zeros, [size for _, size in images], zeros, names)
    return np.array([os.path.join(os.fsencode(folder), name) for name in names], np.bytes_), rows


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")
