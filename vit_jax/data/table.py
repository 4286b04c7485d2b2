"""Tables of images: a CSV or Parquet file that lists files and their labels.

Columns: `path` (or `file_name`), relative to the table's folder; `label`, one class, or `labels`,
any number of classes (text separated by `|`; in Parquet also a list); `split`, else a fifth is
`test`, chosen as in a folder without splits; others are for ops. File order is as for folders.
"""

from __future__ import annotations

import csv
import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.folder import FolderSource, known_split, order_files
from vit_jax.data.sources import check_classes, in_order, select
from vit_jax.errors import UserError, counted, list_names, nearest, one_line

_PATHS, _SEPARATOR = ("path", "file_name"), "|"
_KNOWN = (*_PATHS, "label", "labels", "split")


class TableSource(FolderSource):
    """Like its base class; `label` may be uint8 [N, K] of 0 and 1, other columns are text."""

    def identity(self) -> Iterable[str]:
        """Path, size and column values of every file, in order."""
        for index, line in enumerate(super().identity()):
            values = (each[index] for each in self.columns.values())
            cells = (np.flatnonzero(value) if np.ndim(value) else value for value in values)
            yield " ".join(map(str, [line, *cells]))


def open_table(
    path: str, split: str, *, needs_label: bool = True, columns: Sequence[str] = ()
) -> tuple[FolderSource, tuple[str, ...]]:
    """Like `folder.open_folder`, for the files listed in a table.

    Examples have the text of `columns`. A file may then be in several rows if that text differs.
    """
    path = os.path.abspath(os.path.expanduser(path))
    where = f"dataset.name={path!r}"
    try:
        names, cells = _read(path, {*_KNOWN, *columns})
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{where} cannot be read: {one_line(error)}.") from None

    if clash := {"image", "label", "labels"}.intersection(columns):
        reads = f"preprocess reads the column {min(clash)!r}, which examples do not have as text"
        raise UserError(f"{where}: {reads}; copy it under another name.")
    folder = os.path.dirname(path)
    files = [os.fsencode(name) for name in _column(where, names, cells, *_PATHS)]
    # `a.jpg`, `./a.jpg` and the absolute path are the same file.
    inside = os.fsencode(os.path.join(folder, ""))
    places = [os.path.normpath(inside + f if f[:1] != b"/" else f) for f in files]
    places = [place.removeprefix(inside) for place in places]
    known = {name: np.array(_column(where, names, cells, name), object) for name in columns}
    keys = list(zip(places, *known.values(), strict=True))
    drawn = "split" not in cells
    rows: dict[str, list[int]] = {name: list(range(len(files))) for name in ("train", "test")}
    if not drawn:
        rows = {}
        for row, name in enumerate(_column(where, names, cells, "split")):
            rows.setdefault(name, []).append(row)
    for name, members in rows.items():
        counts = Counter(keys[row] for row in members)
        if twice := [os.fsdecode(key[0]) for key, count in counts.items() if count > 1]:
            raise UserError(f"{where}: listed twice in {name!r}: {list_names(twice)}.")
    taken = {name: {places[row] for row in members} for name, members in rows.items()}
    for one, other in itertools.combinations(taken, 2):
        if not drawn and (shared := sorted(taken[one] & taken[other])):
            logging.getLogger(__name__).warning(
                f"{where}: {counted(len(shared), 'file')} in {one!r} and in {other!r}: "
                f"{list_names(map(os.fsdecode, shared))}."
            )
    classes: tuple[str, ...] = ()
    labels = np.zeros(len(files), np.int32)
    if needs_label:
        if not (several := "labels" in cells):
            _column(where, names, cells, "label", "labels")
        given = cells["labels" if several else "label"]
        naming = rows["train"] if "train" in rows else range(len(files))
        classes, labels = number_labels(where, given, naming, multi_label=several)
        known["label"] = labels
    check_classes(where, classes, len(files))
    split = known_split(path, split, rows)

    def ordered(name: str) -> np.ndarray:
        groups: dict[int, list[tuple[bytes, int]]] = {}
        for row in rows[name]:
            label = 0 if labels.ndim > 1 else int(labels[row])
            groups.setdefault(label, []).append((files[row], row))
        return order_files(groups.values(), name if drawn else "")

    picked = select(split, rows, ordered)
    kept = {name: each[picked["number"]] for name, each in known.items()}
    return TableSource(folder, picked["path"], kept, drawn), classes


def _column(
    where: str, names: Sequence[str], cells: Mapping[str, list[list[str]]], *known: str
) -> list[str]:
    """The first column of `known` that exists; UserError unless every row has a value."""
    if not (name := next((name for name in known if name in cells), "")):
        found = f"{list_names(names) or 'none'}.{nearest(known[0], names)}"
        raise UserError(f"{where} has no column {' or '.join(map(repr, known))}, but {found}")
    if empty := [row for row, texts in enumerate(cells[name], start=1) if not texts]:
        rows = counted(len(empty), "row")
        raise UserError(f"{where}: {rows} without a {name}, the first is row {empty[0]}.")
    return [text for (text,) in cells[name]]


def _read(path: str, known: Collection[str]) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Names of all columns, and the texts in each row of those in `known`."""
    if path.lower().endswith(".parquet"):
        from pyarrow import parquet  # only needed for Parquet files

        names = parquet.read_schema(path).names
        found = parquet.read_table(path, columns=[name for name in names if name in known])
        columns = found.to_pydict()
    else:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names = [name.strip() for name in next(reader, [])]
            rows = [row for row in reader if row]
        for number, row in enumerate(rows, start=1):
            if len(row) != len(names):
                raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
        columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    texts: dict[str, list[list[str]]] = {name: [] for name in names if name in known}
    for name, column in texts.items():
        for number, value in enumerate(columns[name], start=1):
            column.append(_texts(f"{name} of row {number}", value, several=name == "labels"))
    return names, texts


def _texts(where: str, value: Any, *, several: bool) -> list[str]:
    """Values of a cell: none, one text, or several from a list or with separators."""
    if several and isinstance(value, str):
        value = value.split(_SEPARATOR)
    texts = []
    for each in value if several and isinstance(value, list) else [value]:
        if each is None or each != each:
            continue
        if not isinstance(each, str | int | float):
            raise ValueError(f"{where}: {each!r} is neither text nor a number")
        is_whole = isinstance(each, float) and each.is_integer()
        texts.append(str(int(each) if is_whole else each).strip())
    return [text for text in texts if text]


def number_labels(
    where: str, given: Sequence[Sequence[str]], naming: Iterable[int], *, multi_label: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names, from the rows `naming`, and labels of all: int32 [N] or uint8 [N, K]."""
    found = {each for row in naming for each in given[row]}
    classes = in_order(found)
    if len(classes) < 2 - multi_label:
        raise UserError(f"{where}: {counted(len(classes), 'class')}; a classifier needs two.")
    if unknown := sorted({each for row in given for each in row} - found):
        only = f"{counted(len(unknown), 'class')} missing from 'train'"
        raise UserError(f"{where}: {only}: {list_names(unknown)}.")
    numbers = {each: number for number, each in enumerate(classes)}
    if not multi_label:
        return tuple(classes), np.array([numbers[label] for (label,) in given], np.int32)
    labels = np.zeros((len(given), len(classes)), np.uint8)
    for number, row in enumerate(given):
        labels[number, [numbers[each] for each in row]] = 1
    return tuple(classes), labels
