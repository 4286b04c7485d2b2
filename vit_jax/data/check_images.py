"""Decodes the image files of a source before training, so that damage is found at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data.decode import decodes
from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError
from vit_jax.files.manifest import read_or_none
from vit_jax.wording import list_names


def usable_images(
    count: int, read: Callable[[int], Any], describe: Callable[[int], str], on_bad_image: str
) -> np.ndarray:
    """Decodes all image files; returns the numbers of those that decode, sorted, int64 [n].

    `read` gives the file of image `n` as bytes, or its pixels, `describe` where it is stored.
    UserError if a file cannot be opened or none decodes, or if one does not and `on_bad_image` is
    "error"; "skip" leaves damaged images out.
    """

    def damage(number: int) -> str:
        try:
            content = read_or_none(lambda: read(number))
        except ValueError:
            return "damaged"
        if content is None:
            return "lost"
        return "" if not isinstance(content, bytes) or decodes(content) else "damaged"

    damages = list(map_threads(damage, range(count)))
    bad = [number for number in range(count) if damages[number]]
    if not bad:
        return np.arange(count)
    if lost := [describe(number) for number in bad if damages[number] == "lost"]:
        raise UserError(f"{len(lost)} of {count} files cannot be opened: {list_names(lost)}.")
    report = f"{len(bad)} of {count} images cannot be read: {list_names(map(describe, bad), 10)}"
    if on_bad_image == "error":
        raise UserError(f"{report}; fix or delete them, or skip them with on_bad_image='skip'.")
    if len(bad) == count:
        raise UserError(f"{report}; no images left.")
    logging.getLogger(__name__).warning("%s; skipped (dataset.on_bad_image='skip').", report)
    return np.delete(np.arange(count), bad)
