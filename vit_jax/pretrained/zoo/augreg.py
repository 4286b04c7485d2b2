"""The AugReg collection ("How to train your ViT?", 2106.10270): selection by its index.csv.

It has one row per fine-tuning run, with accuracies on held-out data.
"""

import csv
import dataclasses
import os
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
from vit_jax.pretrained.zoo import augreg_names
from vit_jax.pretrained.zoo.entries import AUGREG, Accuracy, ZooEntry, augreg_entry

INDEX = f"{AUGREG}/index.csv"
# Columns read as fractions; an empty cell is a run without a result.
_FRACTIONS = ("final_val", "final_test", "adapt_final_val", "adapt_final_test")

Row = dict[str, Any]


def read_index(path: str | os.PathLike[str]) -> list[Row]:
    """Rows of index.csv: strings, and the fractions as floats, -1 if empty."""
    with reading(f"{path}:", "delete it, it is not an AugReg index"):
        text = Path(path).read_text(encoding="utf-8")
        rows: list[Row] = list(csv.DictReader(text.splitlines(), restval=""))
        return [row | {name: float(row[name] or -1) for name in _FRACTIONS} for row in rows]


def select(
    index: list[Row], name: str, ds: str = "i21k", adapt_ds: str = "", resolution: int | None = None
) -> ZooEntry:
    """The checkpoint that the official code would select, without using a test set.

    The pre-trained file is the one with the best held-out accuracy in its own pre-training
    (`final_val`); among its fine-tunings, the one with the best `adapt_final_val`. `name` is like
    B/16 or B_16, `ds` i1k, i21k (300 epochs) or i21k_30; `resolution` None: the better one.
    UserError for a value that is not in the index.
    """
    if resolution is not None and not adapt_ds:
        known = ", ".join(augreg_names.ADAPTATION)
        raise UserError(f"resolution={resolution} is of a fine-tuning: add adapt_ds ({known}).")
    rows = _filter(index, "name", augreg_names.MODELS.get(name, name))
    best = max(_filter(rows, "ds", ds), key=lambda row: row["final_val"])
    entry = augreg_entry(best["filename"])
    dataset, column = ("imagenet2012", "final_test") if ds == "i1k" else (ds, "final_val")
    if adapt_ds:
        rows = _filter(_filter(rows, "filename", best["filename"]), "adapt_ds", adapt_ds)
        if resolution is not None:
            rows = _filter(rows, "adapt_resolution", str(resolution))
        best = max(rows, key=lambda row: row["adapt_final_val"])
        entry = augreg_entry(best["adapt_filename"])
        dataset, column = adapt_ds, "adapt_final_test"
    if best[column] < 0:
        return entry
    accuracy = Accuracy(round(100 * best[column], 2), f"AugReg index.csv, {column}", dataset)
    return dataclasses.replace(entry, accuracy=(accuracy,))


def parse_choice(text: str) -> dict[str, Any]:
    """`B/16,adapt_ds=imagenet2012,resolution=384` as keyword arguments of `select`."""
    name, *options = text.split(",")
    arguments: dict[str, Any] = {"name": name}
    for option in options:
        key, _, value = option.partition("=")
        check_known(f"augreg:{text}: key", key, ["ds", "adapt_ds", "resolution"])
        if key == "resolution" and not value.isdecimal():
            raise UserError(f"augreg:{text}: resolution={value!r} must be a number of pixels.")
        arguments[key] = int(value) if key == "resolution" else value
    return arguments


def _filter(rows: list[Row], column: str, value: str) -> list[Row]:
    check_known(f"AugReg index: {column}", value, sorted({row[column] for row in rows}))
    return [row for row in rows if row[column] == value]
