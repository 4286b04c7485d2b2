"""ReaL labels: corrected labels of ImageNet's validation images (2006.07159).

`real.json` of github.com/google-research/reassessed-imagenet is a list of 50,000 lists of labels,
in the order of the files ILSVRC2012_val_00000001.JPEG to ..._00050000.JPEG.
"""

import itertools
import os
import re
from typing import Any

from vit_jax.data.datasets import Dataset
from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError
from vit_jax.files.paths import read_json, to_path

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


def real_labels(dataset: Dataset, path: str) -> list[list[int]]:
    """The labels of every example, in the dataset's class numbering.

    `dataset` has ImageNet's validation images, or some, in all 1,000 classes; UserError if `path`
    is not real.json, or does not match.
    """
    labels, source = read_json(to_path(path)), dataset.source
    if not isinstance(labels, list) or not all(map(_is_labels, labels)):
        raise UserError(f"--real={path} is not a list of lists of labels; is it real.json?")
    numbers = list(map_threads(lambda i: _number(source, i), range(len(source)), chunk=256))
    if max(numbers) > len(labels):
        raise UserError(f"--real={path} ends before image {max(numbers)} of {dataset.name}.")
    chosen = [labels[number - 1] for number in numbers]
    highest = max(itertools.chain.from_iterable(chosen), default=-1)
    if highest < 0:
        raise UserError(f"--real={path}: no images of {dataset.split!r} have ReaL labels.")
    if highest >= dataset.num_classes:
        raise UserError(
            f"--real={path}: labels go up to {highest}, but {dataset.name} has only "
            f"{dataset.num_classes} classes; ReaL labels are for all classes of ImageNet."
        )
    return chosen


def _is_labels(value: Any) -> bool:
    return isinstance(value, list) and all(type(label) is int and label >= 0 for label in value)


def _number(source: Any, index: int) -> int:
    """The number of an image among the 50,000, from 1."""
    if hasattr(source, "stored"):  # TFDS
        name = b"".join(source.stored(index).get("file_name", [])).decode()
    else:
        name = os.path.basename(source.describe(index))
    match = _NUMBER.search(name)
    if match is None or not int(match[1]):
        text = f"--real: example {index} is called {name!r}, not like ILSVRC2012_val_00000001.JPEG"
        raise UserError(f"{text}; ReaL labels are for ImageNet's validation images.")
    return int(match[1])
