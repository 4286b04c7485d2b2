"""`check_prepared`: whether a prepared set is still what was written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from vit_jax.data import tfds_reader
from vit_jax.data.image_check import decodes, map_threads
from vit_jax.data_preparation.parallel import Progress
from vit_jax.data_preparation.readers import image_of
from vit_jax.errors import UserError
from vit_jax.files.manifest import MANIFEST, digest, read_manifest

SAMPLE = 16  # images per shard


class Damage(NamedTuple):
    """A file of the set, and what is wrong with it."""

    file: str
    reason: str


def check_prepared(directory: str, *, full: bool = False) -> list[Damage]:
    """Compares every file with its checksum and every shard's length, and decodes images.

    Args:
      directory: a prepared folder, `.../NAME/VERSION`.
      full: decode every image, instead of SAMPLE per shard.

    Returns:
      What is damaged; nothing if all is well.

    Raises:
      UserError: there is no prepared set, or it was prepared without checksums.
    """
    folder = Path(directory).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{folder}: No such directory.")
    if not (folder / MANIFEST).exists():
        nested = [str(path.parent) for path in sorted(folder.rglob(MANIFEST))][:3]
        hint = f"; did you mean {' or '.join(nested)}?" if nested else "; see prepare_data.py tfds."
        raise UserError(f"{folder}: holds no {MANIFEST}{hint}")
    manifest = read_manifest(folder)
    if manifest is None:
        return [Damage(MANIFEST, "is damaged itself")]
    damage = list(_compare(folder, manifest["files"]))
    intact = set(manifest["files"]) - {each.file for each in damage}
    if tfds_reader.INFO_FILE in intact:
        try:
            info = tfds.builder_from_directory(str(folder)).info
        except Exception as error:  # TFDS raises many kinds, over several lines
            return [*damage, Damage(tfds_reader.INFO_FILE, str(error).splitlines()[0])]
        lengths = manifest["note"]["records"]
        damage += _lengths(info, lengths)
        shards = sorted(set(lengths) & intact)
        damage += _images(folder, shards, lengths, tfds_reader.image_key(info), full)
    return sorted(damage)


def _compare(folder: Path, files: dict[str, list[Any]]) -> Iterator[Damage]:
    """Files that are missing or differ from their checksums."""

    def reason(name: str) -> str:
        try:
            size = os.path.getsize(folder / name)
            if size != files[name][0]:
                return f"has {size} bytes instead of {files[name][0]}"
            return "" if digest(folder / name) == files[name] else "its bytes have changed"
        except OSError as error:
            return error.strerror or str(error)

    progress = Progress("checksums", sum(size for size, _ in files.values()), "bytes")
    for name, found in zip(files, map_threads(reason, files, chunk=1), strict=True):
        progress.add(files[name][0])
        if found:
            yield Damage(name, found)


def _lengths(info: Any, lengths: dict[str, int]) -> Iterator[Damage]:
    """Shards whose length the metadata tell otherwise."""
    told = {
        os.path.basename(name): length
        for split in info.splits.values()
        for name, length in zip(split.filenames, split.shard_lengths, strict=True)
    }
    for name in sorted(set(told) | set(lengths)):
        if told.get(name) != lengths.get(name):
            yield Damage(
                tfds_reader.INFO_FILE,
                f"{name} has {told.get(name)} records there and {lengths.get(name)} in {MANIFEST}",
            )


def _images(
    folder: Path, shards: list[str], lengths: dict[str, int], image_key: str, full: bool
) -> Iterator[Damage]:
    """Shards with another number of records, or with images that do not decode."""

    def reason(name: str) -> str:
        try:
            reader = array_record_module.ArrayRecordReader(str(folder / name))
            count = reader.num_records()
            if count != lengths[name]:
                return f"has {count} records instead of {lengths[name]}"
            some = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(int))
            for index in range(count) if full else some.tolist():
                if not decodes(image_of(reader.read([index])[0], image_key)):
                    return f"the image of record {index} cannot be decoded"
            reader.close()
        except (RuntimeError, ValueError, IndexError) as error:
            return str(error).split(";")[0]
        return ""

    count = sum(lengths[name] if full else min(SAMPLE, lengths[name]) for name in shards)
    logging.info("decoding %d images of %d shards", count, len(shards))
    progress = Progress("decoding", count, "images")
    for name, found in zip(shards, map_threads(reason, shards, chunk=1), strict=True):
        progress.add(lengths[name] if full else min(SAMPLE, lengths[name]))
        if found:
            yield Damage(name, found)
