"""Where images come from: a row of ORIGINS per kind of source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.folder import open_folder, split_folders
from vit_jax.data_preparation import imagenet
from vit_jax.data_preparation.listing import Listing, make_rows
from vit_jax.errors import UserError


class Origin(NamedTuple):
    """A source, before any of its images is read."""

    name: str  # of the set that it becomes
    version: str
    parts: Sequence[str]  # the files and folders that it consists of
    make_listing: Callable[[], Listing]


def _imagenet2012(source: str) -> Origin:
    parts = list(imagenet.imagenet2012_parts(source).values())
    return Origin("imagenet2012", "5.1.0", parts, lambda: imagenet.list_imagenet2012(source))


def _imagenet21k(source: str) -> Origin:
    return Origin("imagenet21k", "1.0.0", [source], lambda: imagenet.list_imagenet21k(source))


def _folder(source: str) -> Origin:
    name = re.sub(r"\W", "_", os.path.basename(source), flags=re.ASCII)
    name = name if re.match(r"[A-Za-z]", name) else f"images_{name}"
    splits = split_folders(source)
    parts = sorted({f"{source}/{folder}" for folders in splits.values() for folder in folders})
    return Origin(name, "1.0.0", parts, lambda: _list_folder(source))


def _list_folder(source: str) -> Listing:
    """The order is the folder's own (see data/folder.py): every slice is what it was."""
    paths: list[bytes] = []
    splits = {}
    for split in split_folders(source):
        images, class_names = open_folder(source, split)
        for name in class_names:  # TFDS keeps them in a text file, one per line
            printable = name.encode("utf-8", "replace").decode()
            if printable != name or name != name.strip() or "\n" in name:
                raise UserError(
                    f"{source}: {printable!r} cannot be the name of a class: it has to be UTF-8, "
                    "on one line, without blanks at its ends. Rename the folder."
                )
        inside = b"" if images.drawn else os.fsencode(f"{split}/")
        found = [images.path(index) for index in range(len(images))]
        splits[split] = make_rows(
            [os.path.relpath(path, os.fsencode(source)).removeprefix(inside) for path in found],
            [os.path.getsize(path) for path in found],
            file=np.arange(len(paths), len(paths) + len(found)),
            label=images.labels,
        )
        paths += found
    return Listing(class_names, np.array(paths, np.bytes_), splits)


ORIGINS: dict[str, Callable[[str], Origin]] = {
    "imagenet2012": _imagenet2012,
    "imagenet21k": _imagenet21k,
    "folder": _folder,
}
