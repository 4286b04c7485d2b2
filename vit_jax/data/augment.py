"""RandAugment (1909.13719) as used by AugReg (2106.10270), random erasing as used by DeiT.

RandAugment's sixteen ops, their ranges and the fill value 128 follow what EfficientNet's
`autoaugment.py` computes (big_vision has a copy), not its comments; checked against TensorFlow:

* `solarize` compares with 25.6 * magnitude as a uint8: at 0, 10 and 20 every pixel is inverted.
* `contrast` blends with a grey of (pixels / 256), at most 255, not with the image's mean grey.
* `posterize` keeps 0.4 * magnitude bits, at least one: it is stronger for smaller magnitudes.
* `color`, `contrast`, `brightness` and `sharpness` blend by 0.1 + 0.18 * magnitude: 5 changes
  nothing, 0 nearly removes what they name, and above 5 they exaggerate it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import cv2
import numpy as np

from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD, ImageOp, Rng, check_range

FILL = 128
MAX_LEVEL = 10.0  # the magnitude at which an op has its documented strength
MAX_MAGNITUDE = 20.0

_VALUES = np.arange(256, dtype=np.float32)
_LUMA = np.array([[0.2989, 0.5870, 0.1140]], np.float32)  # of tf.image.rgb_to_grayscale
# Sums of nine pixels, the middle one five times, over 13, rounded down: their fractions are
# multiples of 1/13, so that this shift makes cv2's rounding a floor.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
_SMOOTH_SHIFT = -0.5 + 0.5 / 13
# cv2 rounds coordinates to this step; it rounds half pixels down, TensorFlow up.
_COORDINATE_STEP = 1 / 2048

AugmentOp = Callable[[np.ndarray, float, Rng], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RandAug(ImageOp):
    """Applies `num_layers` ops, drawn uniformly with replacement, all at `magnitude`."""

    num_layers: int = 2
    magnitude: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= 100 or not 0 <= self.magnitude <= MAX_MAGNITUDE:
            limits = f"1 to 100 layers and a magnitude in [0, {MAX_MAGNITUDE:g}]"
            raise ValueError(f"{self} must have {limits}")

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        if image.dtype != np.uint8:
            raise ValueError(f"{self} takes uint8: put it before value_range or normalize")
        ops = list(AUGMENT_OPS.values())
        for choice in rng.integers(len(ops), size=self.num_layers).tolist():
            image = ops[choice](image, self.magnitude / MAX_LEVEL, rng)
        return image


# Every op takes (image uint8 [H, W, C], magnitude / 10, rng) and does not modify its input.


def per_channel(table: Callable[[np.ndarray], np.ndarray]) -> AugmentOp:
    """Maps each channel through a lookup table computed from its histogram [256]."""

    def op(image: np.ndarray, _strength: float, _rng: Rng) -> np.ndarray:
        channels = range(image.shape[2])
        histograms = [cv2.calcHist([image], [c], None, [256], [0, 256]).ravel() for c in channels]
        return _look_up(image, np.stack(list(map(table, histograms)), axis=-1)[None])

    return op


def stretched(histogram: np.ndarray) -> np.ndarray:
    """Stretches linearly to 0..255."""
    present = np.flatnonzero(histogram)
    low, high = np.float32(present[0]), np.float32(present[-1])
    if low == high:
        return _VALUES
    scale = np.float32(255) / (high - low)
    return np.clip(_VALUES * scale - low * scale, 0, 255)


def equalized(histogram: np.ndarray) -> np.ndarray:
    """Equalizes the histogram by Pillow's rule."""
    counts = histogram.astype(np.int64)
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if step == 0:
        return _VALUES
    below = np.concatenate([[0], np.cumsum(counts)[:-1] + step // 2])
    below[1:] //= step
    return np.clip(below, 0, 255)


def rotate(image: np.ndarray, strength: float, rng: Rng) -> np.ndarray:
    """Rotates about the centre by +-30 degrees times the strength."""
    angle = math.radians(_random_sign(30.0 * strength, rng))
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = (image.shape[1] - 1) / 2, (image.shape[0] - 1) / 2
    offset = x - cos * x + sin * y, y - sin * x - cos * y
    return _warp(image, np.array([[cos, -sin, offset[0]], [sin, cos, offset[1]]]))


def posterize(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Keeps the highest 4 * strength bits, at least one."""
    dropped = 8 - max(1, int(4 * strength))
    return _look_up(image, np.arange(256) >> dropped << dropped)


def solarize(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Inverts pixels at or above the threshold."""
    threshold = int(256 * strength) % 256
    return _look_up(image, np.where(np.arange(256) >= threshold, 255 - _VALUES, _VALUES))


def solarize_add(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Adds 110 times the strength to pixels below 128."""
    added = np.minimum(_VALUES + int(110 * strength), 255)
    return _look_up(image, np.where(_VALUES < 128, added, _VALUES))


def color(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Blends with the grey image."""
    if image.shape[2] == 1:
        return image
    scaled = image.astype(np.float32) * np.float32(1 / 255)
    grey = (cv2.transform(scaled, _LUMA) * np.float32(255.5)).astype(np.uint8)  # [H, W]
    return _blend(grey[..., None], image, strength)


def contrast(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Blends with a uniform grey."""
    grey = min(image.shape[0] * image.shape[1] // 256, 255)
    return _look_up(image, _blend_table(strength)[grey])


def brightness(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Blends with black."""
    return _look_up(image, _blend_table(strength)[0])


def sharpness(image: np.ndarray, strength: float, _rng: Rng) -> np.ndarray:
    """Blends with the smoothed image; border pixels are unchanged."""
    smooth = cv2.filter2D(image, -1, _SMOOTH, delta=_SMOOTH_SHIFT).reshape(image.shape)
    for edge in (0, -1):
        smooth[edge], smooth[:, edge] = image[edge], image[:, edge]
    return _blend(smooth, image, strength)


def moving(row: int, column: int, unit: float) -> AugmentOp:
    """A shear or shift with random sign: `unit` times the strength at one matrix entry."""

    def op(image: np.ndarray, strength: float, rng: Rng) -> np.ndarray:
        matrix = np.eye(2, 3)
        matrix[row, column] = _random_sign(unit * strength, rng)
        return _warp(image, matrix)

    return op


def cutout(image: np.ndarray, strength: float, rng: Rng) -> np.ndarray:
    """Fills a square of side 80 * strength, centred anywhere in the image (1708.04552)."""
    half = int(40 * strength)
    y, x = (int(rng.integers(side)) for side in image.shape[:2])
    image = image.copy()
    image[max(0, y - half) : y + half, max(0, x - half) : x + half] = FILL
    return image


AUGMENT_OPS: dict[str, AugmentOp] = {
    "autocontrast": per_channel(stretched),
    "equalize": per_channel(equalized),
    "invert": lambda image, _strength, _rng: cv2.bitwise_not(image).reshape(image.shape),
    "rotate": rotate,
    "posterize": posterize,
    "solarize": solarize,
    "color": color,
    "contrast": contrast,
    "brightness": brightness,
    "sharpness": sharpness,
    "shear_x": moving(0, 1, 0.3),  # pixels per row
    "shear_y": moving(1, 0, 0.3),
    "translate_x": moving(0, 2, 100.0),  # pixels, for any image size
    "translate_y": moving(1, 2, 100.0),
    "cutout": cutout,
    "solarize_add": solarize_add,
}


def _random_sign(value: float, rng: Rng) -> float:
    return value if rng.random() < 0.5 else -value


def _look_up(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`table` [256] or [1, 256, C] of values in [0, 256), truncated to integers."""
    return cv2.LUT(image, table.astype(np.uint8)).reshape(image.shape)


@functools.lru_cache(maxsize=32)
def _blend_table(strength: float) -> np.ndarray:
    """[256, 256]: the blend of (value to blend from, value of the image), truncated to integers."""
    origin, value = _VALUES[:, None], _VALUES[None]
    blend = origin + np.float32(0.1 + 1.8 * strength) * (value - origin)
    return np.clip(blend, 0, 255).astype(np.uint8)


def _blend(origin: np.ndarray, image: np.ndarray, strength: float) -> np.ndarray:
    return np.take(_blend_table(strength).ravel(), origin.astype(np.uint16) << 8 | image)


def _warp(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Pixel (u, v) takes the value nearest to matrix [2, 3] @ (u, v, 1)."""
    warped = cv2.warpAffine(
        image,
        matrix + np.array([0, 0, _COORDINATE_STEP]),
        (image.shape[1], image.shape[0]),
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderValue=(FILL,) * 4,
    )
    return warped.reshape(image.shape)


@dataclasses.dataclass(frozen=True)
class RandomErasing(ImageOp):
    """With `probability`, fills one box with noise (1708.04896); DeiT uses random_erasing(0.25).

    The box's share of the image is uniform in `area`, its height / width log-uniform in `ratio`,
    its position uniform, as in timm. The noise has mean 0 and standard deviation 1 after
    normalisation: float images are taken as normalised; for uint8 images it is scaled by ImageNet's
    mean and deviation (averaged over channels unless there are three) and clipped.
    """

    probability: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    moves = False

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability={self.probability!r} must be in [0, 1]")
        check_range("area", self.area, 1.0)
        check_range("ratio", self.ratio)

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        if rng.random() >= self.probability or (box := self._box(rng, *image.shape[:2])) is None:
            return image
        image = image.copy()
        fill = rng.standard_normal(image[box].shape, np.float32)
        if image.dtype == np.uint8:
            mean, std = np.array([IMAGENET_MEAN, IMAGENET_STD], np.float32)
            if image.shape[2] != 3:
                mean, std = np.mean([IMAGENET_MEAN, IMAGENET_STD], axis=1).astype(np.float32)
            fill = np.clip(np.rint((mean + std * fill) * 255), 0, 255)
        image[box] = fill
        return image

    def _box(self, rng: Rng, height: int, width: int) -> tuple[slice, slice] | None:
        """Rows and columns, or None if no draw fits."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            pixels = rng.uniform(*self.area) * height * width
            ratio = math.exp(rng.uniform(low, high))
            box_height = round(math.sqrt(pixels * ratio))
            box_width = round(math.sqrt(pixels / ratio))
            if box_height < height and box_width < width:
                top = int(rng.integers(0, height - box_height, endpoint=True))
                left = int(rng.integers(0, width - box_width, endpoint=True))
                return slice(top, top + box_height), slice(left, left + box_width)
        return None
