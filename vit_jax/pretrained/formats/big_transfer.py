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

from vit_jax.pretrained.files.array_file import Container, read_arrays
from vit_jax.pretrained.formats.rows import SAME, Op, Row, match_rows, read_match
from vit_jax.pretrained.formats.stored import Stored

# Some files number the convolutions of a unit.
_NUMBERED = re.compile(r"/standardized_conv2d_\d+/")
_CONV = "standardized_conv2d/kernel"
# [1, 1, D, K] <-> [D, K]
_HEAD = Op(lambda x, heads, count: (x[0][0, 0],), lambda x: (x[0][None, None],))


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return (
        Row((f"{ours}/scale",), (f"{theirs}/group_norm/gamma",), SAME),
        Row((f"{ours}/bias",), (f"{theirs}/group_norm/beta",), SAME),
    )


def _unit() -> tuple[Row, ...]:
    ours, theirs = "block{b}/unit{u:02}", "resnet/block{b}/unit{u:02}"
    rows = [Row((f"{ours}/conv_proj/kernel",), (f"{theirs}/a/proj/{_CONV}",), SAME)]
    for number, letter in enumerate("abc", start=1):
        rows += _norm(f"{ours}/gn{number}", f"{theirs}/{letter}")
        rows += [Row((f"{ours}/conv{number}/kernel",), (f"{theirs}/{letter}/{_CONV}",), SAME)]
    return tuple(rows)


ROWS: tuple[Row, ...] = (
    Row(("root_block/conv_root/kernel",), (f"resnet/root_block/{_CONV}",), SAME),
    *_unit(),
    *_norm("norm-pre-head", "resnet"),
    Row(("head/kernel",), ("resnet/head/conv2d/kernel",), _HEAD),
    Row(("head/bias",), ("resnet/head/conv2d/bias",), SAME),
)


def is_big_transfer(names: Iterable[str]) -> bool:
    return any(name.startswith("resnet/root_block/") for name in names)


def read_big_transfer(container: Container) -> Stored:
    """Reads a file of these names.

    Raises:
      UserError: of arrays that belong together some are missing.
    """
    actual = {_NUMBERED.sub("/standardized_conv2d/", name): name for name in container.arrays}
    logging.warning(
        "BiT was trained with zeros around its first max-pooling; the model here pads as "
        "big_vision's does: logits differ by some 2e-3 before fine-tuning."
    )
    matches, left = match_rows(ROWS, actual, side="theirs")
    unexpected = tuple(actual[name] for name in left)
    stored = Stored("npz_published", {}, unexpected=unexpected)
    found = read_arrays(container, [actual[name] for match in matches for name in match.theirs])
    for match in matches:
        arrays: tuple[np.ndarray, ...] = tuple(found.pop(actual[name]) for name in match.theirs)
        stored.params.update(read_match(match, arrays, 1))
        for name in match.theirs:
            if (dtype := container.arrays[actual[name]].dtype) != "float32":
                stored.changed |= dict.fromkeys(match.ours, f"{dtype} as float32")
    return stored
