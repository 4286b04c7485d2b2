"""Decodes the image files of a source before training, so that damage is found at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.decode import captured_stderr, decodes, sample_warning
from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError
from vit_jax.files.manifest import read_or_none
from vit_jax.wording import list_names

_BLOCK = 512  # images decoded per block


class _Verdict(NamedTuple):
    usable: bool
    is_jpeg: bool = False
    remark: str = ""
    is_lost: bool = False  # cannot be opened


def usable_images(
    count: int, read: Callable[[int], Any], describe: Callable[[int], str], on_bad_image: str
) -> np.ndarray:
    """Decodes all image files; returns the numbers of those that decode, sorted, int64 [n].

    Warns of images that decode with a remark, or are likely to look wrong.

    Args:
      count: number of images.
      read: the file of image `n` as bytes, or its pixels; OSError or ValueError if it cannot be
        read.
      describe: where image `n` is stored.
      on_bad_image: "error", or "skip" to leave damaged images out.

    Raises:
      UserError: no image decodes, one does not and that is an error, or a file cannot be opened.
    """
    blocks = [range(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]
    verdicts = [verdict for block in blocks for verdict in _decode_block(read, block)]
    remarks = [
        f"{describe(n)} is {'used' if verdict.usable else 'treated as damaged'}: {verdict.remark}"
        for n, verdict in enumerate(verdicts)
        if verdict.remark
    ]
    if remarks:
        logging.getLogger(__name__).warning(list_names(remarks, 10))
    bad = [number for number, verdict in enumerate(verdicts) if not verdict.usable]
    if not bad:
        return np.arange(count)
    if lost := [describe(number) for number in bad if verdicts[number].is_lost]:
        are = f"{len(lost)} of {count} files cannot be opened: {list_names(lost)}"
        raise UserError(f"{are}; write their paths with / and with the extension.")
    report = f"{len(bad)} of {count} images cannot be read: {list_names(map(describe, bad), 10)}"
    if on_bad_image == "error":
        raise UserError(
            f"{report}; fix or delete them, or skip them with on_bad_image='skip' "
            "(--on_bad_image of a script, dataset.on_bad_image of a config)."
        )
    if len(bad) == count:
        raise UserError(f"{report}; no images left.")
    logging.getLogger(__name__).warning("%s; skipped (dataset.on_bad_image='skip').", report)
    return np.delete(np.arange(count), bad)


def _decode_block(read: Callable[[int], Any], numbers: Sequence[int]) -> list[_Verdict]:
    """Whether each image decodes, and what the decoder printed about it (it names no file)."""

    def judge(number: int) -> _Verdict:
        try:
            content = read_or_none(lambda: read(number))
        except ValueError:
            return _Verdict(False)
        if not isinstance(content, bytes):  # missing or unreadable; or pixels
            return _Verdict(content is not None, is_lost=content is None)
        return _Verdict(decodes(content), content.startswith(b"\xff\xd8"), sample_warning(content))

    with captured_stderr() as output:
        verdicts = list(map_threads(judge, numbers))
    if not output:
        return verdicts
    for i, number in enumerate(numbers):
        with captured_stderr() as output:
            verdict = verdicts[i] = judge(number)
        if output and verdict.usable:  # a JPEG is usable, maybe half grey
            verdicts[i] = verdict._replace(usable=verdict.is_jpeg, remark=output[0])
    return verdicts
