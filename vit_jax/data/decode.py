"""Encoded image files to uint8 arrays, through OpenCV.

What becomes of unusual files (compared with Pillow in tests/data/test_preprocess.py): grayscale,
palette and CMYK images are converted to the channels asked for; transparency is dropped, not
blended, as TensorFlow's decoders do; of 16-bit samples the high byte is kept, of animations the
first frame.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from vit_jax.data.sources import describe

# One image is too little work to share among threads; the pipeline's threads take whole batches.
cv2.setNumThreads(1)

_PNG = b"\x89PNG\r\n\x1a\n"
# Chunks of a PNG file that are passed over. libpng would make grey of colours by another formula
# where it knows their gamma, and warn on stderr of the colour profiles of a popular editor: a line
# per image and epoch.
_REMARKS = frozenset(b"iCCP sRGB gAMA cHRM sBIT bKGD tIME tEXt zTXt iTXt".split())

_COLOR = {1: cv2.IMREAD_GRAYSCALE, 3: cv2.IMREAD_COLOR_RGB}


def decode_image(image: bytes | np.ndarray, *, channels: int, exif: bool) -> np.ndarray:
    """An image file, or pixels that need no decoding, as uint8 [H, W, channels].

    Args:
      image: the content of a JPEG, PNG, WebP, GIF, BMP or TIFF file, or uint8 [H, W] or [H, W, C].
      channels: 3 (RGB) or 1 (luma).
      exif: turn the image upright as its orientation tag says (else: pixels as they are stored).

    Raises:
      ValueError: the bytes are not a complete image file, or the array is not an image.
    """
    if isinstance(image, np.ndarray):
        return _with_channels(image, channels)
    flags = _COLOR[channels] | (0 if exif else cv2.IMREAD_IGNORE_ORIENTATION)
    pixels = _imdecode(image, flags)
    if pixels is None:
        raise ValueError(f"the image cannot be decoded ({len(image)} bytes: {image[:8]!r}...)")
    return pixels if channels == 3 else pixels[:, :, None]  # [H, W, channels]


def pillow_pixels(image: Any, *, exif: bool) -> np.ndarray:
    """What `decode_image` gives for the file of a Pillow image: uint8 [H, W] or [H, W, 3].

    Raises:
      ValueError: its samples have more than 8 bits, which Pillow would cut off.
    """
    from PIL import ImageOps

    if image.mode[0] in "IF":
        raise ValueError(f"a Pillow image of mode {image.mode} has no 8-bit pixels; give its path")
    if exif:
        image = ImageOps.exif_transpose(image)
    return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))


def _with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]  # [H, W, 1]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise ValueError(f"an image must be uint8 [H, W, 1, 3 or 4], not {describe(pixels)}")
    pixels = pixels[:, :, :3]
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)  # [H, W, 3]
    return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)[:, :, None]  # [H, W, 1]


def decodes(data: bytes) -> bool:
    """Whether the whole image file can be decoded.

    JPEG is decoded at 1/8 scale, which reads all of the entropy-coded data and skips two thirds of
    the rest: 0.7 ms for 500 x 375 against 1.1 ms in full. Other formats have no such shortcut, and
    OpenCV would refuse what has a side below 8 pixels.
    """
    flags = cv2.IMREAD_REDUCED_COLOR_8 if data.startswith(b"\xff\xd8") else cv2.IMREAD_COLOR
    return _imdecode(data, flags) is not None


def _imdecode(data: bytes, flags: int) -> np.ndarray | None:
    if data.startswith(_PNG):
        data = _without_remarks(data)
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:  # an empty file, an image larger than OpenCV accepts
        return None


def _without_remarks(png: bytes) -> bytes:
    """The file without `_REMARKS` before its pixels."""
    kept, position = [_PNG], len(_PNG)
    while (kind := png[position + 4 : position + 8]) != b"IDAT" and len(kind) == 4:
        end = position + 12 + int.from_bytes(png[position : position + 4])  # length, kind, CRC
        if kind not in _REMARKS:
            kept.append(png[position:end])
        position = end
    return b"".join([*kept, png[position:]])
