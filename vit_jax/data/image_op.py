"""What every op of preprocess.py is, and the checks that their arguments share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.data.named_pipelines import Size

Example = dict[str, Any]


def pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def check_positive(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and min(pair(value)) < 1:
            raise ValueError(f"{name}={value!r} must be positive")


def check_range(name: str, value: tuple[float, float], limit: float = np.inf) -> None:
    if not 0 < value[0] <= value[1] <= limit:
        top = "" if limit == np.inf else f" <= {limit:g}"
        raise ValueError(f"{name}={value!r} must be (low, high) with 0 < low <= high{top}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")


class ImageOp:
    """An op that changes the image and nothing else."""

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        return {**example, "image": self.apply(example["image"], rng)}

    def apply(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError
