"""Resizing, cropping and warping of uint8 images [H, W, C]."""

from __future__ import annotations

import math

import cv2
import numpy as np

from vit_jax.data import resample

# cv2's bilinear and area agree with tf.image.resize within one level (rounding), and like it do
# not antialias; its bicubic uses a = -0.75 where TensorFlow and Pillow use a = -0.5.
_CV2_METHODS = {
    "bilinear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "bicubic": cv2.INTER_CUBIC,
    "nearest": cv2.INTER_NEAREST_EXACT,
}
RESIZE_METHODS = (*_CV2_METHODS, *resample.KERNELS)
BORDERS = {"constant": cv2.BORDER_CONSTANT, "replicate": cv2.BORDER_REPLICATE}

_CROP_ATTEMPTS = 100


def resize(image: np.ndarray, height: int, width: int, method: str) -> np.ndarray:
    """Scales to [height, width, C], pixel centres at half integers."""
    if image.shape[:2] == (height, width):
        return image
    if method in resample.KERNELS:
        return resample.resample(image, height, width, method)
    resized = cv2.resize(image, (width, height), interpolation=_CV2_METHODS[method])
    return resized.reshape(height, width, image.shape[2])  # cv2 drops a channel axis of one


def crop(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    return image[top : top + height, left : left + width]  # [height, width, C]


def check_holds(image: np.ndarray, height: int, width: int) -> None:
    """Raises ValueError unless a crop of height x width fits into the image."""
    if image.shape[0] < height or image.shape[1] < width:
        raise ValueError(
            f"an image of {image.shape[0]}x{image.shape[1]} holds no crop of {height}x{width}; "
            "put resize_small before the crop"
        )


def sample_crop(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """A random box (top, left, height, width) inside an image of height x width.

    Follows the sampling of TensorFlow's `sample_distorted_bounding_box`, which the official code
    calls with no boxes: the aspect ratio (width / height) is uniform in `ratio`; given that, the
    height (not the area) is uniform among those that keep the area within `area`, as a fraction of
    the image's, so small crops are more frequent than with a uniform area; after 100 rejected
    draws the whole image is taken. Differences: other random numbers, and every offset is equally
    likely, the last one included.
    """
    low, high = area[0] * height * width, area[1] * height * width
    for _ in range(_CROP_ATTEMPTS):
        aspect = rng.uniform(ratio[0], ratio[1])
        highest = min(round(math.sqrt(high / aspect)), int((width + 0.5) / aspect), height)
        lowest = min(round(math.sqrt(low / aspect)), highest)
        box_height = int(rng.integers(lowest, highest, endpoint=True))
        box_width = round(box_height * aspect)
        # Rounding both sides can leave the range by a little: one pixel row puts that right.
        if box_height * box_width < low:
            box_height += 1
        elif box_height * box_width > high:
            box_height -= 1
        box_width = round(box_height * aspect)
        fits = 0 < box_height <= height and 0 < box_width <= width
        if fits and low <= box_height * box_width <= high:
            top = int(rng.integers(0, height - box_height, endpoint=True))
            left = int(rng.integers(0, width - box_width, endpoint=True))
            return top, left, box_height, box_width
    return 0, 0, height, width


def affine(
    image: np.ndarray,
    *,
    degrees: float,
    shift: tuple[float, float],
    scale: float,
    shear: float,
    border: str,
) -> np.ndarray:
    """Rotates, shears and scales about the centre, then shifts; the size stays [H, W, C].

    Args:
      degrees: rotation, counter-clockwise.
      shift: (down, right) in pixels.
      scale: above 1 enlarges the content.
      shear: horizontal shear angle in degrees.
      border: what is beyond the edge, a key of BORDERS (constant is black).
    """
    height, width, channels = image.shape
    angle, slant = math.radians(degrees), math.tan(math.radians(shear))
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[cos, cos * slant + sin], [-sin, cos - sin * slant]])
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    offset = centre - linear @ centre + np.array([shift[1], shift[0]])
    warped = cv2.warpAffine(
        image,
        np.concatenate([linear, offset[:, None]], axis=1),  # [2, 3]
        (width, height),
        flags=cv2.INTER_LINEAR,
        borderMode=BORDERS[border],
    )
    return warped.reshape(height, width, channels)
