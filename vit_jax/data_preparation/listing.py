"""What a prepared set will hold, and where each image lies now: byte ranges of files, also of tars.

A listing is small beside the images (about 50 bytes for each). It is kept on disk, so that an
interrupted preparation need not list its source again.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vit_jax.data.folder import EXTENSIONS
from vit_jax.errors import UserError
from vit_jax.files.paths import replacing

FilesAndRows = tuple[np.ndarray, np.ndarray]  # paths, bytes [F]; rows [N], see make_rows


class Listing(NamedTuple):
    """The examples of a set, split by split, in the order in which they will be stored."""

    class_names: Sequence[str]
    files: np.ndarray  # that hold the images: paths, bytes [F]
    splits: dict[str, np.ndarray]  # name to rows [N], see `make_rows`

    def save(self, path: Path) -> None:
        """Writes one file, whole or not at all."""
        arrays: dict[str, Any] = {f"split {name}": rows for name, rows in self.splits.items()}
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, class_names=np.array(self.class_names, str), files=self.files, **arrays)

    @classmethod
    def load(cls, path: Path) -> Listing:
        with np.load(path) as content:
            arrays = dict(content)
        class_names, files = arrays.pop("class_names").tolist(), arrays.pop("files")
        splits = {name.removeprefix("split "): rows for name, rows in arrays.items()}
        return cls(class_names, files, splits)


def make_rows(
    names: Sequence[bytes],
    size: ArrayLike,
    *,
    file: ArrayLike = 0,
    offset: ArrayLike = 0,
    label: ArrayLike = 0,
) -> np.ndarray:
    """One row per image [N]: its own name, bytes, number of its file, first byte there, class."""
    text = np.array(names, np.bytes_)
    columns = {"file": "<i4", "offset": "<i8", "size": "<i8", "label": "<i4", "name": text.dtype}
    rows = np.empty(len(text), list(columns.items()))
    rows["file"], rows["offset"], rows["size"], rows["label"] = file, offset, size, label
    rows["name"] = text
    return rows  # [N]


def join(parts: Sequence[FilesAndRows]) -> FilesAndRows:
    """Files [F] and rows [N] of several such pairs, each of which numbers its files from 0."""
    counts = [len(files) for files, _ in parts]
    first = np.repeat(np.cumsum([0, *counts[:-1]]), [len(rows) for _, rows in parts])
    rows = np.concatenate([rows for _, rows in parts])
    rows["file"] += first.astype(np.int32)
    return np.concatenate([files for files, _ in parts]), rows


def in_tfds_order(rows: np.ndarray, split: str, files: np.ndarray) -> np.ndarray:
    """The rows [N] in the order that TFDS gives a split whose keys are the images' names.

    That is by the MD5 of split and key: `train[99%:]` holds the same images as in a set that TFDS
    has prepared itself, and any slice is a random sample of the classes. UserError where two
    images have the same name.
    """
    salt = split.encode()
    digests = (hashlib.md5(salt + name).digest() for name in rows["name"])
    keys = np.fromiter(digests, "S16", len(rows))
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    if len(same):
        twins = rows[order[same[0] : same[0] + 2]]
        places = sorted({os.fsdecode(bytes(files[number])) for number in twins["file"]})
        raise UserError(
            f"two images of split {split!r} are called {os.fsdecode(bytes(twins['name'][0]))!r}, "
            f"in {' and '.join(places)}; remove one of them."
        )
    return rows[order]


def fingerprint(source: str, parts: Sequence[str]) -> str:
    """Hash over relative path, size and time of change of the files in `parts` of a source."""
    digest = hashlib.sha256()
    root = os.fsencode(source if os.path.isdir(source) else os.path.dirname(source))
    for path in sorted(path for part in parts for path in _files(os.fsencode(part))):
        status = os.stat(path)
        line = f" {status.st_size} {status.st_mtime_ns}\n"
        digest.update(os.path.relpath(path, root) + line.encode())
    return digest.hexdigest()


def _files(path: bytes) -> Iterator[bytes]:
    """The images and tars below a folder; a log that is written beside them is no change."""
    endings = (".tar", *EXTENSIONS)
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        for name in names:
            if not name.startswith(b".") and os.fsdecode(name).lower().endswith(endings):
                yield os.path.join(folder, name)


def is_image(name: str) -> bool:
    """Whether a file is called as images are."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def list_tar(
    path: str,
    wanted: Callable[[str], object],
    start: int = 0,
    size: int | None = None,
    *,
    name: str = "",
) -> list[tarfile.TarInfo]:
    """The members, by name, that are `wanted` of an uncompressed tar; reads headers only.

    The tar is `path`, or `size` bytes from `start` on, an inner tar that errors call `name`.

    Raises:
      UserError: it is no tar, ends too early, or a wanted member does not lie in it as it is (a
        link, a sparse file).
    """
    where = f"{path}: {name}" if name else path
    end = os.path.getsize(path) if size is None else start + size
    with open(path, "rb") as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                infos = [info for info in tar if wanted(os.path.basename(info.name))]
                last = tar.offset
        except tarfile.TarError as error:
            reason = "truncated" if "unexpected end" in str(error) else f"not a tar ({error})"
            raise UserError(f"{where}: {reason}; copy it again.") from None
        # tarfile ends in silence where a header is damaged, and an inner tar must not run on.
        file.seek(last)
        if last + 512 > end or file.read(512) != bytes(512):
            raise UserError(f"{where}: truncated or damaged at byte {last}; copy it again.")
    if odd := [info.name for info in infos if not info.isreg() or info.issparse()]:
        raise UserError(
            f"{where}: {odd[0]!r} is a link or sparse; pack it again with tar --dereference "
            "--hard-dereference, without --sparse."
        )
    return infos
