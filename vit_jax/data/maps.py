"""Folders of images with a map of the pixels of each: their classes, or values such as depth.

Maps are in a folder beside that of the images, of the same names but for the ending: `images/` and
`masks/` (or `annotations/`, `labels/`; `depth/` of values), in folders of splits or with these in
both; as ADE20k and Pascal VOC have them. Without splits, a fifth is `test`. What is in a map, and
how classes are listed: map_files.py.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from vit_jax.data.folder import EXTENSIONS, FolderSource, find_below, subfolders
from vit_jax.data.labelled import Listing
from vit_jax.data.map_files import ClassTable, read_classes, read_labels, read_values
from vit_jax.data.ops import IGNORED, LABEL_MAP, MAPS
from vit_jax.data.sources import Request, describe, map_threads, split_names, split_word
from vit_jax.errors import UserError, as_user_error
from vit_jax.wording import counted, list_names

_IMAGES = ["images", "image", "imgs", "img", "jpegimages", "rgb"]
_OF_MAPS = {  # VOC has the boxes of its objects in Annotations
    LABEL_MAP: ["segmentationclass", "masks", "mask", "annotations", "annotation", "labels"],
    "value_map": ["depth", "depths", "depth_maps", "values"],
}
_ADDED = re.compile(r"[ ._-](mask|seg|segmentation|labels?|gt|depth)$", re.IGNORECASE)
_ORIENTATION = 0x0112  # tag of EXIF; from 5 on the image is turned by 90 degrees


@dataclasses.dataclass(frozen=True, eq=False)
class MapSource(FolderSource):
    """Its column `label_map` or `value_map` has paths relative to the root, bytes [N]."""

    table: ClassTable | None = None  # None: values
    exif: bool = True  # whether images are turned

    def column(self, name: str, index: int) -> Any:
        value = super().column(name, index)
        if name not in MAPS:
            return value
        from PIL import Image

        path = os.path.join(self.root, os.fsdecode(bytes(value)))
        try:
            return read_values(path) if self.table is None else read_labels(path, self.table)
        except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            reason = getattr(error, "strerror", None) or error
            raise as_user_error(f"{path}: {reason}.", error) from error

    def identity(self) -> Iterable[str]:
        """Relative path and size of every image and map, in order, and the table."""
        names = [os.fsdecode(bytes(path)) for key in MAPS for path in self.columns.get(key, ())]
        sizes = map_threads(lambda name: os.path.getsize(os.path.join(self.root, name)), names)
        lines = map("{} {}".format, names, sizes)
        return itertools.chain(super().identity(), lines, [str(self.table)])

    def check(self, on_bad_image: str) -> Self:
        """Also reads every map; a wrong size or class would end the training later."""
        source = super().check(on_bad_image)
        seen = map_threads(source._inspect, range(len(source)))
        numbers = set(itertools.chain.from_iterable(seen))
        names = self.table.names if self.table else ()
        missing = [name for k, name in enumerate(names) if k not in numbers]
        if IGNORED in numbers and len(missing) >= len(names) - 1 > 0:  # 255 is meant as an object
            known = f"only {len(names) - len(missing)} of the classes {list_names(names)}"
            raise UserError(f"{self.root}: the maps have {known}; 255 is none unless listed.")
        if missing:
            logging.warning(f"{self.root}: no pixel of {list_names(missing)}.")
        return source

    def _inspect(self, index: int) -> list[int]:
        """The classes in a map; UserError unless its size is the image's."""
        from PIL import Image, UnidentifiedImageError

        [key] = self.columns.keys() & MAPS
        pixels = self.column(key, index)
        with (
            contextlib.suppress(UnidentifiedImageError),  # of a kind that OpenCV reads
            Image.open(self.describe(index)) as picture,
        ):
            is_turned = self.exif and picture.getexif().get(_ORIENTATION, 1) > 4
            width, height = picture.size[::-1] if is_turned else picture.size
            if pixels.shape != (height, width):
                size = f"{height}x{width} and its {key} {describe(pixels)}"
                hint = "; if EXIF turns the image: decode(exif=False)" if is_turned else ""
                raise UserError(f"{self.describe(index)} is {size}: they differ in size{hint}.")
        return [] if self.table is None else np.unique(pixels).tolist()


def open_maps(request: Request) -> tuple[MapSource, tuple[str, ...]]:
    """The images of a split expression that have a map; returns source and class names.

    UserError for another layout, an image with two maps, or classes that are not listed.
    """
    root, kind = os.path.abspath(request.path), request.map
    where = f"dataset.name={root!r}"
    try:
        pairs, is_drawn = _find_pairs(where, root, kind, split_names(request.split))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}.") from None
    rows = [pair for split in pairs.values() for pair in split]
    if not rows:
        raise UserError(f"{where}: its lists of images name none that has a map.")
    table = read_classes(root, rows[0][1]) if kind == LABEL_MAP else None
    ends = [0, *itertools.accumulate(map(len, pairs.values()))]
    splits: dict[str, range] = dict(zip(pairs, map(range, ends, ends[1:]), strict=True))
    if is_drawn:
        splits = dict.fromkeys(("train", "test"), range(len(rows)))
    paths = zip(*rows, strict=True)
    images, maps = (np.array(list(map(os.fsencode, names))) for names in paths)
    exif = request.exif is not False
    source = MapSource(images, {kind: maps}, root, table, exif, drawn=is_drawn)
    listing = Listing(where, source, splits, None, classes=table.names if table else ())
    return listing.open(request.split)


Pairs = dict[str, list[tuple[str, str]]]  # by split: image and map, relative to the root


def _find_pairs(where: str, root: str, kind: str, asked: list[str]) -> tuple[Pairs, bool]:
    """The pairs, and whether the folder has no splits."""
    if both := _two_folders(root, kind):
        images, maps = both
        if lists := sorted(Path(root).glob("ImageSets/Segmentation/*.txt")):  # VOC's
            pairs = {Path(pair[0]).stem: pair for pair in _match(root, images, maps)}
            listed = {path.stem: path.read_text().split() for path in lists}
            for split, names in listed.items():
                if lost := [name for name in names if name not in pairs]:
                    text = f"{counted(len(lost), 'name')} of {split!r} without a map"
                    logging.warning(f"{where}: not used, {text}: {list_names(lost)}.")
            return {
                k: [pairs[n] for n in names if n in pairs] for k, names in listed.items()
            }, False
        common = {*subfolders(f"{root}/{images}")} & {*subfolders(f"{root}/{maps}")}
        if any(map(split_word, common)) or common.intersection(asked):
            if loose := [name for name in find_below(f"{root}/{images}")[0] if "/" not in name]:
                logging.warning(f"{root}/{images}: not used, in no split: {list_names(loose)}.")
            return {k: _match(root, f"{images}/{k}", f"{maps}/{k}") for k in sorted(common)}, False
        return {"train": _match(root, images, maps)}, True
    found = {split: _two_folders(f"{root}/{split}", kind) for split in subfolders(root)}
    matched = {k: _match(root, *(f"{k}/{name}" for name in v)) for k, v in found.items() if v}
    if not matched:
        maps = _OF_MAPS[kind][-2 if kind == LABEL_MAP else 0]
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
    images = _by_stem(f"{root}/{image_folder}", EXTENSIONS)
    maps = _by_stem(f"{root}/{map_folder}", (*EXTENSIONS, ".npy"))
    added = {stem: _ADDED.sub("", stem) for stem in maps if _ADDED.sub("", stem) not in maps}
    for stem, plain in added.items():
        if (other := maps.setdefault(plain, maps[stem])) != maps[stem]:
            raise UserError(f"{root}/{map_folder}: {other} and {maps[stem]} are of one image.")
    missing = [name for stem, name in images.items() if stem not in maps]
    if len(missing) == len(images):
        example = f", such as {missing[0]}" if missing else ""
        raise UserError(f"{root}/{image_folder}: no image has a map in {map_folder}{example}.")
    if missing:
        names = f"{counted(len(missing), 'image')} without a map: {list_names(missing)}"
        logging.warning(f"{root}/{image_folder}: not used, {names}.")
    both = [stem for stem in images if stem in maps]
    return [(f"{image_folder}/{images[stem]}", f"{map_folder}/{maps[stem]}") for stem in both]


def _by_stem(folder: str, endings: tuple[str, ...]) -> dict[str, str]:
    """The files below a folder by their names without an ending; UserError for two of one."""
    stems: dict[str, str] = {}
    for name in sorted(find_below(folder, endings)[0]):
        if (other := stems.setdefault(os.path.splitext(name)[0], name)) != name:
            raise UserError(f"{folder}: {other} and {name} have one name; rename one.")
    return stems
