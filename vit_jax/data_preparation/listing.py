"""What a prepared set will hold, and where each image lies now: byte ranges of files.

A listing is small beside the images (about 50 bytes for each) and is kept on disk, so that worker
processes map it instead of receiving it, and an interrupted preparation goes on without listing
its source again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.manifest import sync

_AT_ONCE = 1_000_000  # names as Python objects


@dataclasses.dataclass(frozen=True)
class Listing:
    """The examples of a set, split by split, in the order in which they will be stored.

    Attributes:
      class_names: one per class, in the order of the labels.
      files: paths of the files that hold the images, bytes [F].
      splits: name to rows [N], see `make_rows`.
    """

    class_names: tuple[str, ...]
    files: np.ndarray
    splits: dict[str, np.ndarray]

    def save(self, folder: Path) -> None:
        """Writes `folder`, safe on disk at the end."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "files.npy", self.files)
        for name, rows in self.splits.items():
            np.save(folder / f"rows_{name}.npy", rows)
        content = {"class_names": self.class_names, "splits": list(self.splits)}
        (folder / "listing.json").write_text(json.dumps(content), encoding="utf-8")
        for path in (*folder.iterdir(), folder):
            sync(path)

    @classmethod
    def load(cls, folder: Path) -> Listing:
        """Maps what `save` wrote; reads no row before it is asked for."""
        content = json.loads((folder / "listing.json").read_text(encoding="utf-8"))
        return cls(
            tuple(content["class_names"]),
            np.load(folder / "files.npy", mmap_mode="r"),
            {
                name: np.load(folder / f"rows_{name}.npy", mmap_mode="r")
                for name in content["splits"]
            },
        )


def make_rows(
    file: Sequence[int] | np.ndarray,
    offset: Sequence[int] | np.ndarray,
    size: Sequence[int] | np.ndarray,
    label: Sequence[int] | np.ndarray,
    name: Sequence[bytes] | np.ndarray,
) -> np.ndarray:
    """One row per image: number of its file, first byte, bytes, class, its own name; all [N]."""
    names = np.asarray(name, np.bytes_)
    dtype = [("file", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i4")]
    rows = np.empty(len(names), [*dtype, ("name", names.dtype)])
    columns = (file, offset, size, label, names)
    for key, column in zip(rows.dtype.names or (), columns, strict=True):
        rows[key] = column
    return rows  # [N]


def join_rows(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Files [F] and rows [N] of several such pairs, each of which numbers its files from 0."""
    counts = [len(files) for files, _ in parts]
    first = np.repeat(np.cumsum([0, *counts[:-1]]), [len(rows) for _, rows in parts])

    def column(key: str) -> np.ndarray:
        return np.concatenate([rows[key] for _, rows in parts])

    rows = make_rows(
        column("file") + first, column("offset"), column("size"), column("label"), column("name")
    )
    return np.concatenate([files for files, _ in parts]), rows


def in_tfds_order(rows: np.ndarray, split: str, files: np.ndarray) -> np.ndarray:
    """The rows [N] in the order that TFDS gives a split whose keys are the images' names.

    That is by the MD5 of split and key: `train[99%:]` holds the same images as in a set that TFDS
    has prepared itself, and any slice is a random sample of the classes.

    Raises:
      UserError: two images have the same name; the message tells in which of the `files` [F].
    """
    salted = hashlib.md5(split.encode())
    digests = bytearray()
    for start in range(0, len(rows), _AT_ONCE):
        for name in rows["name"][start : start + _AT_ONCE].tolist():
            digest = salted.copy()
            digest.update(name)
            digests += digest.digest()
    keys = np.frombuffer(digests, ">u8").reshape(-1, 2)  # [N, 2]
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    same = np.flatnonzero((keys[order[1:]] == keys[order[:-1]]).all(axis=1))
    if len(same):
        twins = rows[order[same[0] : same[0] + 2]]
        name = os.fsdecode(bytes(twins["name"][0]))
        places = sorted({os.fsdecode(bytes(files[number])) for number in twins["file"]})
        raise UserError(
            f"two images of split {split!r} are called {name!r}, in {' and '.join(places)}; remove "
            "one of them."
        )
    return rows[order]


def fingerprint(files: Sequence[str | bytes], root: str) -> str:
    """Hash over path relative to `root`, size and time of change of every file of a source.

    The order of the files does not matter: that in which folders are read differs by machine.

    Raises:
      UserError: a file cannot be looked at, as a link to nowhere.
    """
    digest = hashlib.sha256()
    prefix = os.fsencode(root)
    for path in sorted(map(os.fsencode, files)):
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{os.fsdecode(path)}: {error.strerror}.") from None
        line = f" {status.st_size} {status.st_mtime_ns}\n"
        digest.update(os.path.relpath(path, prefix) + line.encode())
    return digest.hexdigest()
