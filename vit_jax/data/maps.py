"""Folders of images with a map of the pixels of each: their classes, or values such as depth.

Maps are in a folder beside that of the images, of the same names but for the ending: `images/` and
`masks/` (or `annotations/`, `labels/`; `depth/` of values), in folders of splits or with these in
both; as ADE20k and Pascal VOC have them. Without splits, a fifth is `test`. A map of classes is a
picture of class numbers, a palette's or grey levels, or of colours; 255 is no class. Values are
16-bit or float pictures, or `.npy`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.folder import FolderSource, find_below, subfolders
from vit_jax.data.labelled import Listing
from vit_jax.data.ops import IGNORED, LABEL_MAP, MAPS
from vit_jax.data.sources import Request, describe, map_threads
from vit_jax.errors import UserError, as_user_error
from vit_jax.files.paths import read_file
from vit_jax.wording import counted, list_names

_IMAGES = ["images", "image", "imgs", "img", "jpegimages", "rgb"]
_OF_MAPS = {
    LABEL_MAP: ["masks", "mask", "annotations", "annotation", "labels", "segmentationclass"],
    "value_map": ["depth", "depths", "depth_maps", "values"],
}
_ADDED = re.compile(r"[ ._-](mask|seg|segmentation|labels?|gt|depth)$", re.IGNORECASE)
VOC = "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse"
VOC += " motorbike person pottedplant sheep sofa train tvmonitor"
_CLASSES = "classes.txt (a name per line, from 0), or classes.csv (name,number or "
_CLASSES += "name,red,green,blue; the name 'ignore' for pixels that do not count)"


@dataclasses.dataclass(frozen=True)
class ClassTable:
    """Classes by what a picture has in their place: a number, or red << 16 | green << 8 | blue."""

    names: tuple[str, ...]
    numbers: Mapping[int, int]
    has_colors: bool = False

    def __post_init__(self) -> None:
        if not 2 <= len(self.names) <= IGNORED:
            raise UserError(f"{len(self.names)} classes of pixels: it must be 2 to {IGNORED}.")


@dataclasses.dataclass(frozen=True, eq=False)
class MapSource(FolderSource):
    """Its column `label_map` or `value_map` has paths relative to the root, bytes [N]."""

    table: ClassTable | None = None  # None: values

    def column(self, name: str, index: int) -> Any:
        value = super().column(name, index)
        if name not in MAPS:
            return value
        path = os.path.join(self.root, os.fsdecode(bytes(value)))
        try:
            return read_values(path) if self.table is None else read_labels(path, self.table)
        except (ValueError, OSError, SyntaxError) as error:
            reason = getattr(error, "strerror", None) or error
            raise as_user_error(f"{path}: {reason}.", error) from error

    def identity(self) -> Iterable[str]:
        """Relative path and size of every image and map, in order."""
        paths = itertools.chain(*(self.columns[name] for name in MAPS if name in self.columns))
        names = [os.fsdecode(bytes(path)) for path in paths]
        sizes = map_threads(lambda name: os.path.getsize(os.path.join(self.root, name)), names)
        return itertools.chain(super().identity(), map("{} {}".format, names, sizes))

    def check(self, on_bad_image: str) -> MapSource:
        """Also reads every map, as a class that is in no table would end the training."""
        source = super().check(on_bad_image)
        names = [name for name in MAPS if name in source.columns]
        for _ in map_threads(lambda i: [source.column(n, i) for n in names], range(len(source))):
            pass
        return source


def open_maps(request: Request) -> tuple[MapSource, tuple[str, ...]]:
    """The images of a split expression that have a map; returns source and class names.

    UserError for another layout, an image with two maps, or classes that are not listed.
    """
    root, kind = os.path.abspath(request.path), request.map
    where = f"dataset.name={root!r}"
    try:
        pairs, is_drawn = _find_pairs(where, root, kind)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}.") from None
    rows = [pair for split in pairs.values() for pair in split]
    if not rows:
        raise UserError(f"{where}: its lists of images name none that has a map.")
    table = read_classes(root, rows[0][1]) if kind == LABEL_MAP else None
    counts = [0, *itertools.accumulate(map(len, pairs.values()))]
    splits: dict[str, range] = {
        name: range(*ends) for name, ends in zip(pairs, itertools.pairwise(counts), strict=True)
    }
    if is_drawn:
        splits = dict.fromkeys(("train", "test"), range(len(rows)))
    paths = zip(*rows, strict=True)
    images, maps = (np.array(list(map(os.fsencode, names))) for names in paths)
    source = MapSource(images, {kind: maps}, root, table, drawn=is_drawn)
    listing = Listing(where, source, splits, None, classes=table.names if table else ())
    return listing.open(request.split)


Pairs = dict[str, list[tuple[str, str]]]  # by split: image and map, relative to the root


def _find_pairs(where: str, root: str, kind: str) -> tuple[Pairs, bool]:
    """The pairs, and whether the folder has no splits."""
    if both := _two_folders(root, kind):
        if lists := sorted(Path(root).glob("ImageSets/Segmentation/*.txt")):  # VOC's
            pairs = {Path(image).stem: (image, pixels) for image, pixels in _match(root, *both)}
            listed = {path.stem: path.read_text().split() for path in lists}
            named = {k: [pairs[n] for n in names if n in pairs] for k, names in listed.items()}
            return named, False
        images, maps = both
        if common := {*subfolders(f"{root}/{images}")} & {*subfolders(f"{root}/{maps}")}:
            matched = {k: _match(root, f"{images}/{k}", f"{maps}/{k}") for k in sorted(common)}
            return matched, False
        return {"train": _match(root, *both)}, True
    found = {split: _two_folders(f"{root}/{split}", kind) for split in subfolders(root)}
    matched = {k: _match(root, *(f"{k}/{name}" for name in v)) for k, v in found.items() if v}
    if not matched:
        maps = _OF_MAPS[kind][0]
        expected = f"images/ and {maps}/, or train/images/ and train/{maps}/"
        has = list_names(subfolders(root)) or "none"
        raise UserError(f"{where}: expected the folders {expected}, but it has {has}.")
    return matched, False


def _two_folders(path: str, kind: str) -> tuple[str, ...]:
    """The folders of images and of maps in a folder; () without both."""
    inside = {name.lower(): name for name in subfolders(path)}
    images = [inside[name] for name in _IMAGES if name in inside]
    maps = [inside[name] for name in _OF_MAPS[kind] if name in inside]
    return (images[0], maps[0]) if images and maps else ()


def _match(root: str, image_folder: str, map_folder: str) -> list[tuple[str, str]]:
    """Images and maps of the same names; says how many images have none."""
    images, _ = find_below(f"{root}/{image_folder}")
    maps: dict[str, str] = {}
    for name in _files(f"{root}/{map_folder}"):
        stem = os.path.splitext(name)[0]
        for key in {stem, _ADDED.sub("", stem)}:
            if maps.setdefault(key, name) != name:
                raise UserError(f"{root}/{map_folder}: {maps[key]} and {name} are of one image.")
    stems = {name: os.path.splitext(name)[0] for name in sorted(images)}
    missing = [name for name, stem in stems.items() if stem not in maps]
    if len(missing) == len(images):
        example = f", such as {missing[0]}" if missing else ""
        raise UserError(f"{root}/{image_folder}: no image has a map in {map_folder}{example}.")
    if missing:
        names = f"{counted(len(missing), 'image')} without a map: {list_names(missing)}"
        logging.warning(f"{root}/{image_folder}: not used, {names}.")
    return [
        (f"{image_folder}/{name}", f"{map_folder}/{maps[stem]}")
        for name, stem in stems.items()
        if stem in maps
    ]


def _files(folder: str) -> list[str]:
    """All files below a folder but hidden ones, relative to it."""
    paths = sorted(path for path in Path(folder).rglob("[!.]*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths]


def read_classes(folder: str, example: str = "") -> ClassTable:
    """The classes of the maps below a folder; of which `example` is one, for the message."""
    path = Path(folder)
    if (file := path / "classes.csv").exists():
        return _read_csv(file)
    if (file := path / "classes.txt").exists():
        names = file.read_text("utf-8").strip().splitlines()
    elif (file := path / "objectInfo150.txt").exists():  # ADE20k: its 0 is no class
        rows = list(csv.reader(file.read_text("utf-8").splitlines(), delimiter="\t"))[1:]
        numbers = {0: IGNORED} | {int(row[0]): int(row[0]) - 1 for row in rows}
        return ClassTable(tuple(row[-1].strip() for row in rows), numbers)
    elif (path / "SegmentationClass").is_dir():
        names = VOC.split()
    else:
        found = ""
        if example:
            found = f"; {example} has {_values_of(path / example)}"
        raise UserError(f"{folder}: the classes of the maps are not known: add {_CLASSES}{found}.")
    return ClassTable(tuple(names), {number: number for number in range(len(names))})


def _read_csv(file: Path) -> ClassTable:
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(file.read_text("utf-8").splitlines())
    ]
    rows = [row for row in rows if any(row)]
    if rows and not all(map(str.isdecimal, rows[0][1:])):  # a header
        rows = rows[1:]
    widths = {len(row) for row in rows}
    if widths not in ({2}, {4}) or not all(cell.isdecimal() for row in rows for cell in row[1:]):
        raise UserError(f"{file}: its rows must be name,number or name,red,green,blue.")
    names = tuple(dict.fromkeys(row[0] for row in rows if row[0] != "ignore"))
    codes = {row[0]: IGNORED if row[0] == "ignore" else names.index(row[0]) for row in rows}
    numbers = {_code([*map(int, row[1:])]): codes[row[0]] for row in rows}
    if len(numbers) < len(rows):
        raise UserError(f"{file}: two rows have the same number or colour.")
    return ClassTable(names, numbers, widths == {4})


def _code(values: list[int]) -> int:
    return values[0] if len(values) == 1 else values[0] << 16 | values[1] << 8 | values[2]


def read_labels(path: str | os.PathLike[str], table: ClassTable) -> np.ndarray:
    """A map of classes as uint8 [H, W], `IGNORED` without one.

    ValueError if it is damaged, or has a number or a colour that the table does not list.
    """
    pixels = _pixels(path, as_colors=table.has_colors)
    if pixels.ndim == 3:
        red, green, blue = (pixels[..., i].astype(np.int64) for i in range(3))
        if not table.has_colors and np.any((red != green) | (green != blue)):
            raise ValueError("it has colours: list them in classes.csv as name,red,green,blue")
        pixels = red << 16 | green << 8 | blue if table.has_colors else red
    stored, places = np.unique(pixels, return_inverse=True)
    known = dict(table.numbers) if table.has_colors else {IGNORED: IGNORED, **table.numbers}
    if strange := [value for value in stored.tolist() if value not in known]:
        shown = _shown(strange, table.has_colors)
        raise ValueError(f"{shown} of none of the {len(table.names)} classes; list it: {_CLASSES}")
    classes = np.array([known[value] for value in stored.tolist()], np.uint8)
    return classes[places].reshape(pixels.shape)


def read_values(path: str | os.PathLike[str]) -> np.ndarray:
    """A map of values as stored, float32 [H, W]; ValueError if it is damaged, or has colours."""
    if os.fspath(path).lower().endswith(".npy"):
        pixels = np.load(io.BytesIO(read_file(path)), allow_pickle=False)
    else:
        pixels = _pixels(path, as_colors=False)
    if pixels.ndim != 2 or pixels.dtype.kind not in "uif":
        raise ValueError(f"a map of values must be numbers [H, W], not {describe(pixels)}")
    return pixels.astype(np.float32)


def _pixels(path: str | os.PathLike[str], *, as_colors: bool) -> np.ndarray:
    """[H, W] or, of colours, [H, W, 3]; of a palette the numbers, unless `as_colors`."""
    from PIL import Image

    with Image.open(io.BytesIO(read_file(path))) as picture:
        if as_colors or picture.mode not in ("1", "L", "P", "I", "F", "I;16", "I;16B"):
            return np.asarray(picture.convert("RGB"))
        return np.asarray(picture) + 0  # of a bit: 0 and 1


def _values_of(path: Path) -> str:
    pixels = _pixels(path, as_colors=False)
    codes = pixels if pixels.ndim == 2 else pixels.astype(np.int64) @ [1 << 16, 1 << 8, 1]
    return _shown(np.unique(codes).tolist(), pixels.ndim == 3)


def _shown(values: list[int], are_colors: bool) -> str:
    if are_colors:
        return "the colours " + list_names(f"{v >> 16},{v >> 8 & 255},{v & 255}" for v in values)
    return f"the numbers {list_names(map(str, values), 10)}"
