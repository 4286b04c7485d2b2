"""Image folders: `root/{train,test,...}/class_name/*.jpg` and similar.

Without split folders, a fifth of each class is `test`. Images may be nested in any number of
folders below their class. For their order see `labelled.py`.
"""

import collections
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from vit_jax.data import labelled, sources
from vit_jax.data.labelled import LabelledSource, Listing
from vit_jax.data.sources import Request, map_threads, split_names, split_word
from vit_jax.errors import UserError
from vit_jax.files.paths import read_file
from vit_jax.wording import counted, list_names

_EXTENSIONS = ".jpg .jpeg .jpe .jp2 .png .webp .gif .avif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm"
# What follows the name of a photo in that of its mask, `1.mask.png` or `1_mask.png`.
_ADDED = re.compile(r"(\.[^/.]+|[ ._-](mask|seg|depth|label|thumb)[^/]*)$", re.IGNORECASE)
HEIC = (".heic", ".heif")  # need the extra `heic`
# What OpenCV decodes, and Pillow with that extra.
EXTENSIONS = tuple(f"{_EXTENSIONS} .ras .sr".split()) + (HEIC if find_spec("pillow_heif") else ())
LAYOUT = "CLASS_NAME/IMAGE.jpg or train/CLASS_NAME/IMAGE.jpg"
_FILES = "a .csv, .tsv or .parquet file with the columns path and label, or a .tar"
_OTHERS = "unpack what is compressed; arrays are passed in Python (docs/data.md)"


@dataclasses.dataclass(frozen=True, eq=False)
class FolderSource(LabelledSource):
    """Image files below a folder: `places` are relative paths, bytes [N]."""

    root: str
    keeps_order: ClassVar[bool] = False

    def read(self, index: int) -> bytes:
        return read_file(self.describe(index))

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
    no classes; splits then need no class folders, and without splits all images are `train`.
    UserError for any other layout, a class without images, and see `Listing.open`.
    """
    root = os.path.abspath(request.path)
    where = f"dataset.name={root!r}"
    folders = split_folders(root, request.needs_label, request.split)
    written = sources.named_splits(folders)
    split = sources.known_split(where, request.split, written)
    folders = {name: folders[folder] for name, folder in written.items()}
    wanted = folders if "all" in split_names(split) else split_names(split)
    listed = list(dict.fromkeys(folder for name in wanted for folder in folders.get(name, ())))
    files = _list_files(root, listed)
    _warn_of_strays(root, folders, listed)
    groups = [folder for folder, paths in files.items() for _ in paths]
    rows = labelled.rows_by(groups)
    splits = {
        name: [row for folder in inside for row in rows.get(folder, ())]
        for name, inside in folders.items()
    }
    labels, classes = None, []
    if request.needs_label:
        labels = list(map(os.path.basename, groups))
        naming = itertools.chain(*sources.naming_splits(folders))
        classes = labelled.in_order(map(os.path.basename, naming))
        if len(classes) < 2:
            raise UserError(f"{where}: only one class, {classes[0]!r}; expected {LAYOUT}.")
    is_drawn = request.needs_label and "/" not in next(iter(folders.values()))[0]
    paths = np.array(list(itertools.chain(*files.values())), np.bytes_)
    source = FolderSource(paths, {}, root, drawn=is_drawn)
    ids = source.file_ids() if is_drawn else ()
    listing = Listing(where, source, splits, labels, classes=classes, groups=groups, files=ids)
    return listing.open(split)


def subfolders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith((".", "__")))


def _folders_in(root: str, name: str) -> list[str]:
    """The folders in `root/name`, or in `root/seg_train/seg_train`, where an archive unpacked."""
    inside = subfolders(f"{root}/{name}")
    if len(inside) == 1 and "" != split_word(name) == split_word(inside[0]):
        name = f"{name}/{inside[0]}"
        inside = subfolders(f"{root}/{name}")
    return [f"{name}/{folder}" for folder in inside]


def split_folders(root: str, needs_label: bool = True, split: str = "") -> dict[str, list[str]]:
    """Class folders, relative to root, per split as written; UserError for any other layout.

    If no label is needed, folders that no split is named after, nor asked for, are one `train`.
    Folders that contain folders are splits if one is `train`, if their names say so, or if those
    that the expression `split` names do and none has images of its own; otherwise they are classes.
    """
    try:
        top = subfolders(root)
        splits = {name: _folders_in(root, name) for name in top}
    except OSError as error:
        kinds = f"{_FILES}; {_OTHERS}" if os.path.isfile(root) else LAYOUT
        raise UserError(f"dataset.name={root!r}: {error.strerror}; expected {kinds}.") from None
    asked = {*split_names(split)} if split else {"/"}  # no folder's name
    if not needs_label:
        if not any(map(split_word, top)) and not asked <= {*top}:
            return {"train": ["."]}
        return {name: folders or [name] for name, folders in splits.items()}
    full = {name: folders for name, folders in splits.items() if folders}
    inside = itertools.chain.from_iterable(os.listdir(f"{root}/{name}") for name in top)
    has_images = any(map(is_image, inside))
    has_train = any(sources.SPLIT_WORDS.get(name.lower()) == "train" for name in full)
    if full and (has_train or _are_splits(full) or (asked <= {*top} and not has_images)):
        return full
    names = [{*map(os.path.basename, inside)} for inside in splits.values()]
    if len(top) > 1 and not has_images and len(common := set.intersection(*names)) > 1:
        both = f"{list_names(map(repr, top))} all hold {list_names(map(repr, sorted(common)))}"
        way = f"name the splits train and test, or ask for dataset.split={top[0]!r}"
        way = "put the splits above the classes" if _are_splits(common) else way
        raise UserError(f"dataset.name={root!r}: {both}, which looks like splits; {way}.")
    if not _are_splits(top):
        return {"train": top, "test": top}
    below = itertools.chain(Path(root).glob("*.*"), Path(root).glob("*/*.*"))
    tables = sorted(str(path) for path in below if path.suffix in (".csv", ".parquet", ".jsonl"))
    hint = f", or the table {tables[0]} as dataset.name" if tables else ""
    raise UserError(f"dataset.name={root!r}: no class folders; expected {LAYOUT} in it{hint}.")


def _are_splits(names: Collection[str]) -> bool:
    """Whether all names mean splits, or at least half of them, and several splits."""
    words = list(filter(None, map(split_word, names)))
    return len(words) == len(names) or (2 * len(words) >= len(names) and len({*words}) > 1)


def _warn_of_strays(root: str, folders: Mapping[str, Sequence[str]], listed: list[str]) -> None:
    """Warns of images beside the class folders that are `listed`, and in no folder of a split."""
    used = {name.partition("/")[0] for inside in folders.values() for name in inside}
    if "." in used:  # with all below
        return
    beside = {".", *(os.path.dirname(name) or "." for name in listed)} - {*listed}
    counts = {name: sum(map(is_image, os.listdir(f"{root}/{name}"))) for name in beside}
    for name in {*subfolders(root)} - used:
        counts[name] = len(find_below(f"{root}/{name}")[0])
    if left := [f"{counted(n, 'image')} in {name!r}" for name, n in sorted(counts.items()) if n]:
        logging.warning(f"{root}: not used, as they are in no class folder: {list_names(left)}.")


def is_image(name: str, endings: tuple[str, ...] = EXTENSIONS) -> bool:
    return name.lower().endswith(endings) and not name.startswith(".")


def find_below(
    folder: str, endings: tuple[str, ...] = EXTENSIONS
) -> tuple[list[str], collections.Counter[str]]:
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
                elif is_image(entry.name, endings) and entry.is_file():
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
        logging.warning("%s: not used: %s%s", where, kinds, hint)


def _list_files(root: str, folders: Iterable[str]) -> dict[str, list[bytes]]:
    """Images of each folder, relative to root; UserError for a folder without any."""
    files: dict[str, list[bytes]] = {}
    ignored: collections.Counter[str] = collections.Counter()
    masks: list[str] = []
    for folder in folders:
        images, others = find_below(f"{root}/{folder}")
        ignored.update(others)
        if not images:
            warn_unused(root, ignored)
            none = f"no images in {folder!r} or below (but {others.total()} other files)"
            raise UserError(f"dataset.name={root!r}: {none}; supported: {', '.join(EXTENSIONS)}.")
        prefix = f"{folder}/".removeprefix("./")
        files[folder] = [os.fsencode(prefix + name) for name in images]
        stems = {os.path.splitext(name)[0] for name in images}
        masks += [prefix + s for s in stems if (photo := _ADDED.sub("", s)) != s and photo in stems]
    warn_unused(root, ignored)
    if masks:
        names = f"{counted(len(masks), 'image')} named like masks ({list_names(sorted(masks))})"
        logging.warning(f"{root}: {names} count as images of their class; move masks away.")
    return files
