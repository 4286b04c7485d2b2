"""ReaL labels: what is really to be seen on ImageNet's validation images (2006.07159).

Two forms: `real.json` of github.com/google-research/reassessed-imagenet, a list of 50,000 lists of
labels in the order of the files ILSVRC2012_val_00000001.JPEG to ..._00050000.JPEG; and the feature
`real_label` of the TensorFlow Dataset `imagenet2012_real`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vit_jax.data.datasets import Dataset
from vit_jax.data.sources import CheckedSource
from vit_jax.data.threads import map_threads
from vit_jax.errors import UserError
from vit_jax.files.atomic import read_json

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
FEATURE = "real_label"


@runtime_checkable
class StoredFeatures(Protocol):
    """A source whose examples hold more than an image and a label."""

    def stored(self, index: int) -> dict[str, list[Any]]:
        """All features of example `index` but its image, each as a flat list."""


def real_labels(dataset: Dataset, path: str = "") -> list[list[int]] | None:
    """The labels of every example, in the dataset's numbering of the classes.

    Args:
      dataset: ImageNet's validation images, or some of them, with all 1,000 classes.
      path: of `real.json`; "" for the labels that the dataset itself has.

    Returns:
      None where neither is there.

    Raises:
      UserError: the file is something else, or does not fit the dataset.
    """
    source = dataset.source
    if path:
        labels = _read(path)
        numbers = map_threads(lambda index: _number(source, index), range(len(source)), chunk=256)
        found = []
        for index, number in enumerate(numbers):
            if number > len(labels):
                raise UserError(
                    f"--real={path} has labels for {len(labels)} images, but example {index} is "
                    f"number {number}."
                )
            found.append(labels[number - 1])
    elif isinstance(source, StoredFeatures) and FEATURE in source.stored(0):
        found = list(map_threads(lambda i: source.stored(i)[FEATURE], range(len(source))))
    else:
        return None
    highest = max((max(each) for each in found if each), default=-1)
    if highest < 0:
        raise UserError(f"{path or dataset.name}: no image of {dataset.split!r} has a ReaL label.")
    if highest >= dataset.num_classes:
        raise UserError(
            f"{path or dataset.name}: its labels go up to {highest}, but the dataset has "
            f"{dataset.num_classes} classes; ReaL labels are for all classes of ImageNet."
        )
    return found


def _read(path: str) -> list[list[int]]:
    labels = read_json(Path(path))
    good = isinstance(labels, list) and all(
        isinstance(each, list) and all(type(label) is int and label >= 0 for label in each)
        for each in labels
    )
    if not good:
        raise UserError(f"--real={path} is no list of lists of labels; is it real.json?")
    return labels


def _number(source: Any, index: int) -> int:
    """Of an image among the 50,000, counted from 1."""
    name = ""
    if isinstance(source, StoredFeatures):
        stored = source.stored(index)
        name = stored["file_name"][0].decode() if stored.get("file_name") else ""
    elif isinstance(source, CheckedSource):
        name = os.path.basename(source.describe(index))
    match = NUMBER.search(name)
    if match is None or not int(match[1]):
        raise UserError(
            f"--real: example {index} is called {name!r}, not ILSVRC2012_val_00000001.JPEG or so; "
            "ReaL labels are for ImageNet's validation images."
        )
    return int(match[1])
