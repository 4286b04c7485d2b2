"""Files of maps of pixels, and of the classes in them.

A map of classes is a picture of class numbers, a palette's or grey levels, or of colours; 255 is no
class. Values are pictures of any depth, or `.npy`.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vit_jax.data.ops import IGNORED
from vit_jax.data.sources import describe
from vit_jax.errors import UserError
from vit_jax.files.paths import read_file
from vit_jax.wording import list_names

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
        if not 2 <= len(self.names) <= IGNORED or not all(self.names):
            count = f"{len(self.names)} classes of pixels, {list_names(map(repr, self.names))}"
            raise UserError(f"{count}: they must be 2 to {IGNORED}, each with a name.")


def read_classes(folder: str, example: str = "") -> ClassTable:
    """The classes of the maps below a folder; of which `example` is one, for the message."""
    known = ("classes.csv", "classes.txt", "objectInfo150.txt")
    for file in (path for name in known if (path := Path(folder, name)).exists()):
        try:
            lines = file.read_text("utf-8-sig").strip().splitlines()
        except UnicodeDecodeError:
            raise UserError(f"{file}: it is not UTF-8.") from None
        if file.suffix == ".csv":
            return _read_csv(file, lines)
        if file.name == "classes.txt":
            names = tuple(map(str.strip, lines))
            return ClassTable(names, {number: number for number in range(len(names))})
        rows = [row for row in csv.reader(lines[1:], delimiter="\t") if row]
        numbers = {0: IGNORED} | {int(row[0]): int(row[0]) - 1 for row in rows}  # 0 is no class
        return ClassTable(tuple(row[-1].strip() for row in rows), numbers)
    if Path(folder, "SegmentationClass").is_dir():
        return ClassTable(tuple(VOC.split()), {number: number for number in range(21)})
    found = ""
    with contextlib.suppress(OSError, ValueError):
        if example:
            pixels = _pixels(Path(folder, example), as_colors=False)
            shown = _shown(np.unique(_codes(pixels)).tolist(), pixels.ndim == 3)
            found = f"; {example} has {shown}"
    raise UserError(f"{folder}: the classes of the maps are not known: add {_CLASSES}{found}.")


def _read_csv(file: Path, lines: list[str]) -> ClassTable:
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if any(row)]
    if rows and not all(map(str.isdecimal, rows[0][1:])):  # a header
        rows = rows[1:]
    widths = {len(row) for row in rows}
    are_numbers = all(cell.isdecimal() for row in rows for cell in row[1:])
    if widths not in ({2}, {4}) or not are_numbers:
        raise UserError(f"{file}: its rows must be name,number or name,red,green,blue.")
    if widths == {4} and any(int(cell) > 255 for row in rows for cell in row[1:]):
        raise UserError(f"{file}: red, green and blue must be at most 255.")
    names = tuple(dict.fromkeys(row[0] for row in rows if row[0] != "ignore"))
    codes = {row[0]: IGNORED if row[0] == "ignore" else names.index(row[0]) for row in rows}
    numbers = {
        functools.reduce(lambda code, cell: code << 8 | int(cell), row[1:], 0): codes[row[0]]
        for row in rows
    }
    if len(numbers) < len(rows):
        raise UserError(f"{file}: two rows have the same number or colour.")
    return ClassTable(names, numbers, widths == {4})


def read_labels(path: str | os.PathLike[str], table: ClassTable) -> np.ndarray:
    """A map of classes as uint8 [H, W], `IGNORED` without one.

    ValueError if it is damaged, or has a number or a colour that the table does not list.
    """
    pixels = _pixels(path, as_colors=table.has_colors)
    if pixels.ndim == 3 and not table.has_colors:
        if np.any(pixels != pixels[..., :1]):
            raise ValueError("it has colours: list them in classes.csv as name,red,green,blue")
        pixels = pixels[..., 0]
    pixels = _codes(pixels)
    known = dict(table.numbers) if table.has_colors else {IGNORED: IGNORED, **table.numbers}
    keys = np.array(sorted(known))
    places = np.searchsorted(keys, pixels).clip(max=len(keys) - 1)
    if np.any(strange := keys[places] != pixels):
        shown = _shown(np.unique(pixels[strange]).tolist(), table.has_colors)
        raise ValueError(f"{shown} of none of the {len(table.names)} classes; list it: {_CLASSES}")
    return np.array([known[key] for key in keys.tolist()], np.uint8)[places]


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


def _codes(pixels: np.ndarray) -> np.ndarray:
    """Colours [H, W, 3] as numbers [H, W]; numbers as they are."""
    if pixels.ndim == 2:
        return pixels
    return pixels.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)


def _shown(values: list[int], are_colors: bool) -> str:
    if are_colors:
        return "the colours " + list_names(f"{v >> 16},{v >> 8 & 255},{v & 255}" for v in values)
    return f"the numbers {list_names(map(str, values), 10)}"
