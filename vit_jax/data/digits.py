"""The 1,797 real handwritten digits that come with scikit-learn, as a TFDS dataset.

Scans of 8 x 8 pixels with 17 grey levels (UCI, "Optical Recognition of Handwritten Digits", its
test part). They keep scikit-learn's order: the last 300 were written by other people than the
first ones, so `test` is an honest test set, while a random split would flatter by several points.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data import tfds_reader
from vit_jax.errors import UserError

NAME = "sklearn_digits"
NUM_TRAIN = 1497


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """Grey 8 x 8 PNGs and labels 0-9; `train` is the first 1,497 scans, `test` the last 300."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,  # else `train[:300]` would not be the first 300 scans
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {
            "train": self._generate_examples(slice(0, NUM_TRAIN)),
            "test": self._generate_examples(slice(NUM_TRAIN, None)),
        }

    def _generate_examples(self, rows: slice) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = _load_scans()
        for key, (image, label) in enumerate(zip(images[rows], labels[rows], strict=True)):
            _, png = cv2.imencode(".png", image)
            # TFDS stores the bytes of a file object as they are; an array it would encode with
            # TensorFlow.
            yield key, {"image": io.BytesIO(png.tobytes()), "label": int(label)}


def _load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [1797, 8, 8] with 16 scaled to 255, and labels, int [1797]."""
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError(
            "dataset.name='digits' needs scikit-learn; install vit_jax[embedded]."
        ) from None
    digits = datasets.load_digits()
    return np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target


def prepare_digits(data_dir: str) -> str:
    """Writes the digits below `data_dir` unless they are there; returns their directory.

    Safe for several processes at once and for kills: each writes into a folder of its own and
    renames it at the end. The first one wins, and the others use what it wrote.

    Args:
      data_dir: root of the TFDS data; "" for TFDS's default.

    Raises:
      UserError: scikit-learn is missing, or the folder cannot be written.
    """
    root = os.path.abspath(os.path.expanduser(data_dir or tfds_reader.default_data_dir()))
    directory = os.path.join(root, NAME, str(SklearnDigits.VERSION))
    info = os.path.join(directory, tfds_reader.INFO_FILE)
    if os.path.isfile(info):
        return directory
    logging.getLogger(__name__).info("preparing the digits in %s", directory)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints a banner
            SklearnDigits(data_dir=root, file_format="array_record").download_and_prepare(
                download_config=tfds.download.DownloadConfig(try_download_gcs=False)
            )
    except UserError:
        raise
    except Exception as error:
        if os.path.isfile(info):
            return directory  # another process was faster
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"dataset.name='digits': cannot write to {directory} ({reason}); set dataset.data_dir."
        ) from error
    finally:
        tfds.enable_progress_bar()
    return directory
