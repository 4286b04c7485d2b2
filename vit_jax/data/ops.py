"""The ops that preprocess.py puts in rows: decoding, geometry, value ranges.

An op is a frozen dataclass; its fields are its arguments, and calling it maps (example, rng) to an
example: {"image": uint8 [H, W, C] (bytes before `decode`), "label": int, ...}. `height`, `width`
and `size` are in pixels; a size is one number (square) or (height, width).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import cv2
import numpy as np

from vit_jax.data import geometry
from vit_jax.data.decode import decode_image

Example = dict[str, Any]
Size = int | tuple[int, int]

# Per channel, of the pixels of ImageNet's training images divided by 255.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

ROUNDINGS: dict[str, Callable[[float], int]] = {"nearest": round, "down": int}


class ImageOp:
    """An op that changes the image and nothing else."""

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        return {**example, "image": self.apply(example["image"], rng)}

    def apply(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError


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


@dataclasses.dataclass(frozen=True)
class Decode(ImageOp):
    """Image file -> uint8 [H, W, channels]; see decode.py for unusual files.

    `exif` turns photographs upright as their orientation tag says, which is what their owner sees;
    the official code reads pixels as stored (`exif=False`).
    """

    channels: int = 3
    exif: bool = True

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels!r} must be 1 or 3")

    def apply(self, image: bytes | np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return decode_image(image, channels=self.channels, exif=self.exif)


@dataclasses.dataclass(frozen=True)
class SizedOp(ImageOp):
    """An op that makes images of height x width, square without width."""

    height: int
    width: int | None = None

    def __post_init__(self) -> None:
        check_positive(height=self.height, width=self.width)

    @property
    def shape(self) -> tuple[int, int]:
        return self.height, self.width or self.height


@dataclasses.dataclass(frozen=True)
class Resize(SizedOp):
    """Scales to height x width (square without width), whatever the aspect ratio was."""

    method: str = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, geometry.RESIZE_METHODS)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return geometry.resize(image, *self.shape, self.method)


@dataclasses.dataclass(frozen=True)
class ResizeSmall(ImageOp):
    """Scales the short side to `size` and keeps the aspect ratio.

    The long side is rounded to the `nearest` pixel as big_vision has it, or `down` as torchvision.
    """

    size: int
    method: str = "area"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_positive(size=self.size)
        check_choice("method", self.method, geometry.RESIZE_METHODS)
        check_choice("rounding", self.rounding, ROUNDINGS)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        short, as_whole = min(image.shape[:2]), ROUNDINGS[self.rounding]
        height, width = (as_whole(side * self.size / short) for side in image.shape[:2])
        return geometry.resize(image, height, width, self.method)


@dataclasses.dataclass(frozen=True)
class CentralCrop(SizedOp):
    """Cuts height x width (square without width) from the middle.

    Where there is no middle pixel the corner is rounded `down` as in big_vision, or to the
    `nearest` even pixel as in torchvision.
    """

    rounding: str = "down"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rounding", self.rounding, ROUNDINGS)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = self.shape
        geometry.check_holds(image, height, width)
        as_whole = ROUNDINGS[self.rounding]
        top, left = as_whole((image.shape[0] - height) / 2), as_whole((image.shape[1] - width) / 2)
        return geometry.crop(image, top, left, height, width)


@dataclasses.dataclass(frozen=True)
class RandomCrop(SizedOp):
    """Cuts height x width (square without width) from a random place."""

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = self.shape
        geometry.check_holds(image, height, width)
        top = int(rng.integers(0, image.shape[0] - height, endpoint=True))
        left = int(rng.integers(0, image.shape[1] - width, endpoint=True))
        return geometry.crop(image, top, left, height, width)


@dataclasses.dataclass(frozen=True)
class InceptionCrop(ImageOp):
    """Cuts a box of random area and aspect ratio and scales it to `size`.

    `area` is the box's share of the image, `ratio` its width / height; see geometry.sample_crop
    for the distribution. Bilinear without antialiasing, as in the official code; the ratio is the
    default of its TensorFlow op, where torchvision has (3/4, 4/3).
    """

    size: Size
    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (0.75, 1.33)

    def __post_init__(self) -> None:
        check_positive(size=self.size)
        check_range("area", self.area, 1.0)
        check_range("ratio", self.ratio)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width = image.shape[:2]
        box = geometry.sample_crop(rng, height, width, self.area, self.ratio)
        return geometry.resize(geometry.crop(image, *box), *pair(self.size), "bilinear")


@dataclasses.dataclass(frozen=True)
class FlipLr(ImageOp):
    """Mirrors left and right with probability one half."""

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # cv2.flip takes 21 us for 224 x 224, NumPy's reversed copy 246.
        return cv2.flip(image, 1).reshape(image.shape) if rng.random() < 0.5 else image


@dataclasses.dataclass(frozen=True)
class Pad(ImageOp):
    """Adds black pixels on every side."""

    pixels: int

    def __post_init__(self) -> None:
        check_positive(pixels=self.pixels)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.pad(image, ((self.pixels,) * 2, (self.pixels,) * 2, (0, 0)))  # [H+2p, W+2p, C]


@dataclasses.dataclass(frozen=True)
class RandomAffine(ImageOp):
    """Rotation and shear within +-degrees, shift within +-translate of a side, scale in a range.

    For data that must not be mirrored, such as digits. `border` is black ("constant") or the
    nearest edge pixel ("replicate").
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shear: float = 0.0
    border: str = "constant"

    def __post_init__(self) -> None:
        for name in ("degrees", "translate", "shear"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must not be negative")
        if self.shear >= 90:
            raise ValueError(f"shear={self.shear!r} must be below 90 degrees")
        check_range("scale", self.scale)
        check_choice("border", self.border, geometry.BORDERS)

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        turn, down, right, shear = rng.uniform(-1, 1, 4)
        return geometry.affine(
            image,
            degrees=turn * self.degrees,
            shift=(
                down * self.translate * image.shape[0],
                right * self.translate * image.shape[1],
            ),
            scale=rng.uniform(*self.scale),
            shear=shear * self.shear,
            border=self.border,
        )


@dataclasses.dataclass(frozen=True)
class ValueRange(ImageOp):
    """uint8 [0, 255] -> float32 [low, high]; four times the bytes to ship to the device."""

    low: float = -1.0
    high: float = 1.0

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if image.dtype != np.uint8:
            raise ValueError(f"{self} takes uint8, not {image.dtype}: scale the values only once")
        scale = np.float32((self.high - self.low) / 255)
        return image.astype(np.float32) * scale + np.float32(self.low)


@dataclasses.dataclass(frozen=True)
class Normalize(ImageOp):
    """uint8 -> float32 (image / 255 - mean) / std, one number or one per channel.

    For weights whose training data were scaled so (DeiT: ImageNet's mean and deviation).
    """

    mean: float | tuple[float, float, float]
    std: float | tuple[float, float, float]

    def __post_init__(self) -> None:
        if np.min(self.std) <= 0:
            raise ValueError(f"std={self.std!r} must be positive")

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        if image.dtype != np.uint8 or max(mean.size, std.size) not in (1, image.shape[2]):
            raise ValueError(
                f"{self} cannot take an image of {image.dtype} {list(image.shape)}; it takes uint8 "
                "with as many channels as there are numbers"
            )
        return (image / np.float32(255) - mean) / std
