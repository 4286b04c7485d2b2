"""Folders written by `save_to_disk` of Hugging Face `datasets`, with random access.

A folder of one split holds `state.json`, which lists its Arrow files (streams of record batches,
all columns in each); a `DatasetDict` holds `dataset_dict.json` and a folder per split. Files are
memory-mapped, with pyarrow alone. Images keep the stored order and are decoded on first use. The
layout is that of github.com/huggingface/datasets, 2.0 to 5.2.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.check_images import usable_images
from vit_jax.data.folder import known_split
from vit_jax.data.sources import Part, Parts, check_classes, check_columns, resolve_split
from vit_jax.data.table import number_labels
from vit_jax.errors import UserError, counted, one_line
from vit_jax.files.paths import read_object


class ArrowSource(Parts):
    """Images of a saved folder; `columns` holds `label`, int32 [N], if there are classes."""

    def __init__(
        self,
        files: Mapping[str, Sequence[str]],
        parts: Sequence[Part],
        image: str,
        columns: Mapping[str, np.ndarray],
        texts: Sequence[str],
    ):
        super().__init__(parts)
        self.columns = columns
        self._files, self._image, self._texts = files, image, texts

    def __getitem__(self, index: int) -> dict[str, Any]:
        split, row = self.locate(index)
        table = _table(tuple(self._files[split]))
        labels = {name: each[index] for name, each in self.columns.items()}
        texts = {name: table[name][row].as_py() or "" for name in self._texts}
        return {"image": self._read(index), **labels, **texts}

    def _read(self, index: int) -> bytes:
        split, row = self.locate(index)
        table = _table(tuple(self._files[split]))
        stored = table[self._image][row].as_py() or {}
        image = stored.get("bytes")
        if image is None:
            if not stored.get("path"):
                raise ValueError("the image is missing")
            folder = os.path.dirname(self._files[split][0])
            image = Path(os.path.join(folder, stored["path"])).read_bytes()
        return image

    def check(self, on_bad_image: str) -> ArrowSource:
        """Decodes every image, see `usable_images`."""
        kept = usable_images(len(self), self._read, self.describe, on_bad_image)
        source = self.keep(kept)
        source.columns = {name: each[kept] for name, each in self.columns.items()}
        return source

    def identity(self) -> Iterable[str]:
        """Split, name and size of every file."""
        for split in dict.fromkeys(part.name for part in self.parts):
            for file in self._files[split]:
                yield f"{split} {os.path.basename(file)} {os.path.getsize(file)}"


@functools.lru_cache(maxsize=16)  # per process; a memory-mapped file costs no memory
def _table(files: tuple[str, ...]) -> Any:
    import pyarrow

    tables = []
    for file in files:
        try:
            tables.append(pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all())
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise UserError(f"{file} is not an Arrow stream: {one_line(error)}.") from error
    return pyarrow.concat_tables(tables)


def _files(path: Path) -> dict[str, list[str]]:
    """Files of each split."""
    if (path / "dataset_dict.json").is_file():
        names = read_object(path / "dataset_dict.json", splits=list)["splits"]
        folders = {str(name): path / str(name) for name in names}
    else:
        name = read_object(path / "state.json").get("_split") or "train"
        folders = {name if re.fullmatch(r"[\w-]+", name) else "train": path}
    found = {}
    for split, folder in folders.items():
        data = read_object(folder / "state.json", _data_files=list)["_data_files"]
        found[split] = [str(folder / str(each["filename"])) for each in data]
    return {split: files for split, files in found.items() if files}


def open_saved(
    name: str,
    split: str,
    label_key: str = "",
    *,
    needs_label: bool = True,
    columns: Sequence[str] = (),
) -> tuple[ArrowSource, tuple[str, ...]]:
    """Returns the examples selected by a split expression, and the class names.

    The label is the feature `label_key`, by default `label` or the only ClassLabel; for text and
    integer labels the classes are those of `train`. Ops may read text columns. UserError for
    damaged files, or if there is no image or no label.
    """
    path, where = Path(os.path.abspath(os.path.expanduser(name))), f"dataset.name={name!r}"
    files = _files(path)
    if not files:
        raise UserError(f"{where} has no Arrow files.")
    split = known_split(name, split, files)
    tables = {each: _table(tuple(names)) for each, names in files.items()}
    schema = next(iter(tables.values())).schema
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    images = [key for key, each in features.items() if each.get("_type") == "Image"]
    if not images:
        listed = ", ".join(schema.names)
        raise UserError(f"{where} has no Image feature; its columns: {listed}.")
    image = "image" if "image" in images else images[0]
    texts = [
        key for key in schema.names if str(schema.field(key).type) in ("string", "large_string")
    ]
    check_columns(name, columns, texts)
    parts = resolve_split(split, files, lambda each: tables[each].num_rows)
    classes: tuple[str, ...] = ()
    labels: dict[str, np.ndarray] = {}
    if needs_label or label_key:
        key = _label_key(where, features, label_key)
        classes, numbers = _labels(where, tables, key, features[key])
        labels = {"label": np.concatenate([numbers[p.name][p.start : p.stop] for p in parts])}
        check_classes(where, classes, sum(map(len, numbers.values())))
        if (missing := int((labels["label"] < 0).sum())) > 0:
            found = f"{where}: {counted(missing, 'example')} of {split!r} without {key!r}"
            raise UserError(f"{found}; choose a split that has labels.")
    return ArrowSource(files, parts, image, labels, columns), classes


def _label_key(where: str, features: Mapping[str, Any], label_key: str) -> str:
    known = [key for key, each in features.items() if each.get("_type") == "ClassLabel"]
    simple = [key for key, each in features.items() if each.get("_type") == "Value"]
    usual = [label_key] if label_key else ["label", *(known if len(known) == 1 else [])]
    chosen = next((key for key in usual if key in (*known, *simple)), "")
    if not chosen:
        found = f"dataset.label_key={label_key!r} is not a label" if label_key else "no label found"
        hint = f"set dataset.label_key to one of {', '.join([*known, *simple]) or 'none'}"
        raise UserError(f"{where}: {found}; {hint}.")
    return chosen


def _labels(
    where: str, tables: Mapping[str, Any], key: str, feature: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Class names, and the labels of each split, int32 [N], -1 where missing."""
    if feature["_type"] == "ClassLabel":
        names = tuple(map(str, feature["names"]))
        numbers = {
            split: table[key].fill_null(-1).to_numpy().astype(np.int32)
            for split, table in tables.items()
        }
        if (highest := max(each.max(initial=-1) for each in numbers.values())) >= len(names):
            raise UserError(f"{where}: {key} {highest} has no name; there are {len(names)} names.")
        return names, numbers
    given = {split: table[key].to_pylist() for split, table in tables.items()}
    rows = [(split, value) for split, values in given.items() for value in values]
    stated = [i for i, (_, value) in enumerate(rows) if value is not None]
    texts = [[str(rows[i][1])] for i in stated]
    in_train = [n for n, i in enumerate(stated) if "train" not in tables or rows[i][0] == "train"]
    names, found = number_labels(f"{where}: {key}", texts, in_train, multi_label=False)
    every = np.full(len(rows), -1, np.int32)
    every[stated] = found
    ends = np.cumsum([len(values) for values in given.values()])[:-1]
    return names, dict(zip(given, np.split(every, ends), strict=True))
