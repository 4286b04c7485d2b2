"""`check_prepared`: verifies that a prepared dataset is unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2
from tqdm import tqdm

from vit_jax.data import tfds_reader
from vit_jax.data.decode import decodes
from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError, one_line
from vit_jax.files.manifest import MANIFEST, digest, read_manifest


def check_prepared(directory: str, *, full: bool = False) -> list[tuple[str, str]]:
    """Lists the damaged files of a prepared `.../NAME/VERSION`, and what is wrong with each.

    `full` also decodes every image. UserError if there are no intact checksums.
    """
    folder = Path(os.path.expanduser(directory)).absolute()
    if (manifest := read_manifest(folder)) is None:
        what = f"has no intact {MANIFEST}"
        raise UserError(f"{folder}: {what}; give a .../NAME/VERSION prepared by vit_jax.")
    files, shards = manifest["files"], manifest["note"]["records"]
    image_key = ""
    if full and not _difference(folder / tfds_reader.INFO_FILE, *files[tfds_reader.INFO_FILE]):
        image_key = tfds_reader.image_key(tfds.builder_from_directory(str(folder)).info)

    def reason(name: str) -> str:
        changed = _difference(folder / name, *files[name])
        if not changed and image_key and name in shards:
            return _undecodable(folder / name, image_key)
        return changed

    checked = map_threads(reason, files, chunk=1)
    reasons = tqdm(checked, "checking files", len(files), mininterval=10)
    return sorted((name, why) for name, why in zip(files, reasons, strict=True) if why)


def _difference(path: Path, size: int, sha256: str) -> str:
    """How a file differs from its checksum; "" if it does not."""
    try:
        size_now, sha256_now = digest(path)
    except OSError as error:
        return one_line(error)
    if size_now != size:
        return f"has {size_now} bytes instead of {size}"
    return "" if sha256_now == sha256 else "its bytes have changed"


def _undecodable(shard: Path, image_key: str) -> str:
    """Which image of an intact shard cannot be decoded; "" if all can."""
    reader = array_record_module.ArrayRecordReader(str(shard))
    for index in range(reader.num_records()):
        example = tf_example_pb2.Example.FromString(reader.read([index])[0])
        if not decodes(example.features.feature[image_key].bytes_list.value[0]):
            return f"the image of record {index} cannot be decoded"
    reader.close()
    return ""
