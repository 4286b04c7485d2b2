"""What TFDS reads first in a prepared directory: features, splits, class names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow_datasets as tfds


class SplitSizes(NamedTuple):
    """Records per shard, and bytes of all records."""

    shard_lengths: list[int]
    num_bytes: int


def shard_name(name: str, split: str, number: int, count: int) -> str:
    return f"{name}-{split}.array_record-{number:05d}-of-{count:05d}"


def write_image_metadata(
    folder: Path,
    *,
    version: str,
    description: str,
    class_names: Sequence[str],
    sizes: Mapping[str, SplitSizes],
) -> None:
    """Metadata for the shards in a folder, with the features of `imagenet2012`."""
    features = {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(names=list(class_names)),
        "file_name": tfds.features.Text(),
    }
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        version=version,
        description=description,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
        split_infos=[
            tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=num_bytes)
            for split, (lengths, num_bytes) in sizes.items()
        ],
        check_data=False,
    )
