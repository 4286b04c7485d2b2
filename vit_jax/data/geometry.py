"""Resizing uint8 images [H, W, C].

The `pillow_...` methods are Pillow's, with antialiasing: timm, DeiT and Hugging Face evaluate on
images that Pillow (through torchvision) has resized. An output pixel is a weighted mean over all
the input pixels that its kernel covers, and the kernel is as wide as the reduction asks for.
OpenCV's bilinear and bicubic look at 2 x 2 and 4 x 4 pixels however small the output is.
"""

from __future__ import annotations

from typing import Literal

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
_MAX_PIXELS = 2**28


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
    from PIL import Image

    resample = Image.Resampling[method.removeprefix("pillow_").upper()]
    picture = Image.fromarray(image if channels > 1 else image[:, :, 0])
    # In one call Pillow 13 may begin with the height; it rounds to 8 bits in between.
    for size in ((width, old_height), (width, height)):
        picture = picture.resize(size, resample)
    return np.asarray(picture).reshape(height, width, channels)
