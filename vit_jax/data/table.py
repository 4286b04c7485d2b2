"""Tables of images: a CSV or Parquet file that names files and their labels.

Columns: `path` (or `file_name`), relative to the table's folder; `label`, one class, or `labels`,
any number of them (in a CSV file separated by `|`; in Parquet a list); `split`, if there are any.
Without it a fifth is `test`, drawn as in a folder without splits. Files are in a folder's order.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.folder import FolderSource, known_split, order_files
from vit_jax.data.sources import resolve_split
from vit_jax.data.threads import map_threads
from vit_jax.errors import UserError, counted, list_names, nearest, one_line

_PATHS, _SEPARATOR = ("path", "file_name"), "|"


class TableSource(FolderSource):
    """As its base; `labels` is int32 [N], or uint8 [N, K] of 0 and 1."""

    def identity(self) -> Iterable[str]:
        """Path, size and label of every file, in order."""
        sizes = map_threads(os.path.getsize, map(self.path, range(len(self))))
        for path, size, label in zip(self.relative_paths(), sizes, self.labels, strict=True):
            yield f"{path} {size} {np.flatnonzero(label) if label.ndim else label}"


def open_table(
    path: str, split: str, *, needs_label: bool = True
) -> tuple[FolderSource, tuple[str, ...]]:
    """Reads the rows that a split expression selects, opens no image; gives source and class names.

    The classes are those of the split `train` (of all rows where there is none), sorted.

    Args:
      path: of the table.
      split: expression such as `train[:98%]`.
      needs_label: False: all labels are 0 and there are no class names.

    Raises:
      UserError: the file is missing, damaged or without the columns, a row has no label, a file is
        listed twice, or a split has a class that `train` does not have.
    """
    path = os.path.abspath(os.path.expanduser(path))
    where = f"dataset.name={path!r}"
    try:
        columns = _read_parquet(path) if path.lower().endswith(".parquet") else _read_csv(path)
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{where} cannot be read: {one_line(error)}.") from None
    files = [os.fsencode(name) for name in _texts(where, *_column(where, columns, *_PATHS))]
    if not files:
        raise UserError(f"{where}: the table has no rows.")
    drawn = "split" not in columns
    if drawn:
        rows = {"train": list(range(len(files))), "test": list(range(len(files)))}
    else:
        rows = {}
        for row, name in enumerate(_texts(where, "split", columns["split"])):
            rows.setdefault(name, []).append(row)
    for name, members in rows.items():
        counts = Counter(files[row] for row in members)
        if twice := [os.fsdecode(file) for file, count in counts.items() if count > 1]:
            raise UserError(f"{where}: listed twice in {name!r}: {list_names(twice)}.")
    classes: tuple[str, ...] = ()
    labels = np.zeros(len(files), np.int32)
    if needs_label:
        naming = rows["train"] if "train" in rows else range(len(files))
        classes, labels = _labels(where, columns, naming)
    split = known_split(path, split, rows)
    chosen: dict[str, np.ndarray] = {}

    def list_once(name: str) -> int:
        groups: dict[int, list[bytes]] = {}
        place = {files[row]: row for row in rows[name]}
        for row in rows[name]:
            groups.setdefault(0 if labels.ndim > 1 else int(labels[row]), []).append(files[row])
        ordered, _ = order_files(groups.items(), name if drawn else "")
        chosen[name] = np.array([place[bytes(file)] for file in ordered], np.int64)
        return len(ordered)

    parts = resolve_split(split, rows, list_once)
    picked = np.concatenate([chosen[part.name][part.start : part.stop] for part in parts])
    paths = np.array([files[row] for row in picked], np.bytes_)
    return TableSource(os.path.dirname(path), paths, labels[picked], drawn), classes


def _read_csv(path: str) -> dict[str, list[Any]]:
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file)
        names = [name.strip() for name in next(reader, [])]
        rows = [row for row in reader if row]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _read_parquet(path: str) -> dict[str, list[Any]]:
    from pyarrow import parquet  # only for those who have such files

    known = {*_PATHS, "label", "labels", "split"}
    names = [name for name in parquet.read_schema(path).names if name in known]
    return parquet.read_table(path, columns=names).to_pydict()


def _text(value: Any) -> str:
    """A value as text, "" for none; whole numbers have no fraction.

    Raises:
      ValueError: it is a list, a structure or bytes, or holds what no name can.
    """
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or "\0" in str(value):
        raise ValueError(f"{value!r} is neither text nor a number")
    return str(value).strip()


def _texts(where: str, name: str, values: Sequence[Any]) -> list[str]:
    """A column of which every row has a value.

    Raises:
      UserError: the first row that has none, or something else.
    """
    texts: list[str] = []
    for number, value in enumerate(values, start=1):
        try:
            texts.append(_text(value))
        except ValueError as error:
            raise UserError(f"{where}: {name} of row {number}: {error}.") from None
    if empty := [number for number, text in enumerate(texts, start=1) if not text]:
        raise UserError(
            f"{where}: {counted(len(empty), 'row')} without a {name}, first row {empty[0]}."
        )
    return texts


def _column(where: str, columns: Mapping[str, list[Any]], *names: str) -> tuple[str, list[Any]]:
    """The first column of these that is there, with its name."""
    for name in names:
        if name in columns:
            return name, columns[name]
    raise UserError(
        f"{where} has no column {' or '.join(map(repr, names))}, but "
        f"{list_names(columns) or 'none'}.{nearest(names[0], columns)}"
    )


def _several(where: str, values: Sequence[Any]) -> list[list[str]]:
    """The labels of each row, of a list or of text with separators."""
    given = []
    for number, value in enumerate(values, start=1):
        try:
            parts = value if isinstance(value, list) else _text(value).split(_SEPARATOR)
            given.append([text for text in map(_text, parts) if text])
        except ValueError as error:
            raise UserError(f"{where}: labels of row {number}: {error}.") from None
    return given


def _labels(
    where: str, columns: Mapping[str, list[Any]], naming: Iterable[int]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names, and labels of all rows: int32 [N] or uint8 [N, K]."""
    several = "labels" in columns
    name, values = _column(where, columns, "labels" if several else "label", "labels")
    given = _several(where, values) if several else [[x] for x in _texts(where, name, values)]
    found = {each for row in naming for each in given[row]}
    if odd := [each for each in found if not each.isprintable()]:
        raise UserError(f"{where}: the class {odd[0]!r} is no text; save the table as UTF-8.")
    are_numbers = all(each.isdecimal() and len(each) < 16 for each in found)
    classes = sorted(found, key=lambda each: (int(each) if are_numbers else 0, each))
    if len(classes) < 2 - several:
        raise UserError(f"{where}: {counted(len(classes), 'class')}; a classifier needs two.")
    numbers = {each: number for number, each in enumerate(classes)}
    if unknown := sorted({each for row in given for each in row} - found):
        raise UserError(
            f"{where}: {counted(len(unknown), 'class')} in another split than 'train' only: "
            f"{list_names(unknown)}."
        )
    if not several:
        return tuple(classes), np.array([numbers[row[0]] for row in given], np.int32)
    labels = np.zeros((len(given), len(classes)), np.uint8)
    for number, row in enumerate(given):
        labels[number, [numbers[each] for each in row]] = 1
    return tuple(classes), labels
