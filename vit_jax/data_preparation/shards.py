"""Writing one shard: whole or not at all, and always the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import cv2
from array_record.python import array_record_module

from vit_jax.data.decode import decode_image
from vit_jax.data.image_check import decodes
from vit_jax.data.preprocess import ResizeSmall
from vit_jax.data_preparation.readers import open_reader, with_image
from vit_jax.errors import UserError
from vit_jax.files.manifest import UNFINISHED, digest, sync, write_atomically

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
      reader: kind of the source's reader.
      listing: folder of the source's listing.
      split: the examples' split.
      start: first position in it.
      stop: position after the last.
      size: of the images in the source, in bytes.
      shrink: what to do to the images, if anything.
    """

    path: str
    receipt: str
    reader: str
    listing: str
    split: str
    start: int
    stop: int
    size: int
    shrink: Shrink | None


def write_shard(shard: Shard) -> dict[str, Any]:
    """Writes a shard under another name, syncs and renames it, then leaves a receipt.

    Images that cannot be decoded are left out.

    Returns:
      The receipt: {"records", "num_bytes" of them, "bytes" and "sha256" of the file, "unreadable":
      where the left-out images are}.

    Raises:
      UserError: the source cannot be read or the shard cannot be written.
    """
    records, unreadable = _read(shard)
    temporary = f"{shard.path}.{os.getpid()}{UNFINISHED}"
    try:
        writer = array_record_module.ArrayRecordWriter(temporary, WRITER_OPTIONS)
        for record in records:
            writer.write(record)
        writer.close()
        sync(Path(temporary))
        size, sha256 = digest(Path(temporary))
        os.rename(temporary, shard.path)
        sync(Path(shard.path).parent)
        receipt = {
            "records": len(records),
            "num_bytes": sum(map(len, records)),
            "bytes": size,
            "sha256": sha256,
            "unreadable": unreadable,
        }
        write_atomically(Path(shard.receipt), json.dumps(receipt))
    except (OSError, RuntimeError) as error:  # RuntimeError: array_record's
        reason = error.strerror if isinstance(error, OSError) else str(error).split(";")[0]
        raise UserError(
            f"{shard.path}: cannot be written ({reason}); the same command goes on from here."
        ) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return receipt


def _read(shard: Shard) -> tuple[list[bytes], list[str]]:
    """The records, and where images that do not decode are stored."""
    reader = open_reader(shard.reader, shard.listing)
    records: dict[int, bytes] = {}
    unreadable = {}
    for index in reader.in_file_order(shard.split, shard.start, shard.stop):
        record, image = reader.read(shard.split, index)
        try:
            if shard.shrink is not None:
                small = shard.shrink(image)
                record = with_image(record, reader.image_key, small) if small != image else record
            elif not decodes(image):
                raise ValueError
        except ValueError:
            unreadable[index] = reader.describe(shard.split, index)
        else:
            records[index] = record
    return [records[i] for i in sorted(records)], [unreadable[i] for i in sorted(unreadable)]


def read_receipt(shard: Shard) -> dict[str, Any] | None:
    """What is known of a finished shard; None if it has to be written."""
    try:
        receipt = json.loads(Path(shard.receipt).read_text(encoding="utf-8"))
        return receipt if os.path.getsize(shard.path) == receipt["bytes"] else None
    except (OSError, ValueError):
        return None
