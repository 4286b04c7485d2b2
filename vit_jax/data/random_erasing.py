"""Random erasing (1708.04896): a box of the image becomes noise, with DeiT's settings."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD, ImageOp, check_range

_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class RandomErasing(ImageOp):
    """With `probability`, fills one box; DeiT trains with random_erasing(0.25).

    The box's share of the image is uniform in `area`, its height / width log-uniform in `ratio`,
    its place uniform; a box that is not smaller than the image in both sides is drawn again, up to
    ten times, as in timm, where DeiT has it from. `mode` "noise" draws every value from a normal
    distribution of mean 0 and deviation 1 after normalisation, "mean" is 0 there.

    A float image counts as normalised. A uint8 image gets what has these values when it is
    normalised by ImageNet's mean and deviation (their averages over the channels where there are
    not three): rounded, and clipped to [0, 255], which cuts the noise at about two deviations on
    either side, one value in twenty.
    """

    probability: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    mode: Literal["noise", "mean"] = "noise"

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability={self.probability!r} must be in [0, 1]")
        check_range("area", self.area, 1.0)
        check_range("ratio", self.ratio)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= self.probability or (box := self._box(rng, *image.shape[:2])) is None:
            return image
        image = image.copy()
        shape = image[box].shape
        fill = np.zeros(shape, np.float32)
        if self.mode == "noise":
            fill = rng.standard_normal(shape, np.float32)
        if image.dtype == np.uint8:
            three = image.shape[2] == 3
            mean = np.array(IMAGENET_MEAN if three else np.mean(IMAGENET_MEAN), np.float32)
            std = np.array(IMAGENET_STD if three else np.mean(IMAGENET_STD), np.float32)
            fill = np.clip(np.rint((mean + std * fill) * 255), 0, 255)
        image[box] = fill
        return image

    def _box(self, rng: np.random.Generator, height: int, width: int) -> tuple[slice, slice] | None:
        """Rows and columns, or None where no draw fits."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            pixels = rng.uniform(*self.area) * height * width
            ratio = math.exp(rng.uniform(low, high))
            box_height = round(math.sqrt(pixels * ratio))
            box_width = round(math.sqrt(pixels / ratio))
            if box_height < height and box_width < width:
                top = int(rng.integers(0, height - box_height, endpoint=True))
                left = int(rng.integers(0, width - box_width, endpoint=True))
                return slice(top, top + box_height), slice(left, left + box_width)
        return None
