"""Folders written by `save_to_disk` of Hugging Face `datasets`, with random access.

A folder of one split holds `state.json`, which lists its Arrow files (streams of record batches,
all columns in each); a `DatasetDict` holds `dataset_dict.json` and a folder per split. Files are
memory-mapped. The layout is that of `datasets` 2.0 to 5.2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.data.labelled import LabelledSource, Listing, number_images
from vit_jax.data.sources import Request, check_columns
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import read_object


@dataclasses.dataclass(frozen=True, eq=False)
class ArrowSource(LabelledSource):
    """Images of a saved folder; `places` are those of `number_images`."""

    files: Mapping[str, tuple[str, ...]]  # of each split
    image: str  # its name among the features
    texts: tuple[str, ...]  # columns that are read with an image

    def __getitem__(self, index: int) -> dict[str, Any]:
        texts = {name: self._stored(name, index) or "" for name in self.texts}
        return {**super().__getitem__(index), **texts}

    def _stored(self, name: str, index: int) -> Any:
        split, row = self.places[index].item()
        return _table(self.files[split])[name][row].as_py()

    def read(self, index: int) -> bytes:
        stored = self._stored(self.image, index) or {}
        if (content := stored.get("bytes")) is not None:
            return content
        if not stored.get("path"):
            raise ValueError("the image is missing")
        folder = os.path.dirname(self.files[self.places[index]["split"]][0])
        return Path(folder, stored["path"]).read_bytes()

    def identity(self) -> Iterable[str]:
        """Split, name and size of every file."""
        for split in dict.fromkeys(self.places["split"].tolist()):
            for file in self.files[split]:
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


def _files(path: Path) -> dict[str, tuple[str, ...]]:
    """Files of each split."""
    if (path / "dataset_dict.json").is_file():
        names = read_object(path / "dataset_dict.json", splits=list)["splits"]
        folders = {str(name): path / str(name) for name in names}
    else:
        name = read_object(path / "state.json").get("_split") or "train"
        folders = {name if re.fullmatch(r"[\w-]+", name) else "train": path}
    files = {}
    for split, folder in folders.items():
        data = read_object(folder / "state.json", _data_files=list)["_data_files"]
        files[split] = tuple(str(folder / str(file["filename"])) for file in data)
    return {split: names for split, names in files.items() if names}


def open_saved(request: Request) -> tuple[ArrowSource, tuple[str, ...]]:
    """Returns source and class names of a saved folder.

    The label is `label_key`, by default `label` or the only ClassLabel; text and integers name
    classes. UserError for damaged files, without an image or a label, and see `Listing.open`.
    """
    path, where = Path(os.path.abspath(request.path)), f"dataset.name={request.path!r}"
    files = _files(path)
    if not files:
        raise UserError(f"{where} has no Arrow files.")
    tables = {split: _table(names) for split, names in files.items()}
    schema = next(iter(tables.values())).schema
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    images = [key for key, feature in features.items() if feature.get("_type") == "Image"]
    if not images:
        raise UserError(f"{where} has no Image feature; its columns: {', '.join(schema.names)}.")
    image = "image" if "image" in images else images[0]
    texts = [key for key in schema.names if str(schema.field(key).type).endswith("string")]
    check_columns(request.path, request.columns, texts)
    places, splits = number_images({split: table.num_rows for split, table in tables.items()})
    labels, classes = None, None
    if request.needs_label or request.label_key:
        key = _label_key(where, features, request.label_key)
        where = f"{where}: {key}"
        labels, classes = _labels(where, tables.values(), key, features[key])
    source = ArrowSource(places, {}, files, image, request.columns)
    return Listing(where, source, splits, labels, classes=classes).open(request.split)


def _label_key(where: str, features: Mapping[str, Any], label_key: str) -> str:
    known = [key for key, feature in features.items() if feature.get("_type") == "ClassLabel"]
    simple = [key for key, feature in features.items() if feature.get("_type") == "Value"]
    usual = [label_key] if label_key else ["label", *(known if len(known) == 1 else [])]
    chosen = next((key for key in usual if key in (*known, *simple)), "")
    if not chosen:
        labels = ", ".join([*known, *simple]) or "none"
        raise UserError(f"{where}: dataset.label_key={label_key!r} must be one of {labels}.")
    return chosen


def _labels(
    where: str, tables: Iterable[Any], key: str, feature: Mapping[str, Any]
) -> tuple[list[str], Sequence[str] | None]:
    """Labels of all examples and names of classes; see `Listing`."""
    values = [value for table in tables for value in table[key].to_pylist()]
    names = feature.get("names")
    if names is None:
        return ["" if value is None else str(value) for value in values], None
    if (highest := max((value for value in values if value is not None), default=-1)) >= len(names):
        raise UserError(f"{where} {highest} has no name; there are {len(names)} names.")
    return ["" if value is None or value < 0 else names[value] for value in values], names
