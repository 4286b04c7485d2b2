"""The examples of a source, one by one, and the records that a TFDS set holds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data_preparation.listing import Listing
from vit_jax.errors import UserError


class Example(NamedTuple):
    """An image file at a position of a split, its class, its name, and where it is stored."""

    position: int
    image: bytes
    label: int
    name: bytes
    where: str


def read_images(listing: Listing, split: str, start: int, stop: int) -> Iterator[Example]:
    """Examples `start:stop` of a split, in the order in which they lie on disk.

    Raises:
      UserError: a file cannot be read, or ends too early.
    """
    rows = listing.splits[split][start:stop]
    in_file_order = np.lexsort((rows["offset"], rows["file"])).tolist()
    for number, group in itertools.groupby(in_file_order, lambda position: rows["file"][position]):
        path = os.fsdecode(bytes(listing.files[number]))
        try:
            with open(path, "rb") as file:
                for position in group:
                    row, name = rows[position], bytes(rows["name"][position])
                    shown = os.fsdecode(name)
                    where = path if path.endswith(f"/{shown}") else f"{path}: {shown}"
                    file.seek(row["offset"])
                    image = file.read(row["size"])
                    if len(image) != row["size"]:
                        raise UserError(f"{where}: truncated; copy it again.")
                    yield Example(start + position, image, int(row["label"]), name, where)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}.") from None


def serialize(image: bytes, label: int, file_name: bytes) -> bytes:
    """A `tf.train.Example` of `image`, `label` and `file_name`, the features of `imagenet2012`."""
    example = tf_example_pb2.Example()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(image)
    feature["label"].int64_list.value.append(label)
    feature["file_name"].bytes_list.value.append(file_name)
    return example.SerializeToString(deterministic=True)


def image_of(record: bytes, image_key: str) -> bytes:
    """The image file in a serialized example."""
    example = tf_example_pb2.Example.FromString(record)
    return example.features.feature[image_key].bytes_list.value[0]
