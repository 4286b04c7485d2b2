"""Sets that TFDS downloads and prepares itself."""

from __future__ import annotations

import logging
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from vit_jax.data import tfds_reader
from vit_jax.errors import UserError, check_local, missing_package, nearest
from vit_jax.files.manifest import MANIFEST, write_manifest


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
        raise UserError(f"{name!r} is no set of TFDS.{nearest(name.split('/')[0], known)}")
    check_local("--data_dir", data_dir)
    root = tfds_reader.data_root(data_dir)
    config = tfds.download.DownloadConfig(manual_dir=manual_dir or None, try_download_gcs=False)
    logging.info("TFDS prepares %s in %s", name, root)
    try:
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare(download_config=config)
    except ImportError as error:
        raise missing_package(f"preparing {name}", str(error.name), "tf") from None
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
