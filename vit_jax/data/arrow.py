"""Folders written by `save_to_disk` of Hugging Face `datasets`, with random access.

A folder of one split holds `state.json`, which lists its Arrow files (streams of record batches,
all columns in each); a `DatasetDict` holds `dataset_dict.json` and a folder per split. Files are
memory-mapped. The layout is that of `datasets` 2.0 to 5.2.
"""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.data.labelled import LabelledSource, Listing, number_images
from vit_jax.data.sources import Request, check_columns
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import check_file, parse_json, read_file, read_object, reading


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
        if not (path := stored.get("path")):
            raise ValueError("the image is missing")
        return read_file(Path(self.files[self.places[index]["split"]][0]).parent / path)

    def identity(self) -> Iterable[str]:
        """Split, name and size of every file."""
        for split in dict.fromkeys(self.places["split"].tolist()):
            for file in self.files[split]:
                yield f"{split} {os.path.basename(file)} {os.path.getsize(file)}"


@functools.lru_cache(maxsize=16)  # per process; a memory-mapped file costs no memory
def _table(files: tuple[str, ...]) -> Any:
    """The rows of all files; UserError: damaged, cut, or of different columns."""
    import pyarrow

    tables = []
    for file in files:
        try:
            check_file(file)
            stream = pyarrow.memory_map(file)
            tables.append(pyarrow.ipc.open_stream(stream).read_all())
            tables[-1].validate(full=True)  # wrong offsets end the process; 2 ms per GB of images
            stream.seek(-8, os.SEEK_CUR)
            if stream.read() != b"\xff\xff\xff\xff\0\0\0\0":  # pyarrow needs no end mark
                raise ValueError("its end is missing, or not after its last batch; copy it again")
            table = pyarrow.concat_tables(tables)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"{file} is not an Arrow stream: {one_line(error)}.") from error
    return table


def _files(path: Path) -> dict[str, tuple[str, ...]]:
    """Files of each split."""
    if (path / "dataset_dict.json").is_file():
        names = read_object(path / "dataset_dict.json", splits=list)["splits"]
        folders = {str(name): path / str(name) for name in names}
    else:
        name = str(read_object(path / "state.json").get("_split") or "train")
        folders = {name if re.fullmatch(r"[\w-]+", name) else "train": path}
    files = {}
    for split, folder in folders.items():
        data = read_object(folder / "state.json", _data_files=list)["_data_files"]
        with reading(f"{folder}/state.json"):
            names = [os.path.normpath(folder / file["filename"]) for file in data]
        if len({*names}) < len(names) or not all(name.startswith(f"{path}/") for name in names):
            raise UserError(f"{folder}/state.json lists a file twice, or one outside of {path}.")
        files[split] = tuple(names)
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
    places, splits = number_images({split: table.num_rows for split, table in tables.items()})
    schemas = [table.schema for table in tables.values()]
    image, key, classes = image_and_label(where, request, schemas)
    source = ArrowSource(places, {}, files, image, request.columns)
    return listing(where, source, splits, tables, key, classes).open(request.split)


def image_and_label(
    where: str, request: Request, schemas: Sequence[Any]
) -> tuple[str, str, list[str] | None]:
    """The columns of tables with the image and the label, "" if it is not needed, and its classes.

    UserError without one of them, or without a column of text that is asked for.
    """
    schema = schemas[0]
    with reading(where, "says nothing usable of its columns"):
        told = [_features(schema) for schema in schemas]
        features = told[0]
        names = {key: [*map(str, f["names"])] for key, f in features.items() if f.get("names")}
    images = [key for key, feature in features.items() if feature.get("_type") == "Image"]
    if not images:
        raise UserError(f"{where} has no Image feature; its columns: {', '.join(schema.names)}.")
    image = "image" if "image" in images else images[0]
    texts = [field.name for field in schema if _TEXT.fullmatch(str(field.type))]
    check_columns(request.path, request.columns, texts)
    has_labels = request.needs_label or request.label_key
    key = _label_key(where, features, request.label_key) if has_labels else ""
    with reading(where, "has other columns than it says"):
        for other, of_other in zip(schemas, told, strict=True):
            if key and of_other.get(key, {}).get("names") != features[key].get("names"):
                raise ValueError(f"its files differ in the names of the classes of {key}")
            used = other.empty_table().select([image, key or image, *request.columns])
            if not is_image(field := used.schema.field(0)):
                raise ValueError(f"{image} is {field.type}")
    return image, key, names.get(key)


def is_image(field: Any) -> bool:
    """Whether a column has images as `datasets` stores them."""
    content, path = "bytes: (large_)?binary", "path: (large_)?string"
    kind = f"struct<({content}, {path}|{path}, {content})>"
    return bool(re.fullmatch(kind, str(field.type)))


# One text, or several of which one is drawn.
_TEXT = re.compile(r"(large_)?string|(large_)?list<\w+: (large_)?string>")


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Of each column what `datasets` says in a file, or else what its type tells."""
    told = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
    if features := told.get("info", {}).get("features"):
        return {key: feature for key, feature in features.items() if isinstance(feature, dict)}
    simple = re.compile(r"(large_)?string|u?int\d+|double|float")
    values = {f.name: {"_type": "Value"} for f in schema if simple.fullmatch(str(f.type))}
    return values | {field.name: {"_type": "Image"} for field in schema if is_image(field)}


def listing(
    where: str,
    source: ArrowSource,
    splits: Mapping[str, Sequence[int]],
    tables: Mapping[str, Any],
    key: str,
    classes: Sequence[str] | None,
) -> Listing:
    """The images of `tables`, by split, with the labels in their column `key`."""
    where = f"{where}: {key}".removesuffix(": ")
    labels = list(_labels(where, tables, key, classes)) if key else None
    return Listing(where, source, splits, labels, classes=classes)


def _label_key(where: str, features: Mapping[str, Any], label_key: str) -> str:
    known = [key for key, feature in features.items() if feature.get("_type") == "ClassLabel"]
    simple = [key for key, feature in features.items() if feature.get("_type") == "Value"]
    usual = [label_key] if label_key else ["label", *(known if len(known) == 1 else [])]
    chosen = next((key for key in usual if key in (*known, *simple)), "")
    if not (known or simple):
        raise UserError(f"{where} has no labels; its columns: {', '.join(features)}.")
    if not chosen:
        labels = ", ".join([*known, *simple])
        raise UserError(f"{where}: dataset.label_key={label_key!r} must be one of {labels}.")
    return chosen


def _labels(where: str, tables: Mapping[str, Any], key: str, names: Any) -> Iterator[str]:
    """The text of each label, "" if it is missing; UserError for one that is no class."""
    known: dict[Any, str] = {None: "", -1: "", **dict(enumerate(names))} if names else {}
    for split, table in tables.items():
        for row, value in enumerate(table[key].to_pylist()):
            is_simple = value is None or isinstance(value, str | int | float)
            if not is_simple or (known and value not in known):
                raise UserError(f"{where} is {value!r:.80} in {split}[{row}], which is no class.")
            is_missing = value is None or value != value
            yield known[value] if known else "" if is_missing else sys.intern(str(value))
