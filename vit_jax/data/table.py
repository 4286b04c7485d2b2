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
    files = [os.fsencode(str(name)) for name in _column(where, columns, _PATHS)]
    if not files:
        raise UserError(f"{where}: the table has no rows.")
    drawn = "split" not in columns
    if drawn:
        rows = {"train": list(range(len(files))), "test": list(range(len(files)))}
    else:
        rows = {}
        for row, name in enumerate(columns["split"]):
            rows.setdefault(str(name).strip(), []).append(row)
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
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
    columns: dict[str, list[Any]]
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    if "labels" in columns:
        columns["labels"] = [
            [each.strip() for each in text.split(_SEPARATOR) if each.strip()]
            for text in columns["labels"]
        ]
    return columns


def _read_parquet(path: str) -> dict[str, list[Any]]:
    from pyarrow import parquet  # only for those who have such files

    known = {*_PATHS, "label", "labels", "split"}
    names = [name for name in parquet.read_schema(path).names if name in known]
    return parquet.read_table(path, columns=names).to_pydict()


def _column(where: str, columns: Mapping[str, list[Any]], names: Sequence[str]) -> list[Any]:
    """The column with one of these names."""
    for name in names:
        if name in columns:
            return columns[name]
    raise UserError(
        f"{where} has no column {' or '.join(map(repr, names))}, but "
        f"{list_names(columns) or 'none'}.{nearest(names[0], columns)}"
    )


def _labels(
    where: str, columns: Mapping[str, list[Any]], naming: Iterable[int]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names, and labels of all rows: int32 [N] or uint8 [N, K]."""
    several = "labels" in columns
    values = _column(where, columns, ("label", "labels"))
    if several:
        given = [[str(each) for each in row or ()] for row in columns["labels"]]
    else:
        given = [[] if value is None else [str(value).strip()] for value in values]
        empty = [row for row, names in enumerate(given) if not names or not names[0]]
        if empty:
            raise UserError(
                f"{where}: {counted(len(empty), 'row')} without a label, first row {empty[0] + 1}."
            )
    found = {name for row in naming for name in given[row]}
    classes = sorted(found, key=int if all(name.isdecimal() for name in found) else None)
    if len(classes) < 2 - several:
        raise UserError(f"{where}: {counted(len(classes), 'class')}; a classifier needs two.")
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({name for names in given for name in names} - found):
        raise UserError(
            f"{where}: {counted(len(unknown), 'class')} in another split than 'train' only: "
            f"{list_names(unknown)}."
        )
    if not several:
        return tuple(classes), np.array([numbers[names[0]] for names in given], np.int32)
    labels = np.zeros((len(given), len(classes)), np.uint8)
    for row, names in enumerate(given):
        labels[row, [numbers[name] for name in names]] = 1
    return tuple(classes), labels
