"""Chains of ops for images of another size, and as text."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from vit_jax.data.ops import CentralCrop, CornerCrop, Resize, ResizeSmall, SizedOp, pair
from vit_jax.data.preprocess import OPS, PythonOp

Sides = tuple[int, int]  # height, width


def size_of(ops: Iterable[Any]) -> Sides | None:
    """The size of every image after the ops; None if it depends on the image."""
    return next((op.shape for op in reversed([*ops]) if isinstance(op, SizedOp)), None)


def at_size(ops: Sequence[Any], before: Sides, after: Sides) -> list[Any]:
    """Ops whose images have the size `before`, for the size `after`.

    A central crop keeps its fraction; for another aspect ratio, the whole image is used.
    """
    is_scaled, scale = after[0] * before[1] == after[1] * before[0], after[0] / before[0]
    changed: list[Any] = []
    for op in ops:
        if isinstance(op, CentralCrop | CornerCrop) and not is_scaled:
            continue
        if isinstance(op, Resize | ResizeSmall) and not is_scaled:
            op = Resize(*after, method=op.method)
        elif isinstance(op, ResizeSmall):
            height, width = (round(side * scale) for side in pair(op.size))
            is_pair = isinstance(op.size, tuple)
            op = dataclasses.replace(op, size=(height, width) if is_pair else height)
        elif isinstance(op, Resize | CentralCrop | CornerCrop):
            height, width = (round(side * scale) for side in op.shape)
            op = dataclasses.replace(op, height=height, width=width)
        changed.append(op)
    return changed


def spell(ops: Iterable[Any]) -> str:
    """Ops as `parse` reads them, `decode|resize(224, 224, 'pillow_bicubic')`, without defaults."""
    texts = []
    for op in ops:
        name = next((name for name, row in OPS.items() if row is type(op)), "")
        fields = dataclasses.fields(op)
        given = [getattr(op, field.name) != field.default for field in fields]
        arguments = [
            ("" if all(given[:i]) else f"{field.name}=") + repr(getattr(op, field.name))
            for i, field in enumerate(fields)
            if given[i]
        ]
        text = f"{name}({', '.join(arguments)})" if arguments else name
        texts.append(op.call if isinstance(op, PythonOp) else text)
    return "|".join(texts)
