"""WebDataset tars with random access: `KEY.jpg` and `KEY.cls`, or "label" in `KEY.json`.

`dataset.name` is a .tar, a pattern such as `/data/{train,val}-{000..099}.tar`, or a folder with
tars in it or in its direct subfolders. The split of a tar is the one in its name, or that of its
folder, else `train`. A class is a number or a name. A column read by ops is the member
`KEY.COLUMN`, or a key of `KEY.json`. `KEY.depth.png` is no image: its key ends at the first dot.

The headers of a tar are read once: the offsets of its members are cached.
The layout is that of github.com/webdataset/webdataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import logging
import os
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from vit_jax.data.folder import EXTENSIONS, subfolders
from vit_jax.data.labelled import LabelledSource, Listing, rows_by
from vit_jax.data.sources import SPLIT_WORDS, Request, map_threads, split_word
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import cache_dir, write_arrays
from vit_jax.wording import counted, list_names

_KEY = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # and the extension, from the first dot on
_PLACE = [("tar", np.int32), ("name", object), ("offset", np.int64), ("size", np.int64)]
Index = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class TarSource(LabelledSource):
    """Images inside tars: `places` are rows of _PLACE, and so are columns of text."""

    tars: tuple[str, ...]

    def read(self, index: int) -> bytes:
        return self._content(self.places[index])

    def _content(self, place: Any) -> bytes:
        with open(self.tars[place["tar"]], "rb") as file:
            file.seek(place["offset"])
            content = file.read(place["size"])
        if len(content) < place["size"]:
            raise ValueError("the tar is truncated inside it")
        return content

    def column(self, name: str, index: int) -> Any:
        value = self.columns[name][index]
        if not isinstance(value, np.void):  # a label
            return value
        content = self._content(value)
        if not value["name"].lower().endswith(".json"):
            return content.decode()
        fields = json.loads(content)
        if not isinstance(fields, dict) or name not in fields:
            raise ValueError(f"{value['name']} has no {name!r}")
        return str(fields[name])

    def describe(self, index: int) -> str:
        place = self.places[index]
        return f"{self.tars[place['tar']]}: {place['name']}"

    def identity(self) -> Iterable[str]:
        """Tar, name, size and label of every image, in order."""
        names = list(map(os.path.basename, self.tars))
        labels = self.columns.get("label", np.zeros(len(self), np.int32))
        for (tar, name, _, size), label in zip(self.places.tolist(), labels, strict=True):
            yield f"{names[tar]} {name} {size} {label}"


def find_tars(name: str) -> list[str]:
    """The tars that `dataset.name` refers to, sorted; empty if it is something else."""
    path = os.path.abspath(os.path.expanduser(name))
    if path.lower().endswith(".tar"):
        return list(map("".join, product(*map(_choices, re.split(r"(\{[^{}]*\})", path)))))
    if not os.path.isdir(path):
        return []
    below = [os.path.join(path, name) for name in subfolders(path)]
    tars: list[str] = []
    for folder in below or [path]:
        names = sorted(glob.glob("*.tar", root_dir=folder))
        if not names or (below and subfolders(folder)):
            return []
        tars += [os.path.join(folder, tar) for tar in names]
    return tars


def _choices(part: str) -> list[str]:
    """Expands `{000..099}` or `{train,val}`; other text is returned as it is."""
    if bounds := re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part):
        first, last = bounds.groups()
        return [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return part[1:-1].split(",") if part.startswith("{") and part.endswith("}") else [part]


def _splits_of(where: str, tars: list[str]) -> list[str]:
    """The split in the name of each tar, or of its folder; else `train`, which may be a warning."""
    root = os.path.commonpath(map(os.path.dirname, tars))
    splits = {}
    for tar in tars:
        folder, file = os.path.split(tar)
        word = split_word(file.removesuffix(".tar")) or split_word(os.path.relpath(folder, root))
        splits[tar] = word or SPLIT_WORDS.get(os.path.basename(folder).lower(), "")
    if any(splits.values()) and (others := [tar for tar, split in splits.items() if not split]):
        logging.warning(f"{where}: no split in the name of {list_names(others)}: used as 'train'.")
    return [split or "train" for split in splits.values()]


def open_tars(request: Request) -> tuple[TarSource, tuple[str, ...]]:
    """Returns source and class names of the images in tars.

    UserError if a tar cannot be read, a sample has several images or none of the form KEY.jpg,
    images lack a label or a column, and see `Listing.open`.
    """
    where, tars = f"dataset.name={request.path!r}", find_tars(request.path)
    indices = map_threads(functools.partial(_index, where), tars, chunk=1)
    known = _splits_of(where, tars)
    samples = [
        (known[number], *sample)
        for number, (tar, index) in enumerate(zip(tars, indices, strict=True))
        for sample in _samples(tar, number, index, request.columns)
    ]
    if not samples:
        raise UserError(f"{where}: no images in {counted(len(tars), 'tar')} ({list_names(tars)}).")
    splits, images, labels, *texts = map(list, zip(*samples, strict=True))
    needed = [("label", "KEY.cls", labels)] if request.needs_label else []
    needed += [(name, f"KEY.{name}", t) for name, t in zip(request.columns, texts, strict=True)]
    for key, member, values in needed:
        if missing := [row for row, value in enumerate(values) if not value]:
            lack = f"{counted(len(missing), 'image')} without {member} or {key!r} in KEY.json"
            raise UserError(f"{where}: {lack}, first {images[missing[0]][1]}.")
    columns = zip(request.columns, (np.array(places, _PLACE) for places in texts), strict=True)
    source = TarSource(np.array(images, _PLACE), dict(columns), tuple(tars))
    rows, wanted = rows_by(splits, known), labels if request.needs_label else None
    return Listing(where, source, rows, wanted).open(request.split)


def _samples(path: str, tar: int, index: Index, columns: Iterable[str]) -> Iterator[Any]:
    """Of each image of a tar its place, the text of its label and places of columns."""
    samples: dict[str, dict[str, tuple[Any, bytes]]] = {}
    names = map(os.fsdecode, index["name"].tolist())
    numbers = (index[key].tolist() for key in ("offset", "size", "label"))
    for name, offset, size, label in zip(names, *numbers, strict=True):
        if match := _KEY.fullmatch(name):
            sample = samples.setdefault(match[1], {})
            sample[match[2].lower()] = (tar, name, offset, size), label
    without = []
    for key, sample in samples.items():
        images = [place for end, (place, _) in sample.items() if f".{end}" in EXTENSIONS]
        alike = [f"{key}.{end}" for end in sample if f".{end}".endswith(EXTENSIONS)]
        if len(images) > 1 or (alike and not images):
            means = f"{list_names(alike)} in one sample, {key!r}, as a key ends at the first dot"
            raise UserError(f"{path}: {means}; call its image KEY.jpg, and others KEY.other.png.")
        if images:
            about = sample.get("json", (None, b""))
            label = sample.get("cls", about)[1].decode(errors="replace")
            places = (sample.get(name, about)[0] for name in columns)
            yield images[0], label, *places
        else:
            without.append(key)
    if without and len(without) < len(samples):
        logging.warning(
            f"{path}: no image in {len(without):,} of its samples: {list_names(without)}."
        )


def _index(where: str, tar: str) -> Index:
    """Index of a tar's members: `name`, `offset`, `size` and `label`, [M] each, from the cache."""
    try:
        stat = os.stat(tar)
        identity = f"{tar} {stat.st_size} {stat.st_mtime_ns}"
        digest = hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
        cached = cache_dir() / "tars" / f"{digest}.npz"
        damage = (OSError, ValueError, EOFError, zipfile.BadZipFile)
        with contextlib.suppress(*damage), np.load(cached) as arrays:
            return dict(arrays)
        index = _scan(tar)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{where}: {tar} cannot be read: {one_line(error)}.") from error
    with contextlib.suppress(OSError):  # without a cache it is read again
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(cached, index)
    return index


def _scan(tar: str) -> Index:
    rows: list[tuple[bytes, int, int, bytes]] = []
    with tarfile.open(tar, "r:") as archive:
        for member in archive:
            end = member.name.rpartition(".")[2].lower()
            if (content := archive.extractfile(member)) is None:  # a folder or a device
                continue
            label = _label(end, content.read()) if end in ("cls", "json") else b""
            rows.append((os.fsencode(member.name), member.offset_data, member.size, label))
    kinds = {"name": np.bytes_, "offset": np.int64, "size": np.int64, "label": np.bytes_}
    columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
    return {key: np.array(column, kinds[key]) for key, column in zip(kinds, columns, strict=True)}


def _label(end: str, content: bytes) -> bytes:
    """The text of the class in a member, or nothing."""
    if end == "cls":
        return content.strip()
    with contextlib.suppress(ValueError, AttributeError):
        value = json.loads(content).get("label", "")
        return str(value).encode() if isinstance(value, str | int) else b""
    return b""
