"""Writing one shard: whole or not at all, and always the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
from array_record.python import array_record_module

from vit_jax.data.decode import decode_image, decodes
from vit_jax.data.ops import ResizeSmall
from vit_jax.data_preparation.examples import Example, with_image
from vit_jax.errors import UserError
from vit_jax.files.atomic import UNFINISHED, sync, write_atomically
from vit_jax.files.manifest import digest

# One record per group, as Grain and TFDS want it for random access; JPEGs cannot be compressed
# further, and trying to costs 30 us per image, at reading another 6.
WRITER_OPTIONS = "group_size:1,uncompressed"


@dataclasses.dataclass(frozen=True)
class Shrink:
    """Scales an image file's short side down to `short_side` pixels, as a JPEG of `quality`.

    Area interpolation; upright, as the orientation tag is lost. Smaller images stay as they are.
    """

    short_side: int
    quality: int

    def __call__(self, data: bytes) -> bytes:
        """Raises ValueError where the file cannot be decoded."""
        pixels = decode_image(data, channels=3, exif=True)
        if min(pixels.shape[:2]) <= self.short_side:
            return data
        small = ResizeSmall(self.short_side, "area").apply(pixels, None)  # type: ignore[arg-type]
        options = [cv2.IMWRITE_JPEG_QUALITY, self.quality]
        _, encoded = cv2.imencode(".jpg", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), options)
        return encoded.tobytes()


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a split that becomes a file.

    Attributes:
      path: of the finished file.
      receipt: of the JSON file that says that it is finished, and what it holds.
      split: the examples' split.
      start: first position in it.
      stop: position after the last.
      size: of the images in the source, in bytes.
    """

    path: Path
    receipt: Path
    split: str
    start: int
    stop: int
    size: int


def write_shard(
    shard: Shard, examples: Iterable[Example], image_key: str, shrink: Shrink | None
) -> dict[str, Any]:
    """Writes a shard under another name, syncs and renames it, then leaves a receipt.

    Images that cannot be decoded are left out.

    Returns:
      The receipt: {"records", "num_bytes" of them, "bytes" and "sha256" of the file, "unreadable":
      where the left-out images are}.

    Raises:
      UserError: the source cannot be read or the shard cannot be written.
    """
    records: dict[int, bytes] = {}
    unreadable: dict[int, str] = {}
    for each in examples:
        record = _stored(each, image_key, shrink)
        if record is None:
            unreadable[each.position] = each.where
        else:
            records[each.position] = record
    temporary = shard.path.with_name(shard.path.name + UNFINISHED)
    try:
        writer = array_record_module.ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
        for index in sorted(records):
            writer.write(records[index])
        writer.close()
        sync(temporary)
        size, sha256 = digest(temporary)
        temporary.rename(shard.path)
        sync(shard.path.parent)
        receipt = {
            "records": len(records),
            "num_bytes": sum(map(len, records.values())),
            "bytes": size,
            "sha256": sha256,
            "unreadable": [unreadable[index] for index in sorted(unreadable)],
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


def _stored(example: Example, image_key: str, shrink: Shrink | None) -> bytes | None:
    """The record that goes into the shard; None where the image cannot be decoded."""
    if shrink is None:
        return example.record if decodes(example.image) else None
    try:
        small = shrink(example.image)
    except ValueError:
        return None
    if small is example.image:
        return example.record
    return with_image(example.record, image_key, small)


def read_receipt(shard: Shard) -> dict[str, Any] | None:
    """What is known of a finished shard; None if it has to be written."""
    try:
        receipt = json.loads(shard.receipt.read_text(encoding="utf-8"))
        return receipt if os.path.getsize(shard.path) == receipt["bytes"] else None
    except (OSError, ValueError):
        return None
