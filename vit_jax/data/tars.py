"""WebDataset tars with random access: `KEY.jpg` and `KEY.cls`, or "label" in `KEY.json`.

`dataset.name` is a .tar, a pattern such as `/data/{train,val}-{000..099}.tar`, or a folder with
tars in it or in its direct subfolders. The split of a tar is the last word of its name that is
a split (`train`, or one of `folder.HELD_OUT`), or the name of its folder, else `train`. A class
is a number or a name. A column read by ops is the member `KEY.COLUMN`, or a key of `KEY.json`.

The headers of a tar are read once: the offsets of its members are cached. Images are in the
order of their tars, and decoded on first use. The layout is that of
github.com/webdataset/webdataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import logging
import os
import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vit_jax.data.check_images import usable_images
from vit_jax.data.folder import EXTENSIONS, HELD_OUT, known_split
from vit_jax.data.sources import Source, check_classes, map_threads, select
from vit_jax.data.table import number_labels
from vit_jax.errors import UserError, counted, list_names, one_line
from vit_jax.files.paths import cache_dir, write_arrays

_KEY = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # and the extension, from the first dot on
_PLACE = [("tar", np.int32), ("name", object), ("offset", np.int64), ("size", np.int64)]
Index = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class TarSource(Source):
    """Images inside tars."""

    tars: tuple[str, ...]
    images: np.ndarray  # rows of _PLACE [N]
    columns: Mapping[str, np.ndarray]  # with classes, `label`, int32 [N]
    texts: Mapping[str, np.ndarray]  # by column, rows of _PLACE [N]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        columns = {name: self._text(name, places[index]) for name, places in self.texts.items()}
        labels = {name: each[index] for name, each in self.columns.items()}
        return {"image": self._read(self.images[index]), **labels, **columns}

    def _read(self, place: Any) -> bytes:
        with open(self.tars[place["tar"]], "rb") as file:
            file.seek(place["offset"])
            content = file.read(place["size"])
        if len(content) < place["size"]:
            raise ValueError("the tar is truncated inside it")
        return content

    def _text(self, column: str, place: Any) -> str:
        content = self._read(place)
        if not place["name"].lower().endswith(".json"):
            return content.decode()
        fields = json.loads(content)
        if not isinstance(fields, dict) or column not in fields:
            raise ValueError(f"{place['name']} has no {column!r}")
        return str(fields[column])

    def describe(self, index: int) -> str:
        place = self.images[index]
        return f"{self.tars[place['tar']]}: {place['name']}"

    def check(self, on_bad_image: str) -> TarSource:
        """Decodes every image, see `usable_images`."""
        kept = usable_images(
            len(self), lambda n: self._read(self.images[n]), self.describe, on_bad_image
        )
        columns, texts = (
            {key: each[kept] for key, each in arrays.items()}
            for arrays in (self.columns, self.texts)
        )
        return TarSource(self.tars, self.images[kept], columns, texts)

    def identity(self) -> Iterable[str]:
        """Tar, name, size and label of every image, in order."""
        names = list(map(os.path.basename, self.tars))
        labels = self.columns.get("label", np.zeros(len(self), np.int32))
        for (tar, name, _, size), label in zip(self.images.tolist(), labels, strict=True):
            yield f"{names[tar]} {name} {size} {label}"


def find_tars(name: str) -> list[str]:
    """The tars that `dataset.name` refers to, sorted; empty if it is something else."""
    path = os.path.abspath(os.path.expanduser(name))
    if path.lower().endswith(".tar"):
        return list(map("".join, product(*map(_choices, re.split(r"(\{[^{}]*\})", path)))))
    if not os.path.isdir(path):
        return []
    below = _folders(path)
    tars: list[str] = []
    for folder in below or [path]:
        names = sorted(glob.glob("*.tar", root_dir=folder))
        if not names or (below and _folders(folder)):
            return []
        tars += [os.path.join(folder, each) for each in names]
    return tars


def _folders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(e.path for e in entries if e.is_dir() and not e.name.startswith("."))


def _choices(part: str) -> list[str]:
    """Expands `{000..099}` or `{train,val}`; other text is returned as it is."""
    if bounds := re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part):
        first, last = bounds.groups()
        return [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return part[1:-1].split(",") if part.startswith("{") and part.endswith("}") else [part]


def _split_of(tar: str) -> str:
    folder, _, file = tar.rpartition(os.sep)
    words = [os.path.basename(folder), *re.findall(r"[a-z]+", file.lower())]
    return next((word for word in reversed(words) if word in ("train", *HELD_OUT)), "train")


def open_tars(
    name: str,
    tars: Sequence[str],
    split: str,
    *,
    needs_label: bool = True,
    columns: Sequence[str] = (),
) -> tuple[TarSource, tuple[str, ...]]:
    """Like `folder.open_folder`, for images in tars; class names are those of `train`.

    UserError if a tar cannot be read, or images lack a label or a column.
    """
    where = f"dataset.name={name!r}"
    indices = list(map_threads(lambda tar: _index(where, tar), tars, chunk=1))
    found: dict[str, list[Any]] = {key: [] for key in ("image", "label", *columns)}
    rows: dict[str, list[int]] = {}
    for number, (tar, index) in enumerate(zip(tars, indices, strict=True)):
        before = len(found["image"])
        _add_samples(found, number, index, columns)
        added = range(before, len(found["image"]))
        rows.setdefault(_split_of(tar), []).extend(added)
    if not found["image"]:
        raise UserError(f"{where}: no images in {counted(len(tars), 'tar')} ({list_names(tars)}).")
    for key in ("label", *columns) if needs_label else columns:
        missing = [i for i, each in enumerate(found[key]) if each is None]
        if missing:
            first = found["image"][missing[0]][1]
            members = "KEY.cls" if key == "label" else f"KEY.{key}"
            raise UserError(
                f"{where}: {counted(len(missing), 'image')} without {members} or {key!r} in "
                f"KEY.json, first {first}."
            )
    classes: tuple[str, ...] = ()
    labels: dict[str, np.ndarray] = {}
    if needs_label:
        given = [[text] for text in found["label"]]
        naming = rows["train"] if "train" in rows else range(len(given))
        classes, numbers = number_labels(where, given, naming, multi_label=False)
        check_classes(where, classes, len(given))
        labels = {"label": numbers}
    split = known_split(name, split, rows)
    kept = select(split, rows, lambda each: np.array(rows[each]))

    def places(key: str) -> np.ndarray:
        return np.array(found[key], _PLACE)[kept]

    kept_labels = {key: each[kept] for key, each in labels.items()}
    texts = {key: places(key) for key in columns}
    return TarSource(tuple(tars), places("image"), kept_labels, texts), classes


def _add_samples(
    found: Mapping[str, list[Any]], tar: int, index: Index, columns: Sequence[str]
) -> None:
    """Appends, for each image of a tar, its place, the text of its label and places of columns."""
    members: dict[str, dict[str, tuple[Any, bytes]]] = {}
    names = [os.fsdecode(name) for name in index["name"].tolist()]
    rest = (index[key].tolist() for key in ("offset", "size", "label"))
    for name, offset, size, label in zip(names, *rest, strict=True):
        if match := _KEY.fullmatch(name):
            sample = members.setdefault(match[1], {})
            sample[match[2].lower()] = (tar, name, offset, size), label
    nothing = None, b""
    for sample in members.values():
        image = next((p for end, (p, _) in sample.items() if f".{end}".endswith(EXTENSIONS)), None)
        if image is None:
            continue
        found["image"].append(image)
        about = sample.get("json", nothing)
        label = sample.get("cls", about)[1].decode(errors="replace")
        found["label"].append(label or None)
        for column in columns:
            found[column].append(sample.get(column, about)[0])


def _index(where: str, tar: str) -> Index:
    """Index of a tar's members: `name`, `offset`, `size` and `label`, [M] each, from the cache."""
    try:
        stat = os.stat(tar)
        identity = f"{tar} {stat.st_size} {stat.st_mtime_ns}"
        digest = hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
        cached = cache_dir() / "tars" / f"{digest}.npz"
        damage = OSError, ValueError, EOFError, zipfile.BadZipFile
        with contextlib.suppress(*damage), np.load(cached) as arrays:
            return dict(arrays)
        index = _scan(tar)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{where}: {tar} cannot be read: {one_line(error)}.") from error
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(cached, index)
    except OSError as error:
        logging.getLogger(__name__).warning("%s: its index is not cached: %s", tar, error)
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
    return {key: np.array(each, kinds[key]) for key, each in zip(kinds, columns, strict=True)}


def _label(end: str, content: bytes) -> bytes:
    """The text of the class in a member, or nothing."""
    if end == "cls":
        return content.strip()
    with contextlib.suppress(ValueError, AttributeError):
        value = json.loads(content).get("label", "")
        return str(value).encode() if isinstance(value, str | int) else b""
    return b""
