"""WebDataset tars with random access: `KEY.jpg` and `KEY.cls`, or "label" in `KEY.json`.

`dataset.name` is a .tar, a pattern such as `/data/{train,val}-{000..099}.tar`, or a folder with
tars in it or in its direct subfolders. The split of a tar is the one in its name, or that of its
folder, else `train`. A class is a number or a name. A column read by ops is the member
`KEY.COLUMN`, or a key of `KEY.json`. `KEY.depth.png` is no image: its key ends at the first dot.

Of members of one name the last counts, and links are what they link to, as in the unpacked tar.
The layout is that of github.com/webdataset/webdataset.
"""

import contextlib
import dataclasses
import functools
import glob
import json
import logging
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vit_jax.data.folder import EXTENSIONS, subfolders
from vit_jax.data.labelled import LabelledSource, Listing, rows_by
from vit_jax.data.remote import Windows, announce, expand, splits_of, windows
from vit_jax.data.sources import Request, map_threads
from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files import paths
from vit_jax.files.remote import CHUNK, RemoteFile
from vit_jax.wording import counted, list_names, unsigned

_KEY = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # and the extension, from the first dot on
_PLACE = [("tar", "i4"), ("name", "O"), ("offset", "i8"), ("size", "i8"), ("crc", "u4")]
_LONGEST = 4096  # characters of a name, as on Linux, and of a label
_MOST_PADDING = 1 << 20  # bytes of zeros at the end
_MOST_LINKS = 40  # to a file, as in Linux


@dataclasses.dataclass(frozen=True, eq=False)
class TarSource(LabelledSource):
    """Images inside tars: places and texts are rows of _PLACE, with the CRC of the header."""

    tars: tuple[str, ...]

    def read(self, index: int) -> bytes:
        return self._content(self.places[index], paths.LARGEST)

    def _content(self, place: Any, most: int) -> bytes:
        if place["size"] > most:
            raise ValueError(f"{place['name']} has more than {most >> 20:,} MiB")
        start, stop = place["offset"] - tarfile.BLOCKSIZE, place["offset"] + place["size"]
        found = self._bytes(place["tar"], int(start), int(stop))
        header, content = found[: tarfile.BLOCKSIZE], found[tarfile.BLOCKSIZE :]
        if len(content) < place["size"] or zlib.crc32(header) != place["crc"]:
            raise ValueError("the tar has changed since it was opened; start again")
        return content

    def _bytes(self, tar: int, start: int, stop: int) -> bytes:
        with open(self.tars[tar], "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def column(self, name: str, index: int) -> Any:
        value = self.columns[name][index]
        if not isinstance(value, np.void):  # a label
            return value
        content = self._content(value, paths.LARGEST_TEXT)
        try:
            if not value["name"].lower().endswith(".json"):
                return content.decode()
            found = paths.parse_json(content)[name]
            if not isinstance(found, list):
                return str(found)
            if not (texts := [text for text in found if isinstance(text, str) and text]):
                raise LookupError("an empty list")
            return texts
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{value['name']} has no text {name!r}: {error!r}") from error

    def describe(self, index: int) -> str:
        place = self.places[index]
        return f"{self.tars[place['tar']]}: {place['name']}"

    def identity(self) -> Iterable[str]:
        """Tar, name, size and label of every image, in order."""
        names = list(map(os.path.basename, self.tars))
        labels = self.columns.get("label", np.zeros(len(self), np.int32))
        for (tar, name, _, size, _), label in zip(self.places.tolist(), labels, strict=True):
            yield f"{names[tar]} {name} {size} {label}"


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteTarSource(TarSource):
    """Images inside tars on a server, of which chunks are fetched."""

    files: tuple[RemoteFile, ...]

    def _bytes(self, tar: int, start: int, stop: int) -> bytes:
        return self.files[tar].read(start, stop)

    def identity(self) -> Iterable[str]:
        yield from super().identity()
        yield from (file.version for file in self.files)

    @functools.cached_property
    def windows(self) -> Windows | None:
        """The order of training, if it is not a plain one."""
        used = [self.files[tar] for tar in np.unique(self.places["tar"])]
        first = np.cumsum([0, *(-(-file.size // CHUNK) for file in self.files)])
        return windows(used, first[self.places["tar"]] + self.places["offset"] // CHUNK)


def find_tars(name: str) -> list[str]:
    """The tars that `dataset.name` refers to, sorted; empty if it is something else."""
    path = os.path.abspath(os.path.expanduser(name))
    if path.lower().endswith(".tar"):
        return expand(path)
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


def open_tars(
    request: Request, files: Sequence[RemoteFile] = ()
) -> tuple[TarSource, tuple[str, ...]]:
    """Returns source and class names of the images in tars, of this machine or `files`.

    UserError if a tar cannot be read, a sample has several images or none of the form KEY.jpg,
    images lack a label or a column, and see `Listing.open`.
    """
    where = f"dataset.name={unsigned(request.path)!r}"
    tars = [unsigned(file.address) for file in files] or find_tars(request.path)
    if absent := [tar for tar in tars if not (files or os.path.exists(tar))]:
        raise UserError(f"{where}: {list_names(absent)} cannot be read: No such file.")
    if files:
        announce(where, files, "they are read once to list what is in them")
    known = splits_of(where, tars)
    opened: Sequence[str | RemoteFile] = files or tars
    numbered = zip(range(len(tars)), opened, known, strict=True)
    found = map_threads(lambda tar: _samples(where, request.columns, *tar), numbered, chunk=1)
    samples = list(chain.from_iterable(found))
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
    arrays = np.array(images, _PLACE), dict(columns), tuple(tars)
    source = (
        RemoteTarSource(*arrays, tuple(files), is_checked=False) if files else TarSource(*arrays)
    )
    rows, wanted = rows_by(splits, known), labels if request.needs_label else None
    return Listing(where, source, rows, wanted).open(request.split)


def _samples(
    where: str, columns: Iterable[str], tar: int, file: str | RemoteFile, split: str
) -> list[Any]:
    """Of each image of a tar its split, place, the text of its label and places of columns."""
    path = file if isinstance(file, str) else unsigned(file.address)
    try:
        rows = _scan_path(file) if isinstance(file, str) else _scan_remote(file)
    except UserError:
        raise
    except Exception as error:  # tarfile raises anything for a hostile file
        raise as_user_error(f"{where}: {path} cannot be read: {one_line(error)}.", error) from error
    samples: dict[str, dict[str, tuple[Any, str]]] = {}
    for name, *rest, label in rows:
        if match := _KEY.fullmatch(name):
            sample, place = samples.setdefault(match[1], {}), (tar, name, *rest)
            if sample.setdefault(match[2].lower(), (place, label))[0] is not place:
                raise UserError(f"{path}: {name} is there twice, in upper and lower case.")
    found, without = [], []
    for key, sample in samples.items():
        images = [place for end, (place, _) in sample.items() if f".{end}" in EXTENSIONS]
        alike = [f"{key}.{end}" for end in sample if f".{end}".endswith(EXTENSIONS)]
        if len(images) > 1 or (alike and not images):
            means = f"{list_names(alike)} in one sample, {key!r}, as a key ends at the first dot"
            raise UserError(f"{path}: {means}; call its image KEY.jpg, and others KEY.other.png.")
        if images:
            about = sample.get("json", (None, ""))
            places = (sample.get(name, about)[0] for name in columns)
            found.append((split, images[0], sample.get("cls", about)[1], *places))
        else:
            without.append(key)
    if without and len(without) < len(samples):
        lack = f"no image in {len(without):,} of its samples: {list_names(without)}"
        logging.warning(f"{path}: {lack}.")
    return found


def _scan_path(path: str) -> list[tuple[str, int, int, int, str]]:
    paths.check_file(path)
    with open(path, "rb") as file:
        return _scan(file)


def _scan_remote(file: RemoteFile) -> list[tuple[str, int, int, int, str]]:
    def write(path: Path) -> None:
        with file.open() as content:
            path.write_text(json.dumps(_scan(content)), encoding="utf-8")

    def read(path: Path) -> list[tuple[str, int, int, int, str]]:
        return paths.parse_json(path.read_bytes())

    return file.keep("members", write, read, is_small=True)


def _scan(file: Any) -> list[tuple[str, int, int, int, str]]:
    """Name, offset, size, CRC of header, and label of each file in a tar; TarError if damaged."""
    names, members = dict[str, str](), dict[str, tarfile.TarInfo]()  # by path
    for member in (archive := tarfile.TarFile(fileobj=file)):
        is_odd = member.issparse() or member.type not in tarfile.SUPPORTED_TYPES or member.size < 0
        if is_odd or len(member.name) > _LONGEST:
            what = f"sparse, split, or has a name over {_LONGEST:,} characters"
            raise tarfile.ReadError(f"{member.name[:80]} is {what}")
        names.setdefault(path := os.path.normpath(member.name), member.name)
        linked = members.get(os.path.normpath(member.linkname)) if member.islnk() else None
        members[path] = linked or member
    file.seek(archive.offset)  # TarFile takes damage for the end
    padding, found = file.read(_MOST_PADDING), f"after {counted(len(names), 'member')}"
    if len(padding) < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut: no end marker {found}; copy it, or pack it again")
    if padding.strip(b"\0") or file.read(1):
        raise tarfile.ReadError(f"data follow its end {found}: damaged, or joined without tar -A")
    rows = []
    for path, member in members.items():
        target: tarfile.TarInfo | None = member
        for _ in range(_MOST_LINKS):
            if target is not None and target.issym():
                link = os.path.join(os.path.dirname(target.name), target.linkname)
                target = members.get(os.path.normpath(link))
        if target is not None and target.isfile():
            place = target.offset_data, target.size
            file.seek(target.offset_data - tarfile.BLOCKSIZE)
            crc = zlib.crc32(file.read(tarfile.BLOCKSIZE))
            rows.append((names[path], *place, crc, _label(file, path, *place)))
        elif (member.issym() or member.islnk()) and _KEY.fullmatch(path):
            raise tarfile.ReadError(f"{path[:80]} is a link to no file in it: pack with tar -h")
    return rows


def _label(file: BinaryIO, name: str, offset: int, size: int) -> str:
    """The text of the class in a member, or nothing; ReadError if it is too large."""
    if (end := name.rpartition(".")[2].lower()) not in ("cls", "json"):
        return ""
    file.seek(offset)
    content, label = file.read(min(size, paths.LARGEST_TEXT)).strip(), ""
    with contextlib.suppress(ValueError, AttributeError):
        value = os.fsdecode(content) if end == "cls" else paths.parse_json(content).get("label")
        label = str(value) if isinstance(value, str | int) else ""
    if size > paths.LARGEST_TEXT or len(label) > _LONGEST:
        raise tarfile.ReadError(f"{name[:80]}, or the label in it, is too large")
    return label
