"""`check_prepared`: whether a prepared set is still what was written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tqdm import tqdm

from vit_jax.data import tfds_reader
from vit_jax.data.decode import decodes
from vit_jax.data.sources import map_threads
from vit_jax.data_preparation.shards import image_of
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
    files, lengths = manifest["files"], manifest["note"]["records"]
    image_key = ""
    if full and not _changed(folder / tfds_reader.INFO_FILE, *files[tfds_reader.INFO_FILE]):
        image_key = tfds_reader.image_key(tfds.builder_from_directory(str(folder)).info)

    def reason(name: str) -> str:
        changed = _changed(folder / name, *files[name])
        if changed or not image_key or name not in lengths:
            return changed
        return _undecodable(folder / name, lengths[name], image_key)

    reasons = tqdm(
        map_threads(reason, files, chunk=1), "checking files", len(files), mininterval=10
    )
    return sorted(Damage(name, why) for name, why in zip(files, reasons, strict=True) if why)


def _changed(path: Path, size: int, sha256: str) -> str:
    """How a file differs from its checksum; "" if it does not."""
    try:
        found = digest(path)
    except OSError as error:
        return error.strerror or str(error)
    if found[0] != size:
        return f"has {found[0]} bytes instead of {size}"
    return "" if found[1] == sha256 else "its bytes have changed"


def _undecodable(shard: Path, length: int, image_key: str) -> str:
    """Why a shard cannot be read, or which of its images cannot be decoded; "" for neither."""
    try:
        reader = array_record_module.ArrayRecordReader(str(shard))
        for index in range(length):
            if not decodes(image_of(reader.read([index])[0], image_key)):
                return f"the image of record {index} cannot be decoded"
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        return str(error).split(";")[0]
    return ""
