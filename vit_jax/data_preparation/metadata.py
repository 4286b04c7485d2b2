"""What TFDS reads first in a prepared directory: features, splits, class names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info

from vit_jax.data.tfds_reader import INFO_FILE
from vit_jax.files.manifest import MANIFEST

FILE_FORMAT = "array_record"
UNREADABLE = "unreadable_images.txt"


class SplitSizes(NamedTuple):
    """Records per shard, and bytes of all records."""

    shard_lengths: list[int]
    num_bytes: int


def shard_name(name: str, split: str, number: int, count: int) -> str:
    return f"{name}-{split}.{FILE_FORMAT}-{number:05d}-of-{count:05d}"


def write_image_metadata(
    folder: Path,
    *,
    name: str,
    version: str,
    description: str,
    class_names: Sequence[str],
    sizes: Mapping[str, SplitSizes],
) -> None:
    """Metadata of a set with the features of `imagenet2012`: `image`, `label`, `file_name`."""
    features = {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(names=list(class_names)),
        "file_name": tfds.features.Text(),
    }
    identity = dataset_info.DatasetIdentity(
        name=name, version=tfds.core.Version(version), data_dir=str(folder), module_name=""
    )
    tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
    ).write_to_directory(folder)
    _write_splits(folder, name, description, sizes)


def copy_metadata(
    source: Path, folder: Path, *, name: str, description: str, sizes: Mapping[str, SplitSizes]
) -> None:
    """Metadata of the set prepared in `source` (features, licence), for new shards."""
    for path in source.iterdir():
        if path.suffix in (".json", ".txt", ".md") and path.name not in (MANIFEST, UNREADABLE):
            shutil.copyfile(path, folder / path.name)
    info = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    description = "\n\n".join(filter(None, [info.get("description"), description]))
    _write_splits(folder, name, description, sizes)


def _write_splits(
    folder: Path, name: str, description: str, sizes: Mapping[str, SplitSizes]
) -> None:
    """Says in `dataset_info.json` which shards there are."""
    path = folder / INFO_FILE
    info = json.loads(path.read_text(encoding="utf-8"))
    info.pop("alternativeFileFormats", None)
    info.update(name=name, description=description, fileFormat=FILE_FORMAT)
    info["splits"] = [
        {
            "name": split,
            "shardLengths": [str(length) for length in each.shard_lengths],
            "numBytes": str(each.num_bytes),
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        }
        for split, each in sizes.items()
    ]
    path.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
