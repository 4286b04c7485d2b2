"""The examples of a source, one by one, as the records that a TFDS set holds."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import tfds_reader
from vit_jax.data.records import Records
from vit_jax.data_preparation.listing import Listing
from vit_jax.errors import UserError

IMAGES = "images"  # files of rows are tars or image files
RECORDS = "records"  # the file of all rows is a prepared TFDS directory; offsets are positions


class Stored(NamedTuple):
    """An example as TFDS serialises it, and its image file."""

    record: bytes
    image: bytes


class Reader(Protocol):
    """Reads examples of splits by position; opened in the process that uses it."""

    image_key: str

    def read(self, split: str, index: int) -> Stored: ...

    def in_file_order(self, split: str, start: int, stop: int) -> list[int]:
        """Positions `start:stop`, sorted by where they lie: disks like that."""

    def describe(self, split: str, index: int) -> str: ...


@functools.lru_cache(maxsize=1)
def open_reader(kind: str, listing_folder: str) -> Reader:
    """The reader for a listing; `kind` is IMAGES or RECORDS."""
    listing = Listing.load(Path(listing_folder))
    if kind == RECORDS:
        return RecordReader(os.fsdecode(bytes(listing.files[0])))
    return ImageReader(listing.files, listing.splits)


class ImageReader:
    """Byte ranges of files, with their label and file name.

    Args:
      files: paths, bytes [F].
      splits: rows of each, see `listing.make_rows`.
    """

    image_key = "image"

    def __init__(self, files: np.ndarray, splits: Mapping[str, np.ndarray]):
        self._files = files
        self._splits = splits
        self._open: tuple[int, IO[bytes]] | None = None  # the last file and its number

    def __del__(self) -> None:
        if self._open is not None:
            self._open[1].close()

    def read(self, split: str, index: int) -> Stored:
        row = self._splits[split][index]
        file = self._file(int(row["file"]))
        try:
            image = os.pread(file.fileno(), int(row["size"]), int(row["offset"]))
        except OSError as error:
            raise UserError(f"{self.describe(split, index)}: {error.strerror}.") from None
        if len(image) != row["size"]:
            raise UserError(f"{self.describe(split, index)}: truncated; copy it again.")
        name = bytes(row["name"])
        return Stored(serialize(image, int(row["label"]), name), image)

    def _file(self, number: int) -> IO[bytes]:
        """Neighbours in file order share a file: one is open at a time."""
        if self._open is None or self._open[0] != number:
            path = bytes(self._files[number])
            try:
                opened = open(path, "rb", buffering=0)  # noqa: SIM115 - stays open for the next
            except OSError as error:
                raise UserError(f"{os.fsdecode(path)}: {error.strerror}.") from None
            if self._open is not None:
                self._open[1].close()
            self._open = number, opened
        return self._open[1]

    def in_file_order(self, split: str, start: int, stop: int) -> list[int]:
        rows = self._splits[split][start:stop]
        return (np.lexsort((rows["offset"], rows["file"])) + start).tolist()

    def describe(self, split: str, index: int) -> str:
        row = self._splits[split][index]
        path, name = os.fsdecode(bytes(self._files[row["file"]])), os.fsdecode(bytes(row["name"]))
        return path if path.endswith(f"/{name}") else f"{path}: {name}"


def serialize(image: bytes, label: int, file_name: bytes) -> bytes:
    """A `tf.train.Example` of `image`, `label` and `file_name`, the features of `imagenet2012`."""
    example = tf_example_pb2.Example()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(image)
    feature["label"].int64_list.value.append(label)
    feature["file_name"].bytes_list.value.append(file_name)
    return example.SerializeToString(deterministic=True)


class RecordReader:
    """The records of a prepared TFDS directory, in its order."""

    def __init__(self, directory: str):
        info = tfds.builder_from_directory(directory).info
        self.image_key = tfds_reader.image_key(info)
        self._records = {
            split: Records(info.file_format.value, tfds_reader.extents(info.splits, split))
            for split, each in info.splits.items()
            if each.num_examples
        }

    def read(self, split: str, index: int) -> Stored:
        try:
            record = self._records[split][index]
        except (OSError, RuntimeError) as error:  # RuntimeError: array_record's
            reason = str(error).split(";")[0].splitlines()[0]
            raise UserError(f"{self.describe(split, index)}: cannot be read ({reason}).") from None
        return Stored(record, image_of(record, self.image_key))

    def in_file_order(self, split: str, start: int, stop: int) -> list[int]:
        return list(range(start, stop))

    def describe(self, split: str, index: int) -> str:
        return self._records[split].describe(index)


def image_of(record: bytes, image_key: str) -> bytes:
    """The image file in a serialised example."""
    example: Any = tf_example_pb2.Example.FromString(record)
    return example.features.feature[image_key].bytes_list.value[0]


def with_image(record: bytes, image_key: str, image: bytes) -> bytes:
    """The same example with another image file."""
    example = tf_example_pb2.Example.FromString(record)
    example.features.feature[image_key].bytes_list.value[0] = image
    return example.SerializeToString(deterministic=True)
