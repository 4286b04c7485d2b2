"""Image folders as a source: `root/{train,test,...}/class_name/*.jpg` and similar.

Without split folders, `root/class_name/*.jpg`, a fifth of each class is `test`: the files whose
path hash is low, the same on any machine. So a file keeps its split when others are added; only
if a class would be off by more than one file (of 100: three) do the next in order switch split.
Images may be nested in any number of folders below their class.

The files of a class are shuffled by a hash of their relative path, the k-th of n gets rank
k / (n - 1), and all files are sorted by rank, ties by hash: every prefix and suffix at least as
long as the number of classes contains every class that has two files.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.check_images import usable_images
from vit_jax.data.sources import Source, check_classes, in_order, map_threads, select
from vit_jax.errors import UserError

_EXTENSIONS = ".jpg .jpeg .jpe .jp2 .png .webp .gif .avif .bmp .dib .tif .tiff .pbm .pgm .ppm .pnm"
HEIC = (".heic", ".heif")  # need the extra `heic`
# What OpenCV decodes, and Pillow with that extra.
EXTENSIONS = tuple(f"{_EXTENSIONS} .ras .sr".split()) + (HEIC if find_spec("pillow_heif") else ())
LAYOUT = "CLASS_NAME/IMAGE.jpg or train/CLASS_NAME/IMAGE.jpg"
# If one of these is requested and only another exists, that one is used.
HELD_OUT = ("test", "validation", "val", "valid", "dev")
TEST_SHARE = 0.2  # of a folder without splits

Files = list[tuple[bytes, int]]  # of one class: paths, each with a number


@dataclasses.dataclass(frozen=True, eq=False)
class FolderSource(Source):
    """Encoded image files and per-file columns."""

    root: str
    files: np.ndarray  # relative paths, bytes [N]: compact to send to worker processes
    columns: Mapping[str, np.ndarray]  # [N, ...] each; with classes also `label`, int32 [N]
    drawn: bool = False  # no split folders; see above

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = Path(self.describe(index)).read_bytes()
        return {"image": image, **{key: each[index] for key, each in self.columns.items()}}

    def describe(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(bytes(self.files[index])))

    def paths(self) -> list[str]:
        return list(map(self.describe, range(len(self))))

    def relative_paths(self) -> list[str]:
        return [os.fsdecode(path) for path in self.files.tolist()]

    def identity(self) -> Iterable[str]:
        """Relative path and size of every file, in order."""
        sizes = map_threads(os.path.getsize, self.paths())
        return map("{} {}".format, self.relative_paths(), sizes)

    def check(self, on_bad_image: str) -> FolderSource:
        """Decodes every file, see `usable_images`."""
        kept = usable_images(
            len(self), lambda n: Path(self.describe(n)).read_bytes(), self.describe, on_bad_image
        )
        columns = {key: each[kept] for key, each in self.columns.items()}
        return dataclasses.replace(self, files=self.files[kept], columns=columns)


def open_folder(
    root: str, split: str, *, needs_label: bool = True
) -> tuple[FolderSource, tuple[str, ...]]:
    """Lists, without opening, the files of a split expression; returns source and class names.

    The classes are those of `train` (else of all splits), sorted. If no label is needed there are
    no classes and no class names; splits then need no class folders, and images directly in `root`
    are `train`. UserError for any other layout, a single class, a class without images, or a class
    of this split that is not in `train`.
    """
    root = os.path.abspath(os.path.expanduser(root))
    splits = split_folders(root, needs_label, split)
    drawn = needs_label and not any("/" in each for folders in splits.values() for each in folders)
    split = known_split(root, split, splits)
    classes: list[str] = []
    if needs_label:
        naming = [splits["train"]] if "train" in splits else splits.values()
        classes = in_order(os.path.basename(each) for folders in naming for each in folders)
        if len(classes) < 2:
            found = f"dataset.name={root!r}: only one class, {classes[0]!r}"
            raise UserError(f"{found}; a classifier needs at least two (expected {LAYOUT}).")
    numbers = {name: number for number, name in enumerate(classes)}

    def rows(name: str) -> np.ndarray:
        unknown = sorted(set(map(os.path.basename, splits[name])) - numbers.keys())
        if needs_label and unknown:
            where = f"dataset.name={root!r}: class {unknown[0]!r} of split {name!r}"
            raise UserError(f"{where} is not a class of 'train' ({len(unknown)} such).")
        return order_files(_list_files(root, splits[name], numbers), name if drawn else "")

    files = select(split, splits, rows)
    check_classes(f"dataset.name={root!r}", classes, len(files) if split == "train" else 0)
    columns = {"label": files["number"]} if needs_label else {}
    return FolderSource(root, files["path"], columns, drawn), tuple(classes)


def known_split(root: str, split: str, splits: Mapping[str, Any]) -> str:
    """The split expression, with the folder's own name for the held-out split."""
    there = next((name for name in HELD_OUT if name in splits), None)
    terms = split.split("+")
    for i, term in enumerate(terms):
        name = term.partition("[")[0].strip()
        if name in HELD_OUT and name not in splits and there:
            terms[i] = term.replace(name, there, 1)
            logging.getLogger(__name__).info("%s has no split %r: using %r.", root, name, there)
    return "+".join(terms)


def _subfolders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith((".", "__")))


def split_folders(root: str, needs_label: bool = True, split: str = "") -> dict[str, list[str]]:
    """Class folders, relative to root, per split; UserError for any other layout.

    Split folders are `train` or those of `HELD_OUT` that contain folders, else the ones named in
    the expression `split` if no folder has images of its own; otherwise folders are classes.
    """
    try:
        top = _subfolders(root)
        splits = {
            name: [f"{name}/{each}" for each in _subfolders(f"{root}/{name}")] for name in top
        }
    except OSError as error:
        raise UserError(f"dataset.name={root!r}: {error.strerror}; expected {LAYOUT}.") from None
    if not needs_label:
        return {name: folders or [name] for name, folders in splits.items()} or {"train": ["."]}
    known = {"train", *HELD_OUT}
    named = {term.partition("[")[0].strip() for term in split.split("+") if split}
    own = any(_has_images(f"{root}/{name}") for name in top)
    are_splits = any(splits[name] for name in known & set(top)) or (not own and named <= set(top))
    found = {name: folders for name, folders in splits.items() if folders}
    if are_splits and found:
        return found
    if set(top) - known:
        return {"train": top, "test": top}
    raise UserError(f"dataset.name={root!r}: no class folders; expected {LAYOUT} in it.")


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file with the extension of an image."""
    name = entry.name.lower()
    return name.endswith(EXTENSIONS) and not name.startswith(".") and entry.is_file()


def _has_images(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(map(_is_image, entries))


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
                elif _is_image(entry):
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


def _list_files(root: str, folders: Sequence[str], numbers: Mapping[str, int]) -> list[Files]:
    """Images of each folder, relative to root, with the number of its class (0 without classes)."""
    groups: list[Files] = []
    ignored: collections.Counter[str] = collections.Counter()
    for folder in folders:
        images, others = find_below(f"{root}/{folder}")
        ignored.update(others)
        if not images:
            warn_unused(root, ignored)
            found = f"no images in {folder!r} or below (but {others.total()} other files)"
            raise UserError(f"dataset.name={root!r}: {found}; supported: {', '.join(EXTENSIONS)}.")
        label = numbers.get(os.path.basename(folder), 0)
        prefix = f"{folder}/".removeprefix("./")
        groups.append([(os.fsencode(prefix + name), label) for name in images])
    warn_unused(root, ignored)
    return groups


def order_files(groups: Iterable[Files], part: str = "") -> np.ndarray:
    """Rows [N] of `path` and `number` of the files of all classes, or of a `part`, in our order."""
    rows: list[tuple[float, bytes, bytes, int]] = []
    for files in groups:
        hashed = sorted((hashlib.blake2b(file[0], digest_size=8).digest(), *file) for file in files)
        if part:
            low = bytes([int(256 * TEST_SHARE)])
            share, slack = len(hashed) * TEST_SHARE, 1 + len(hashed) // 50
            drawn = sum(digest < low for digest, _, _ in hashed)
            count = round(min(max(drawn, share - slack), share + slack))
            count = min(max(count, 1), len(hashed) - 1)  # both get one, if there are two
            hashed = hashed[:count] if part == "test" else hashed[count:]
        last = max(len(hashed) - 1, 1)
        rows += [(k / last, *file) for k, file in enumerate(hashed)]
    longest = max((len(path) for _, _, path, _ in rows), default=1)
    columns = [("path", f"S{longest}"), ("number", np.int32)]
    return np.array([row[2:] for row in sorted(rows)], columns)
