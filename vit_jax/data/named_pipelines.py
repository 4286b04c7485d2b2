"""Preprocessing that has a name, as rows of the ops in preprocess.py.

Photographs are turned upright by their EXIF orientation unless `exif=False`, which gives exactly
the pixels that published accuracies were measured on.
"""

from __future__ import annotations

from collections.abc import Callable

Size = int | tuple[int, int]


def _official_train(size: Size, exif: bool = True) -> str:
    """The official code's training pipeline."""
    return f"decode(exif={exif})|inception_crop({size})|flip_lr"


def _official_eval(size: Size, exif: bool = True) -> str:
    """The official code's evaluation: the whole image scaled to `size`, no crop (its issue #39)."""
    height, width = size if isinstance(size, tuple) else (size, size)
    return f"decode(exif={exif})|resize({height}, {width})"


def _big_vision_eval(size: int, resize: int, exif: bool = True) -> str:
    """Short side to `resize` (256 for 224), then the central `size` x `size`."""
    return f"decode(exif={exif})|resize_small({resize})|central_crop({size})"


PIPELINES: dict[str, Callable[..., str]] = {
    "official_train": _official_train,
    "official_eval": _official_eval,
    "big_vision_eval": _big_vision_eval,
}
