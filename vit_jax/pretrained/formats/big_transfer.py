"""The published `.npz` files of Big Transfer (`gs://bit_models/BiT-M-R50x1.npz`).

Each group norm stands below the convolution that follows it (`a`, `b`, `c` of a unit), and the head
is a convolution of one pixel. Those files were trained with a max-pooling that pads with zeros, see
`models/bit.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import numpy as np

from vit_jax.pretrained.files.array_file import Container
from vit_jax.pretrained.formats.rows import Op, Row, norm, numbers, read_rows, write_rows
from vit_jax.pretrained.formats.stored import Stored

_CONV = "standardized_conv2d/kernel"
_GROUP_NORM = ("/group_norm/gamma", "/group_norm/beta")
_HEAD = Op(lambda x, _: x[0, 0], lambda x: x[None, None])  # [1, 1, D, K] <-> [D, K]


def _rows(names: Iterable[str]) -> list[Row]:
    """The table, with the units that `names`, of either side, have."""
    rows = [
        Row(("root_block/conv_root/kernel",), f"resnet/root_block/{_CONV}"),
        *norm("norm-pre-head", "resnet", *_GROUP_NORM),
        Row(("head/kernel",), "resnet/head/conv2d/kernel", _HEAD),
        Row(("head/bias",), "resnet/head/conv2d/bias"),
    ]
    for block, unit in numbers(r"block(\d+)/unit(\d+)/", names):
        ours = f"block{block}/unit{unit:02}"
        rows += [Row((f"{ours}/conv_proj/kernel",), f"resnet/{ours}/a/proj/{_CONV}")]
        for number, letter in enumerate("abc", start=1):
            rows += norm(f"{ours}/gn{number}", f"resnet/{ours}/{letter}", *_GROUP_NORM)
            rows += [Row((f"{ours}/conv{number}/kernel",), f"resnet/{ours}/{letter}/{_CONV}")]
    return rows


def is_big_transfer(names: Iterable[str]) -> bool:
    return any(name.startswith("resnet/root_block/") for name in names)


def read_big_transfer(container: Container) -> Stored:
    """Reads a file of these names; UserError for an array of another shape."""
    logging.warning(
        "BiT was trained with zeros around its first max-pooling; the model here pads as "
        "big_vision's does: logits differ by some 2e-3 before fine-tuning."
    )
    # Some files number the convolutions of a unit.
    names = {re.sub(r"(conv2d)_\d+/", r"\1/", name): name for name in container.arrays}
    stored = Stored("npz_published")
    read_rows(stored, container, _rows(names), names=names)
    return stored


def to_big_transfer(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Flat names of ours -> those of these files."""
    return write_rows(_rows(params), params, "npz_published")
