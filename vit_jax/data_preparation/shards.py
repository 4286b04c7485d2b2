"""Writing one shard: whole or not at all, and always the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
from array_record.python import array_record_module

from vit_jax.data import geometry
from vit_jax.data.decode import decode_image, decodes
from vit_jax.data_preparation.examples import Example, serialize
from vit_jax.errors import UserError
from vit_jax.files.atomic import UNFINISHED, sync, write_atomically
from vit_jax.files.manifest import digest

# One record per group, as Grain and TFDS want it for random access; JPEGs cannot be compressed
# further, and trying to costs 30 us per image, at reading another 6.
WRITER_OPTIONS = "group_size:1,uncompressed"


class Shrink(NamedTuple):
    """Scales an image file's short side down to `short_side` pixels, as a JPEG of `quality`.

    Area interpolation; upright, as the orientation tag is lost. Smaller images stay as they are.
    """

    short_side: int
    quality: int

    def __call__(self, data: bytes) -> bytes:
        """Raises ValueError where the file cannot be decoded."""
        pixels = decode_image(data, channels=3, exif=True)
        short = min(pixels.shape[:2])
        if short <= self.short_side:
            return data
        height, width = (round(side * self.short_side / short) for side in pixels.shape[:2])
        small = cv2.cvtColor(geometry.resize(pixels, height, width, "area"), cv2.COLOR_RGB2BGR)
        return cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, self.quality])[1].tobytes()


class Shard(NamedTuple):
    """Examples `start:stop` of a split, which become a file."""

    path: Path  # of the finished file
    receipt: Path  # of the JSON file that says that it is finished, and what it holds
    split: str
    start: int
    stop: int
    size: int  # of the images in the source, in bytes


def write_shard(shard: Shard, examples: Iterable[Example], shrink: Shrink | None) -> dict[str, Any]:
    """Writes a shard under another name, syncs and renames it, then leaves a receipt.

    Images that cannot be decoded are left out.

    Returns:
      The receipt: {"records", "num_bytes" of them, "bytes" and "sha256" of the file, "unreadable":
      where the left-out images are}.

    Raises:
      UserError: the source cannot be read or the shard cannot be written.
    """
    found = sorted((each.position, _record(each, shrink), each.where) for each in examples)
    records = [record for _, record, _ in found if record]
    temporary = shard.path.with_name(shard.path.name + UNFINISHED)
    try:
        writer = array_record_module.ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
        for record in records:
            writer.write(record)
        writer.close()
        sync(temporary)
        size, sha256 = digest(temporary)
        temporary.rename(shard.path)
        sync(shard.path.parent)
        receipt = {
            "records": len(records),
            "num_bytes": sum(map(len, records)),
            "bytes": size,
            "sha256": sha256,
            "unreadable": [where for _, record, where in found if not record],
        }
        write_atomically(shard.receipt, json.dumps(receipt))
    except (OSError, RuntimeError) as error:  # RuntimeError: array_record's
        reason = getattr(error, "strerror", None) or str(error).split(";")[0]
        raise UserError(
            f"{shard.path}: cannot be written ({reason}); the same command resumes from here."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return receipt


def _record(example: Example, shrink: Shrink | None) -> bytes:
    """The record that goes into the shard; empty where the image cannot be decoded."""
    image = example.image
    if shrink is None and not decodes(image):
        return b""
    try:
        image = shrink(image) if shrink else image
    except ValueError:
        return b""
    return serialize(image, example.label, example.name)


def read_receipt(shard: Shard) -> dict[str, Any] | None:
    """What is known of a finished shard; None if it has to be written."""
    try:
        receipt = json.loads(shard.receipt.read_text(encoding="utf-8"))
        return receipt if os.path.getsize(shard.path) == receipt["bytes"] else None
    except (OSError, ValueError):
        return None
