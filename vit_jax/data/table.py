"""Tables of images: a CSV (or TSV) or Parquet file that lists files and their labels.

Columns: `path` (or `file_name`), relative to the table's folder; `label`, one class, or `labels`,
any number of classes (text separated by `|`; in Parquet also a list); `split`, else a fifth is
`test`, chosen as in a folder without splits; others are for ops. File order is as for folders.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

import numpy as np

from vit_jax.data.folder import FolderSource
from vit_jax.data.labelled import Listing, rows_by
from vit_jax.data.sources import Request
from vit_jax.errors import UserError, one_line
from vit_jax.wording import list_names, nearest

_PATHS, _SEPARATOR = ("path", "file_name"), "|"
_KNOWN = (*_PATHS, "label", "labels", "split")


class TableSource(FolderSource):
    """Like its base class; columns but `label` are text."""

    def identity(self) -> Iterable[str]:
        """Path, size and column values of every file, in order."""
        for index, line in enumerate(super().identity()):
            values = (column[index] for column in self.columns.values())
            cells = (np.flatnonzero(value) if np.ndim(value) else value for value in values)
            yield " ".join(map(str, [line, *cells]))


def open_table(request: Request) -> tuple[TableSource, tuple[str, ...]]:
    """Returns source and class names of the files listed in a table.

    Examples have the text of `columns`; a file may be in several rows if that text differs.
    UserError for a table that cannot be read, a missing column or value, a file that is listed
    twice, and see `Listing`.
    """
    path = os.path.abspath(request.path)
    where = f"dataset.name={path!r}{' (read as .csv)' if path.lower().endswith('.tsv') else ''}"
    try:
        names, cells = _read(path, {*_KNOWN, *request.columns})
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{where} cannot be read: {one_line(error)}.") from None
    if clash := {"image", "label", "labels"}.intersection(request.columns):
        raise UserError(f"{where}: ops read no column {min(clash)!r}; copy it under another name.")

    def column(*known: str) -> list[str]:
        """The first column of `known` that exists; UserError unless every row has a value."""
        if not (name := next((name for name in known if name in cells), "")):
            others = f"{list_names(names) or 'none'}.{nearest(known[0], names)}"
            raise UserError(f"{where} has no column {' or '.join(map(repr, known))}, but {others}")
        if empty := [row for row, text in enumerate(cells[name], start=1) if not text]:
            raise UserError(f"{where}: no {name} in row {empty[0]}, the first of {len(empty)}.")
        return cells[name]

    folder, paths = os.path.dirname(path), column(*_PATHS)
    texts = {name: np.array(column(name), object) for name in request.columns}
    is_drawn, everything = "split" not in cells, list(range(len(paths)))
    splits = dict.fromkeys(("train", "test"), everything) if is_drawn else rows_by(column("split"))
    encoded = np.array(list(map(os.fsencode, paths)), np.bytes_)
    source = TableSource(encoded, texts, folder, drawn=is_drawn)
    files = source.real_paths()
    rows = list(zip(files, *texts.values(), strict=True))
    for split, numbers in splits.items():
        counts = Counter(rows[number] for number in numbers)
        if twice := [file for (file, *_), count in counts.items() if count > 1]:
            raise UserError(f"{where}: listed twice in {split!r}: {list_names(twice)}.")
    labels, several = None, "labels" in cells
    if request.needs_label:
        labels = cells["labels"] if several else column("label", "labels")
    return Listing(where, source, splits, labels, several=several, files=files).open(request.split)


def _read(path: str, known: Set[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Names of all columns, and the text in each row of those in `known`; lists of `labels`."""
    if path.lower().endswith(".parquet"):
        from pyarrow import parquet  # only needed for Parquet files

        names = parquet.read_schema(path).names
        wanted = [name for name in names if name in known]
        columns = parquet.read_table(path, columns=wanted).to_pydict()
    else:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count))
            names = [name.strip() for name in next(reader, [])]
            rows = [row for row in reader if row]
        for number, row in enumerate(rows, start=1):
            if len(row) != len(names):
                raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
        columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    cells: dict[str, list[Any]] = {}
    for name in known & columns.keys():
        read = _labels if name == "labels" else _text
        numbered = enumerate(columns[name], start=1)
        cells[name] = [read(value, f"{name} of row {number}") for number, value in numbered]
    return names, cells


def _labels(value: Any, where: str) -> list[str]:
    """The labels in a cell: a list, or text with separators."""
    if isinstance(value, str):
        value = value.split(_SEPARATOR)
    items = value if isinstance(value, list) else [value]
    return list(filter(None, (_text(item, where) for item in items)))


def _text(value: Any, where: str) -> str:
    """A cell as text, "" if it is empty."""
    if value is None or value != value:
        return ""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {value!r} is neither text nor a number")
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value).strip()
