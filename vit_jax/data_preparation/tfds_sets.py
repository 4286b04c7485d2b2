"""Sets of TFDS: prepared ones, to be stored in other shards, and those that TFDS downloads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from vit_jax.data import tfds_reader
from vit_jax.data.records import Records
from vit_jax.data_preparation.examples import Example, image_of
from vit_jax.data_preparation.listing import Listing, make_rows
from vit_jax.errors import UserError, check_local, nearest
from vit_jax.files.manifest import MANIFEST, write_manifest


class PreparedSet:
    """A prepared directory; its examples keep their order and all their features.

    Raises:
      UserError: TFDS has not prepared it, or it has no images.
    """

    def __init__(self, directory: str):
        try:
            info = tfds.builder_from_directory(directory).info
        except Exception as error:  # TFDS raises many kinds, over several lines
            reason = str(error).splitlines()[0]
            raise UserError(f"{directory}: TFDS has not prepared it ({reason}).") from None
        self._directory, self._splits = directory, info.splits
        self.name = info.name
        self.version = os.path.join(info.config_name or "", str(info.version))
        self._image_key = tfds_reader.image_key(info)
        shards = [path for each in info.splits.values() for path in each.filenames]
        self.files = [f"{directory}/{name}" for name in (tfds_reader.INFO_FILE, *shards)]
        self._records = {
            split: Records(info.file_format.value, tfds_reader.extents(info.splits, split))
            for split, each in info.splits.items()
            if each.num_examples
        }
        if not self._records:
            raise UserError(f"{directory}: has no examples.")

    def listing(self) -> Listing:
        """Rows that tell only how many examples there are, and their mean size."""
        for split in set(self._splits) - set(self._records):
            logging.warning("%s: split %r has no examples, left out", self._directory, split)
        splits = {}
        for split, records in self._records.items():
            size = self._splits[split].num_bytes // len(records)
            splits[split] = make_rows([b""] * len(records), size)
        return Listing((), np.array([], np.bytes_), splits)

    def read(self, _listing: Listing, split: str, start: int, stop: int) -> Iterator[Example]:
        records = self._records[split]
        for index in range(start, stop):
            where = records.describe(index)
            try:
                record = records[index]
            except (OSError, RuntimeError) as error:  # RuntimeError: array_record's
                reason = str(error).split(";")[0].splitlines()[0]
                raise UserError(f"{where}: cannot be read ({reason}).") from None
            yield Example(index, record, image_of(record, self._image_key), where)


def build_tfds(name: str, data_dir: str, manual_dir: str = "") -> str:
    """Lets TFDS download and prepare one of its sets, adds checksums, returns the directory.

    Args:
      name: `NAME[/CONFIG][:VERSION]`.
      data_dir: TFDS root, where downloads are kept too; "" for TFDS's default.
      manual_dir: folder with files that TFDS cannot download.

    Raises:
      UserError: no such set, or TFDS cannot prepare it.
    """
    match = tfds_reader.NAME.fullmatch(name)
    known = registered.list_imported_builders()
    if match is None or match["name"] not in known:
        raise UserError(
            f"{name!r} is neither a folder nor a set of TFDS.{nearest(name.split('/')[0], known)}"
        )
    check_local("--data_dir", data_dir)
    root = os.path.abspath(os.path.expanduser(data_dir or tfds_reader.default_data_dir()))
    config = tfds.download.DownloadConfig(manual_dir=manual_dir or None, try_download_gcs=False)
    logging.info("TFDS prepares %s in %s", name, root)
    try:
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare(download_config=config)
    except ImportError as error:
        raise UserError(
            f'TFDS needs {error.name} to prepare {name}; pip install "vit_jax[tf]".'
        ) from None
    except Exception as error:  # many kinds, over several lines
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"TFDS cannot prepare {name} ({lines[0]}).") from error
    folder = Path(builder.data_dir)
    if not (folder / MANIFEST).exists():
        lengths = {
            name: length
            for split in builder.info.splits.values()
            for name, length in zip(split.filenames, split.shard_lengths, strict=True)
        }
        write_manifest(folder, {"plan": {"kind": "tfds", "source": name}, "records": lengths})
    return str(folder)
