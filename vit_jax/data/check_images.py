"""Decodes the image files of a source before training, so that damage is found at the start."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data import decode
from vit_jax.data.sources import map_threads
from vit_jax.errors import UserError
from vit_jax.files.manifest import read_or_none
from vit_jax.wording import list_names


def usable_images(
    count: int, read: Callable[[int], Any], describe: Callable[[int], str], on_bad_image: str
) -> np.ndarray:
    """Decodes all image files; returns the numbers of those that decode, sorted, int64 [n].

    Counts what `remark` finds. `read` gives the file of image `n` as bytes, or its pixels,
    `describe` where it is stored. UserError if a file cannot be opened or none decodes, or if one
    does not and `on_bad_image` is "error"; "skip" leaves damaged images out.
    """
    lost: list[str] = []
    remarks: dict[str, list[str]] = {}

    def damage(number: int) -> str:
        try:
            content = read_or_none(lambda: read(number))
        except ValueError as error:
            return str(error)
        if content is None:
            lost.append(describe(number))
        if reason := decode.damage(content) if isinstance(content, bytes) else "":
            return reason
        if what := decode.remark(content) if isinstance(content, bytes | np.ndarray) else "":
            remarks.setdefault(what, []).append(describe(number))
        return ""

    damages = dict(enumerate(map_threads(damage, range(count))))
    if lost:
        where = list_names(sorted(lost))
        raise UserError(f"{len(lost)} of {count} files cannot be opened: {where}.")
    for what, names in sorted(remarks.items()):
        found = f"{len(names)} of {count} images with {what}: {list_names(sorted(names))}."
        logging.getLogger(__name__).warning(found)
    bad = {number: reason for number, reason in damages.items() if reason}
    if not bad:
        return np.arange(count)
    reasons = list_names([f"{describe(number)}: {reason}" for number, reason in bad.items()], 10)
    report = f"{len(bad)} of {count} images cannot be read: {reasons}"
    if on_bad_image == "error":
        text = f"{report}; fix or delete them, or skip them with dataset.on_bad_image='skip'"
        raise UserError(f"{text} (--on_bad_image of a script).")
    if len(bad) == count:
        raise UserError(f"{report}; no images left.")
    logging.getLogger(__name__).warning("%s; skipped (dataset.on_bad_image='skip').", report)
    return np.delete(np.arange(count), list(bad))
