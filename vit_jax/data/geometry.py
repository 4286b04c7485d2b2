"""Resizing uint8 images [H, W, C].

The `pillow_...` methods resize with antialiasing, bit for bit as Pillow does it to 8-bit images:
timm, DeiT and Hugging Face evaluate on images that Pillow (through torchvision) has resized. An
output pixel is a weighted mean over all the input pixels that its kernel covers, and the kernel is
as wide as the reduction asks for. OpenCV's bilinear and bicubic look at 2 x 2 and 4 x 4 pixels
however small the output is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import cv2
import numpy as np

Method = Literal["bilinear", "area", "bicubic", "nearest", "pillow_bilinear", "pillow_bicubic"]

# cv2's bilinear and area agree with tf.image.resize within one level (rounding), and like it do
# not antialias; its bicubic uses a = -0.75 where TensorFlow and Pillow use a = -0.5.
_CV2_METHODS = {
    "bilinear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "bicubic": cv2.INTER_CUBIC,
    "nearest": cv2.INTER_NEAREST_EXACT,
}
# Pillow's fixed point: weights are multiples of 2^-22. Products with 8-bit pixels and their sums
# are then exact in float64, so any order of summation gives Pillow's result.
_PRECISION = 2.0**22
_MAX_PIXELS = 2**28
_ROWS_AT_ONCE = 16  # of the output: few enough that most of the weights' matrix is not zero


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5 (OpenCV has -0.75)."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


# Kernel and its half-width in pixels of the coarser of both images.
_KERNELS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "pillow_bilinear": (_bilinear, 1.0),
    "pillow_bicubic": (_bicubic, 2.0),
}


def resize(image: np.ndarray, height: int, width: int, method: Method) -> np.ndarray:
    """Scales to [height, width, C], pixel centres at half integers.

    Raises:
      ValueError: the result would be huge; one of Pillow's methods, and the image is not uint8.
    """
    if height * width > _MAX_PIXELS:  # of a strip, whose long side grows with the short one
        raise ValueError(f"{height}x{width} pixels are more than {_MAX_PIXELS}")
    old_height, old_width, channels = image.shape
    if (old_height, old_width) == (height, width):
        return image
    if method in _CV2_METHODS:
        resized = cv2.resize(image, (width, height), interpolation=_CV2_METHODS[method])
        return resized.reshape(height, width, channels)  # cv2 drops a channel axis of one
    if image.dtype != np.uint8:
        raise ValueError(
            f"{method!r} resizes uint8, not {image.dtype}: put it before value_range or normalize"
        )
    if width != old_width:  # Pillow's order; in between it rounds to 8 bits
        columns = image.transpose(1, 0, 2).reshape(old_width, old_height * channels)
        columns = _resample_rows(columns, width, method)
        image = columns.reshape(width, old_height, channels).transpose(1, 0, 2)  # [H, width, C]
    if height != old_height:
        rows = _resample_rows(image.reshape(old_height, width * channels), height, method)
        image = rows.reshape(height, width, channels)  # [height, width, C]
    return image


def _resample_rows(rows: np.ndarray, size: int, method: str) -> np.ndarray:
    """uint8 [N, M] -> [size, M]."""
    kernel, half_width = _KERNELS[method]
    scale = len(rows) / size
    stretch = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    reach = half_width * stretch
    first = np.maximum((centres - reach + 0.5).astype(int), 0)
    last = np.minimum((centres + reach + 0.5).astype(int), len(rows))
    out = np.empty((size, rows.shape[1]), np.uint8)
    for start in range(0, size, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        low, high = first[part][0], last[part][-1]
        at = np.arange(low, high)[None, :]  # [1, n]
        weights = kernel((at - centres[part, None] + 0.5) / stretch)  # [b, n]
        weights *= (at >= first[part, None]) & (at < last[part, None])
        weights /= weights.sum(axis=1, keepdims=True)
        fixed = np.trunc(weights * _PRECISION + np.copysign(0.5, weights))  # halves go outwards
        # Not NumPy's product: BLAS would start threads of its own inside each reading thread.
        none: Any = None
        sums = cv2.gemm(fixed, rows[low:high].astype(np.float64), 1, none, 0)  # [b, M]
        out[part] = np.clip(np.floor(sums / _PRECISION + 0.5), 0, 255)
    return out
