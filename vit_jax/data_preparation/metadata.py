"""What TFDS reads first in a prepared directory: features, splits, class names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info, naming, splits

from vit_jax.data.tfds_reader import INFO_FILE
from vit_jax.files.manifest import MANIFEST

FILE_FORMAT = "array_record"
UNREADABLE = "unreadable_images.txt"
_OWN_FILES = (INFO_FILE, MANIFEST, UNREADABLE)


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
    info = tfds.core.DatasetInfo(
        builder=dataset_info.DatasetIdentity(
            name=name, version=tfds.core.Version(version), data_dir=str(folder), module_name=""
        ),
        description=description,
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(names=list(class_names)),
                "file_name": tfds.features.Text(),
            }
        ),
        supervised_keys=("image", "label"),
    )
    info.set_file_format(FILE_FORMAT)
    info.set_splits(
        splits.SplitDict(
            [
                splits.SplitInfo(
                    name=split,
                    shard_lengths=each.shard_lengths,
                    num_bytes=each.num_bytes,
                    filename_template=naming.ShardedFileTemplate(
                        data_dir=folder,
                        dataset_name=name,
                        split=split,
                        filetype_suffix=FILE_FORMAT,
                    ),
                )
                for split, each in sizes.items()
            ]
        )
    )
    info.write_to_directory(folder)


def copy_metadata(
    source: Path, folder: Path, *, name: str, description: str, sizes: Mapping[str, SplitSizes]
) -> None:
    """Metadata of the set prepared in `source`, for its records in other shards.

    Files other than shards are copied: features, class names, licence.
    """
    info = json.loads((source / INFO_FILE).read_text(encoding="utf-8"))
    for path in source.iterdir():
        if path.suffix in (".json", ".txt", ".md") and path.name not in _OWN_FILES:
            shutil.copyfile(path, folder / path.name)
    info["name"] = name
    info["description"] = "\n\n".join(filter(None, [info.pop("description", ""), description]))
    info["fileFormat"] = FILE_FORMAT
    info.pop("alternativeFileFormats", None)
    info["splits"] = [
        {
            "name": split,
            "shardLengths": [str(length) for length in each.shard_lengths],
            "numBytes": str(each.num_bytes),
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        }
        for split, each in sizes.items()
    ]
    (folder / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
