"""Tables of images: a CSV (or TSV) or Parquet file that lists files and their labels.

Columns: `path` (or `file_name`), relative to the table's folder; `label`, one class, or `labels`,
any number of classes (text separated by `|`; in Parquet also a list); or `mask` or `depth`, the
file of a map of the pixels (maps.py); or `target`, numbers to predict. `split`, else a fifth is
`test`, chosen as in a folder without splits; others are for ops. File order is as for folders.
"""

import csv
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set
from typing import Any

import numpy as np
from pyarrow import ArrowException

from vit_jax.data.folder import FolderSource
from vit_jax.data.labelled import Listing, numbered, rows_by
from vit_jax.data.map_files import read_classes
from vit_jax.data.maps import MapSource
from vit_jax.data.ops import LABEL_MAP
from vit_jax.data.sources import Request
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import check_file
from vit_jax.wording import list_names, nearest

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PATHS, _SEPARATOR = ("path", "file_name"), "|"
_KNOWN = (*_PATHS, "label", "labels", "split")
_MAPS = {LABEL_MAP: ("mask", LABEL_MAP), "value_map": ("depth", "value_map")}


class TableSource(FolderSource):
    """Like its base class; columns but `label` are text."""

    def identity(self) -> Iterable[str]:
        """Path, size and column values of every file, in order."""
        for index, line in enumerate(super().identity()):
            values = [self.column(name, index) for name in self.columns]
            several = (isinstance(v, np.ndarray) and v.dtype == np.uint8 for v in values)
            cells = (np.flatnonzero(v) if s else v for v, s in zip(values, several, strict=True))
            yield " ".join(map(str, [line, *cells]))


def open_table(request: Request) -> tuple[TableSource, tuple[str, ...]]:
    """Returns source and class names of the files listed in a table.

    Examples have the text of `columns`; a file may be in several rows if that text differs.
    `label_key` is the column of the label, or those of `target`, separated by commas.
    UserError for a table that cannot be read, a missing column or value, a file that is listed
    twice, and see `Listing`.
    """
    path = os.path.abspath(request.path)
    keys = [key.strip() for key in request.label_key.split(",") if key.strip()]
    where = f"dataset.name={path!r}{' (read as .csv)' if path.lower().endswith('.tsv') else ''}"
    try:
        known = {*_KNOWN, *request.columns, *keys, "target", *_MAPS.get(request.map, ())}
        names, cells = _read(path, known, {"labels"} - {*keys}, {*request.columns})
    except (OSError, ValueError, csv.Error, ArrowException) as error:
        raise UserError(f"{where} cannot be read: {one_line(error)}.") from None
    if clash := {"image", "label", "labels"}.intersection(request.columns):
        raise UserError(f"{where}: ops read no column {min(clash)!r}; copy it under another name.")

    def column(*known: str) -> list[Any]:
        """The column that is called one of `known`; UserError unless every row has a value."""
        if len(found := [name for name in known if name in cells]) > 1:
            raise UserError(f"{where} has both {' and '.join(map(repr, found))}; keep one.")
        if not found:
            others = f"{list_names(names) or 'none'}.{nearest(known[0], names)}"
            raise UserError(f"{where} has no column {' or '.join(map(repr, known))}, but {others}")
        empty = [row for row, text in enumerate(cells[found[0]], start=1) if not text]
        if empty and found != ["labels"]:
            raise UserError(f"{where}: no {found[0]} in row {empty[0]}, the first of {len(empty)}.")
        return cells[found[0]]

    paths = list(map(os.fsencode, column(*_PATHS)))
    if bad := [i for i, name in enumerate(paths, start=1) if len(name) > 4096 or b"\0" in name]:
        raise UserError(f"{where}: the path in row {bad[0]} has a NUL or more than 4,096 bytes.")
    texts = {name: np.array([*column(name), None], object)[:-1] for name in request.columns}
    if request.map:
        texts[request.map] = np.array(list(map(os.fsencode, column(*_MAPS[request.map]))))
    if "target" in request.needs:
        columns = [_numbers(where, key, column(key)) for key in keys or ["target"]]
        texts["target"] = np.stack(columns, axis=1)
    several, is_drawn = "labels" in cells and not keys, "split" not in cells
    labels = column(*keys or ("label", "labels")) if request.needs_label else None
    written = ["train"] * len(paths) if is_drawn else column("split")
    splits = dict.fromkeys(("train", "test"), range(len(paths))) if is_drawn else rows_by(written)
    # Of one width, unless a long one would widen a million.
    places = np.array(paths, np.bytes_ if max(map(len, paths), default=0) < 256 else object)
    del paths
    cells.clear()  # a million paths take 150 MB
    folder = os.path.dirname(path)
    source: Any = TableSource(places, texts, folder, drawn=is_drawn)
    classes: tuple[str, ...] | None = None
    if request.map:
        example = os.fsdecode(bytes(texts[request.map][0])) if len(places) else ""
        table = read_classes(folder, example) if request.map == LABEL_MAP else None
        exif = request.exif is not False
        source = MapSource(places, texts, folder, table, exif, drawn=is_drawn)
        classes = table.names if table else ()
    files = np.unique(source.file_ids(), return_inverse=True)[1]
    told_apart = (written, *(texts[name] for name in request.columns))
    rows = np.array([files, *map(numbered, told_apart)])
    _, first, counts = np.unique(rows, axis=1, return_index=True, return_counts=True)
    if len(twice := first[counts > 1]):
        files_of = list_names(map(source.describe, twice))
        raise UserError(f"{where}: listed twice in {written[twice[0]]!r}: {files_of}.")
    options: Any = {"several": several, "files": files, "classes": classes}
    return Listing(where, source, splits, labels, **options).open(request.split)


def _numbers(where: str, name: str, cells: list[str]) -> np.ndarray:
    """A column of finite numbers, float32 [N]; UserError for another cell."""
    for row, text in enumerate(cells, start=1):
        if not _NUMBER.fullmatch(text):
            raise UserError(f"{where}: {name} of row {row} is no number: {text!r:.80}.")
    if not np.all(np.isfinite(values := np.array(cells, np.float64).astype(np.float32))):
        raise UserError(f"{where}: {name} has numbers beyond float32.")
    return values


def _read(
    path: str, known: Set[str], several: Set[str], texts: Set[str]
) -> tuple[list[str], dict[str, list[Any]]]:
    """Names of all columns, and the text in each row of those in `known`.

    Of columns in `several` tuples of labels; of those in `texts` also tuples, of a list.
    """
    names = next(rows := _rows(path, known))
    wanted = [name for name in names if name in known]
    if twice := [name for name in wanted if wanted.count(name) > 1]:
        raise ValueError(f"it has several columns {twice[0]!r}; keep one")
    cells: dict[str, list[Any]] = {name: [] for name in wanted}
    for number, row in enumerate(rows, start=1):
        for name, value in zip(wanted, row, strict=True):
            read = _labels if name in several else _text
            read = _labels if name in texts and isinstance(value, list) else read
            cells[name].append(read(value, f"{name} of row {number}"))
    return names, cells


def _rows(path: str, known: Set[str]) -> Iterator[Any]:
    """Names of all columns, then the values of those in `known` in each row."""
    check_file(path)
    if path.lower().endswith(".parquet"):
        from pyarrow import parquet  # only needed for Parquet files

        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield (names := file.schema_arrow.names)
            if (count := file.metadata.num_rows) > 8 * (size := os.path.getsize(path)):
                raise ValueError(f"{count:,} rows in {size:,} bytes cannot differ")
            table = file.read([name for name in names if name in known])
            table.validate(full=True)
            if table.num_rows != count:
                raise ValueError(f"it has {table.num_rows} of its {count} rows")
        yield from zip(*table.to_pydict().values(), strict=True)
        return
    with open(path, newline="", encoding="utf-8-sig") as text:
        header = text.readline()
        text.seek(0)
        reader = csv.reader(text, delimiter=max(",;\t", key=header.count), strict=True)
        yield (names := [name.strip() for name in next(reader, [])])
        places = [i for i, name in enumerate(names) if name in known]
        for number, row in enumerate(filter(None, reader), start=1):
            if len(row) != len(names):
                raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
            yield [row[i] for i in places]
        end: Any = text.buffer
        if names and end.seek(-1, os.SEEK_END) and end.read() not in b"\r\n":
            logging.warning(f"{path}: its last line has no end; is the file whole?")


def _labels(value: Any, where: str) -> tuple[str, ...]:
    """The labels in a cell: a list, or text with separators."""
    if isinstance(value, str):
        value = value.split(_SEPARATOR)
    items = value if isinstance(value, list) else [value]
    return tuple(filter(None, (_text(item, where) for item in items)))


def _text(value: Any, where: str) -> str:
    """A cell as text, "" if it is empty; equal texts are one object, to save memory."""
    if value is None or value != value:
        return ""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {value!r:.80} is neither text nor a number")
    is_whole = isinstance(value, float) and value.is_integer()
    return sys.intern(str(int(value) if is_whole else value).strip())
