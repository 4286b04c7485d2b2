"""`check_prepared`: whether a prepared set is still what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from array_record.python import array_record_module

from vit_jax.data import tfds_reader
from vit_jax.data.decode import decodes
from vit_jax.data.threads import map_threads
from vit_jax.data_preparation.examples import image_of
from vit_jax.data_preparation.progress import Progress
from vit_jax.errors import UserError
from vit_jax.files.manifest import MANIFEST, digest, read_manifest


class Damage(NamedTuple):
    """A file of the set, and what is wrong with it."""

    file: str
    reason: str


def check_prepared(directory: str, *, full: bool = False) -> list[Damage]:
    """Compares every file with its checksum; `full` decodes every image too.

    The directory is a prepared one, `.../NAME/VERSION`; UserError where it has no checksums.
    """
    folder = Path(os.path.expanduser(directory)).absolute()
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder}: holds no {MANIFEST}; give .../NAME/VERSION that we prepared.")
    manifest = read_manifest(folder)
    if manifest is None:
        return [Damage(MANIFEST, "is damaged itself")]
    damage = list(_compare(folder, manifest["files"]))
    intact = set(manifest["files"]) - {each.file for each in damage}
    if full and tfds_reader.INFO_FILE in intact:
        image_key = tfds_reader.image_key(tfds.builder_from_directory(str(folder)).info)
        lengths = manifest["note"]["records"]
        shards = {name: lengths[name] for name in sorted(intact & set(lengths))}
        damage += _undecodable(folder, shards, image_key)
    return sorted(damage)


def _compare(folder: Path, files: Mapping[str, list[Any]]) -> Iterator[Damage]:
    """Files that are missing or differ from their checksums."""

    def reason(name: str) -> str:
        try:
            size, sha256 = digest(folder / name)
        except OSError as error:
            return error.strerror or str(error)
        if size != files[name][0]:
            return f"has {size} bytes instead of {files[name][0]}"
        return "" if sha256 == files[name][1] else "its bytes have changed"

    progress = Progress("checksums", sum(size for size, _ in files.values()) / 1e6, "MB")
    for name, found in zip(files, map_threads(reason, files, chunk=1), strict=True):
        progress.add(files[name][0] / 1e6)
        if found:
            yield Damage(name, found)


def _undecodable(folder: Path, shards: Mapping[str, int], image_key: str) -> Iterator[Damage]:
    """Shards, given with their lengths, that cannot be read or whose images do not decode."""

    def reason(name: str) -> str:
        try:
            reader = array_record_module.ArrayRecordReader(str(folder / name))
            for index in range(shards[name]):
                if not decodes(image_of(reader.read([index])[0], image_key)):
                    return f"the image of record {index} cannot be decoded"
            reader.close()
        except (RuntimeError, ValueError, IndexError) as error:
            return str(error).split(";")[0]
        return ""

    progress = Progress("decoding", sum(shards.values()), "images")
    for name, found in zip(shards, map_threads(reason, shards, chunk=1), strict=True):
        progress.add(shards[name])
        if found:
            yield Damage(name, found)
