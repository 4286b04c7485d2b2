"""Writes a shard from its images: complete or not at all, and always with the same bytes."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data.decode import damage, decode_image, resize
from vit_jax.errors import UserError, one_line
from vit_jax.files.manifest import digest
from vit_jax.files.paths import read_object, reading, replacing, write_atomically

# One record per group, as Grain and TFDS need for random access; JPEGs do not compress further.
WRITER_OPTIONS = "group_size:1,uncompressed"


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive examples of a split, stored in one file."""

    path: Path  # of the finished file
    receipt: Path  # of the JSON file that marks it as finished, with its contents
    split: str
    rows: np.ndarray  # [N], see origins.Listing


def write_shard(shard: Shard, short_side: int, quality: int) -> dict[str, Any]:
    """Writes a shard under another name, syncs and renames it, then writes and returns a receipt.

    Images that cannot be decoded are left out, and listed there as `unreadable`.
    """
    if shard.receipt.exists() and shard.path.exists():
        return read_object(shard.receipt)
    written: list[tuple[int, bytes, str]] = []  # row, record, where the image is
    for number, image, where in _read_images(shard.rows):
        row, record = shard.rows[number], b""
        with contextlib.suppress(ValueError):
            if short_side:
                image = shrink(image, short_side, quality)
            if short_side or not damage(image):
                record = serialize(image, int(row["label"]), bytes(row["name"]))
        written.append((number, record, where))
    records = [record for _, record, _ in sorted(written) if record]
    try:
        with replacing(shard.path) as temporary:
            writer = array_record_module.ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
            for record in records:
                writer.write(record)
            writer.close()
            size, sha256 = digest(temporary)
        receipt = {
            "records": len(records),
            "num_bytes": sum(map(len, records)),
            "bytes": size,
            "sha256": sha256,
            "unreadable": [where for _, record, where in sorted(written) if not record],
        }
        write_atomically(shard.receipt, json.dumps(receipt))
    except (OSError, RuntimeError) as error:  # RuntimeError: array_record's
        reason = f"cannot be written ({one_line(error).split(';')[0]})"
        raise UserError(f"{shard.path}: {reason}; the same command resumes from here.") from None
    return receipt


def _read_images(rows: np.ndarray) -> Iterator[tuple[int, bytes, str]]:
    """Row, file and location of each image, in the order of bytes on disk."""
    images = []
    for number, (container, offset, size, _, name) in enumerate(rows.tolist()):
        name = os.fsdecode(name)
        path = container if offset else os.path.join(container, name)
        images.append((path, offset, size, number, f"{path}: {name}" if offset else path))
    for path, offset, size, number, where in sorted(images):
        with reading(path), open(path, "rb") as file:
            file.seek(offset)
            yield number, file.read(size), where


def shrink(data: bytes, short_side: int, quality: int) -> bytes:
    """A larger image file shrunk to `short_side`, as an upright JPEG; ValueError: it is damaged."""
    pixels = decode_image(data, channels=3, exif=True)
    short = min(pixels.shape[:2])
    if short <= short_side:
        return data
    height, width = (round(side * short_side / short) for side in pixels.shape[:2])
    small = cv2.cvtColor(resize(pixels, height, width, "area"), cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def serialize(image: bytes, label: int, file_name: bytes) -> bytes:
    """A `tf.train.Example` of `image`, `label` and `file_name`, the features of `imagenet2012`."""
    example = tf_example_pb2.Example()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(image)
    feature["label"].int64_list.value.append(label)
    feature["file_name"].bytes_list.value.append(file_name)
    return example.SerializeToString(deterministic=True)
