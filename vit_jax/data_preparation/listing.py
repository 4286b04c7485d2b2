"""What a prepared set will contain, and where each image is now: byte ranges of files and tars."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vit_jax.data.folder import EXTENSIONS
from vit_jax.errors import UserError

FilesAndRows = tuple[np.ndarray, np.ndarray]  # paths, bytes [F]; rows [N], see make_rows


class Listing(NamedTuple):
    """The examples of a dataset, by split, in the order in which they will be stored."""

    class_names: Sequence[str]
    files: np.ndarray  # that contain the images: paths, bytes [F]
    splits: dict[str, np.ndarray]  # name to rows [N], see `make_rows`


class Place(NamedTuple):
    """Location of images: a folder, a tar, or `size` bytes of a tar of tars."""

    name: str  # WordNet id of their class
    path: str
    start: int = 0
    size: int | None = None


def make_rows(names: Sequence[bytes], **columns: ArrayLike) -> np.ndarray:
    """One row per image [N]: its name, number of its file, first byte in it, bytes, class."""
    text = np.array(names, np.bytes_)
    numbers = [("file", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i4")]
    rows = np.zeros(len(text), [*numbers, ("name", text.dtype)])
    for key, values in {**columns, "name": text}.items():
        rows[key] = values
    return rows  # [N]


def join(parts: Sequence[FilesAndRows]) -> FilesAndRows:
    """Concatenates files [F] and rows [N] of several pairs, each numbering its files from 0."""
    counts = [len(files) for files, _ in parts]
    first = np.repeat(np.cumsum([0, *counts[:-1]]), [len(rows) for _, rows in parts])
    rows = np.concatenate([rows for _, rows in parts])
    rows["file"] += first.astype(np.int32)
    return np.concatenate([files for files, _ in parts]), rows


def list_splits(class_names: Sequence[str], splits: dict[str, FilesAndRows]) -> Listing:
    files, rows = join(list(splits.values()))
    ends = np.cumsum([len(part) for _, part in splits.values()])
    return Listing(class_names, files, dict(zip(splits, np.split(rows, ends[:-1]), strict=True)))


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def fingerprint(source: str, parts: Sequence[str]) -> str:
    """Hash of relative path, size and modification time of the files in `parts` of a source."""
    digest = hashlib.sha256()
    root = os.fsencode(source if os.path.isdir(source) else os.path.dirname(source))
    paths = [os.fsencode(part) for part in parts if os.path.isfile(part)]
    for part in parts:
        for folder, _, names in os.walk(os.fsencode(part), followlinks=True):
            # A log written beside them does not count.
            used = (each for each in names if each.endswith(b".tar") or is_image(os.fsdecode(each)))
            paths += [os.path.join(folder, name) for name in used]
    for path in sorted(paths):
        status = os.stat(path)
        line = f" {status.st_size} {status.st_mtime_ns}\n"
        digest.update(os.path.relpath(path, root) + line.encode())
    return digest.hexdigest()


def list_tar(place: Place, wanted: Callable[[str], object]) -> list[tarfile.TarInfo]:
    """The members of an uncompressed tar that are `wanted` by name; reads only headers.

    UserError if it is not a tar or is truncated.
    """
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
