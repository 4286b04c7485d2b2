"""Image folders: `root/{train,test,...}/class_name/*.jpg` and similar.

Without split folders, a fifth of each class is `test`. Images may be nested in any number of
folders below their class. For their order see `labelled.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vit_jax.data import labelled
from vit_jax.data.labelled import HELD_OUT, LabelledSource, Listing
from vit_jax.data.sources import Request, map_threads, split_names
from vit_jax.errors import UserError

_EXTENSIONS = ".jpg .jpeg .jpe .jp2 .png .webp .gif .avif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm"
HEIC = (".heic", ".heif")  # need the extra `heic`
# What OpenCV decodes, and Pillow with that extra.
EXTENSIONS = tuple(f"{_EXTENSIONS} .ras .sr".split()) + (HEIC if find_spec("pillow_heif") else ())
LAYOUT = "CLASS_NAME/IMAGE.jpg or train/CLASS_NAME/IMAGE.jpg"


@dataclasses.dataclass(frozen=True, eq=False)
class FolderSource(LabelledSource):
    """Image files below a folder: `places` are relative paths, bytes [N]."""

    root: str

    def read(self, index: int) -> bytes:
        return Path(self.describe(index)).read_bytes()

    def describe(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(bytes(self.places[index])))

    def relative_paths(self) -> list[str]:
        return [os.fsdecode(path) for path in self.places.tolist()]

    def identity(self) -> Iterable[str]:
        """Relative path and size of every file, in order."""
        sizes = map_threads(lambda i: os.path.getsize(self.describe(i)), range(len(self)))
        return map("{} {}".format, self.relative_paths(), sizes)


def open_folder(request: Request) -> tuple[FolderSource, tuple[str, ...]]:
    """Lists, without opening, the files of a split expression; returns source and class names.

    The classes are the folders of `train` (else of all splits). If no label is needed there are
    no classes; splits then need no class folders, and images directly in `root` are `train`.
    UserError for any other layout, a class without images, and see `Listing.open`.
    """
    root = os.path.abspath(request.path)
    where = f"dataset.name={root!r}"
    folders = split_folders(root, request.needs_label, request.split)
    split = labelled.known_split(where, request.split, folders)
    wanted = folders if "all" in split_names(split) else split_names(split)
    files = _list_files(root, [folder for name in wanted for folder in folders.get(name, ())])
    groups = [folder for folder, paths in files.items() for _ in paths]
    rows = labelled.rows_by(groups)
    splits = {
        name: [row for folder in inside for row in rows.get(folder, ())]
        for name, inside in folders.items()
    }
    labels, classes = None, []
    if request.needs_label:
        labels = list(map(os.path.basename, groups))
        naming = itertools.chain(*labelled.naming_splits(folders))
        classes = labelled.in_order(map(os.path.basename, naming))
        if len(classes) < 2:
            raise UserError(f"{where}: only one class, {classes[0]!r}; expected {LAYOUT}.")
    is_drawn = request.needs_label and "/" not in next(iter(folders.values()))[0]
    paths = np.array(list(itertools.chain(*files.values())), np.bytes_)
    source = FolderSource(paths, {}, root, drawn=is_drawn)
    return Listing(where, source, splits, labels, classes=classes, groups=groups).open(split)


def _subfolders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith((".", "__")))


def split_folders(root: str, needs_label: bool = True, split: str = "") -> dict[str, list[str]]:
    """Class folders, relative to root, per split; UserError for any other layout.

    Folders are splits if `train` or one of `HELD_OUT` contains folders, or if those that the
    expression `split` names do and none has images of its own; otherwise they are classes.
    """
    try:
        top = _subfolders(root)
        splits = {
            name: [f"{name}/{folder}" for folder in _subfolders(f"{root}/{name}")] for name in top
        }
    except OSError as error:
        raise UserError(f"dataset.name={root!r}: {error.strerror}; expected {LAYOUT}.") from None
    if not needs_label:
        return {name: folders or [name] for name, folders in splits.items()} or {"train": ["."]}
    known = {"train", *HELD_OUT}
    asked = {*split_names(split)} if split else {"/"}  # no folder's name
    inside = itertools.chain.from_iterable(os.listdir(f"{root}/{name}") for name in top)
    are_splits = any(splits[name] for name in known.intersection(top))
    are_splits = are_splits or (asked <= {*top} and not any(map(_is_image, inside)))
    if are_splits and any(splits.values()):
        return {name: folders for name, folders in splits.items() if folders}
    if set(top) - known:
        return {"train": top, "test": top}
    raise UserError(f"dataset.name={root!r}: no class folders; expected {LAYOUT} in it.")


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def find_below(folder: str) -> tuple[list[str], collections.Counter[str]]:
    """Images in a folder and below, relative to it, following links; and counts of other files."""
    images: list[str] = []
    others: collections.Counter[str] = collections.Counter()
    waiting, seen = [""], set()
    while waiting:
        inside = waiting.pop()
        here = os.path.join(folder, inside)
        if (real := os.path.realpath(here)) in seen:  # a link to a parent folder
            continue
        seen.add(real)
        with os.scandir(here) as entries:
            for entry in entries:
                is_folder = entry.is_dir()
                if entry.name.startswith("." if not is_folder else (".", "__")):
                    continue
                if is_folder:
                    waiting.append(os.path.join(inside, entry.name))
                elif _is_image(entry.name) and entry.is_file():
                    images.append(os.path.join(inside, entry.name))
                else:
                    others[os.path.splitext(entry.name)[1] or entry.name] += 1
    return images, others


def warn_unused(where: str, others: Mapping[str, int]) -> None:
    """Warns of files that are not used, by extension."""
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items())[:5])
        unread = any(kind.lower() in HEIC for kind in others if kind.lower() not in EXTENSIONS)
        hint = f"; {HEIC[0]} is read with pip install -e '.[heic]'" if unread else ""
        logging.getLogger(__name__).warning("%s: not used: %s%s", where, kinds, hint)


def _list_files(root: str, folders: Iterable[str]) -> dict[str, list[bytes]]:
    """Images of each folder, relative to root; UserError for a folder without any."""
    files: dict[str, list[bytes]] = {}
    ignored: collections.Counter[str] = collections.Counter()
    for folder in folders:
        images, others = find_below(f"{root}/{folder}")
        ignored.update(others)
        if not images:
            warn_unused(root, ignored)
            none = f"no images in {folder!r} or below (but {others.total()} other files)"
            raise UserError(f"dataset.name={root!r}: {none}; supported: {', '.join(EXTENSIONS)}.")
        prefix = f"{folder}/".removeprefix("./")
        files[folder] = [os.fsencode(prefix + name) for name in images]
    warn_unused(root, ignored)
    return files
