"""Decodes image files to uint8 arrays with OpenCV, and resizes arrays.

Grayscale, palette and CMYK images are converted to the requested channels; transparent pixels are
composed on a background; 16-bit samples keep their high byte, float and signed samples are
rejected, and so are bands that are not said to be colours; animations and TIFF files of several
pages give the first one. HEIC needs the extra `heic` and is always upright, as its decoder applies
the rotation. The `pillow_...` methods of `resize` are antialiased (but for nearest): timm, DeiT and
Hugging Face evaluate on such images.
"""

import io
from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np

from vit_jax.data import pillow_reader
from vit_jax.data.jpeg import first_rows, read_frame
from vit_jax.data.pillow_reader import DEEP, PNG, TIFF, Background
from vit_jax.data.sources import describe
from vit_jax.errors import UserError

# One image is too little work to split among threads; the pipeline's threads take whole batches.
cv2.setNumThreads(1)

# PNG chunks to strip: a gamma makes libpng convert colours to a different grey, and some colour
# profiles make it warn on stderr, one line per image and epoch.
_STRIPPED_CHUNKS = frozenset(b"iCCP sRGB gAMA cHRM sBIT bKGD tIME tEXt zTXt iTXt".split())

_OpenCV = Literal["bilinear", "area", "bicubic", "nearest"]
_Pillow = Literal["pillow_bilinear", "pillow_bicubic", "pillow_lanczos"]
_Rarer = Literal["pillow_nearest", "pillow_box", "pillow_hamming"]
Method = Literal[_OpenCV, _Pillow, _Rarer]

# Bilinear and area match tf.image.resize within one level and, like it, do not antialias;
# bicubic uses a = -0.75 where TensorFlow and Pillow use a = -0.5.
_CV2_METHODS = {
    "bilinear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "bicubic": cv2.INTER_CUBIC,
    "nearest": cv2.INTER_NEAREST_EXACT,
}
_MAX_PIXELS = 2**28
WHITE: Background = 255

_COLOR = {1: cv2.IMREAD_GRAYSCALE, 3: cv2.IMREAD_COLOR_RGB}
# Added to a colour: OpenCV has libjpeg-turbo decode at 1/2, 1/4 or 1/8.
_REDUCED = {1: 0, 2: 16, 4: 32, 8: 64}

Box = tuple[int, int, int, int]  # top, left, height, width


def decode_image(
    image: bytes | np.ndarray, *, channels: int, exif: bool, background: Background = WHITE
) -> np.ndarray:
    """Decodes an image file, or converts pixels [H, W] or [H, W, C], to uint8 [H, W, channels].

    `channels` is 3 (RGB) or 1 (luma); `exif` applies the orientation tag; `background` is below
    transparent pixels, None keeps the colours that they hide. ValueError if the bytes are not a
    complete image file, or the array is not an image.
    """
    if isinstance(image, np.ndarray):
        return _with_channels(image, channels, background)
    if (unusual := pillow_reader.read(image, exif=exif)) is not None:
        return _with_channels(unusual, channels, background)
    flags = _COLOR[channels] | (0 if exif else cv2.IMREAD_IGNORE_ORIENTATION)
    if (pixels := _imdecode(image, flags)) is None:
        raise ValueError(f"{len(image)} bytes cannot be decoded, or have more than 2^28 pixels")
    return pixels if channels == 3 else pixels[:, :, None]  # [H, W, channels]


def decode_box(
    image: bytes | np.ndarray,
    sample_box: Callable[[int, int], Box],
    *,
    channels: int,
    exif: bool,
    background: Background = WHITE,
    reduced_to: tuple[int, int] | None = None,
) -> np.ndarray:
    """The box `sample_box(height, width)` of `decode_image`, bit for bit, in less time.

    Of an upright sequential JPEG file only the rows down to the end of the box are decoded. With
    `reduced_to`, (height, width), a JPEG file is decoded at 1/2, 1/4 or 1/8, which changes pixels,
    if the sides of the box do not fall below that.
    """
    frame = read_frame(image) if isinstance(image, bytes) else None
    is_upright = frame is not None and (frame.orientation == 1 or not exif)
    if (
        isinstance(image, np.ndarray)
        or frame is None
        or not (is_upright or reduced_to)
        or frame.height * frame.width > _MAX_PIXELS
    ):
        pixels = decode_image(image, channels=channels, exif=exif, background=background)
        return crop(pixels, *sample_box(*pixels.shape[:2]))
    size = (frame.height, frame.width)
    is_turned = exif and frame.orientation > 4  # by 90 degrees
    top, left, height, width = sample_box(*(size[::-1] if is_turned else size))
    scale = 1
    if reduced_to:
        spare = min(height // reduced_to[0], width // reduced_to[1])
        scale = max(factor for factor in _REDUCED if factor <= max(spare, 1))
    data = first_rows(image, frame, top + height) if is_upright else image
    flags = _COLOR[channels] | _REDUCED[scale] | (0 if exif else cv2.IMREAD_IGNORE_ORIENTATION)
    decoded = _imdecode(data, flags)
    if decoded is None:  # damaged, or the rows below are too few bytes
        scale, decoded = 1, decode_image(image, channels=channels, exif=exif)
    pixels = decoded.reshape(*decoded.shape[:2], channels)  # cv2 drops a channel axis of one
    top, bottom = round(top / scale), round((top + height) / scale)
    left, right = round(left / scale), round((left + width) / scale)
    return crop(pixels, top, left, bottom - top, right - left)


def crop(image: np.ndarray, top: int, left: int, height: int, width: int) -> np.ndarray:
    return image[top : top + height, left : left + width]  # [height, width, C]


def _with_channels(pixels: np.ndarray, channels: int, background: Background) -> np.ndarray:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]  # [H, W, 1]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise ValueError(f"an image must be uint8 [H, W, 1, 3 or 4], not {describe(pixels)}")
    if not pixels.size:
        raise ValueError(f"the image {list(pixels.shape)} is empty; was it cropped to nothing?")
    if background is not None and pillow_reader.is_transparent(pixels):
        pixels = pillow_reader.compose(pixels, background)
    pixels = pixels[:, :, :3]
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)  # [H, W, 3]
    return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)[:, :, None]  # [H, W, 1]


def damage(data: bytes) -> str:
    """Why an image file cannot be used, "" if all of it decodes; a JPEG at 1/8 scale, for speed.

    UserError if that needs a package that is not installed.
    """
    try:
        if pillow_reader.read(data, exif=False) is not None:
            return ""
    except UserError:
        raise
    except ValueError as error:
        return str(error)
    # For other formats OpenCV rejects this if a side is below 8 pixels.
    flags = cv2.IMREAD_REDUCED_COLOR_8 if data.startswith(b"\xff\xd8") else cv2.IMREAD_COLOR
    if _imdecode(data, flags) is None or (data.startswith(TIFF) and _is_broken_tiff(data)):
        return "it does not decode"
    return ""


def _is_broken_tiff(data: bytes) -> bool:
    """OpenCV returns what it has read of such a file."""
    from PIL import Image, UnidentifiedImageError

    try:
        Image.open(io.BytesIO(data)).load()
    except (UnidentifiedImageError, ValueError):  # OpenCV reads more kinds
        return False
    except (OSError, SyntaxError):
        return True
    return False


def remark(image: bytes | np.ndarray) -> str:
    """What the owner of an image may not expect of its pixels, else ""; ValueError: damaged."""
    pixels = image if isinstance(image, np.ndarray) else pillow_reader.read(image, exif=False)
    if pixels is not None and pillow_reader.is_transparent(pixels):
        return "transparent pixels, composed on white (or on decode's background)"
    if not isinstance(image, bytes):
        return ""
    if not image.startswith(DEEP) and not (image.startswith(PNG) and image[24:25] == b"\x10"):
        return ""
    deep = _imdecode(image, cv2.IMREAD_UNCHANGED)
    bits = 0 if deep is None or deep.dtype != np.uint16 else int(deep.max()).bit_length()
    if not 0 < bits < 15:
        return ""
    return f"values in {bits} of 16 bits, which look dark (only the high byte is kept)"


def _imdecode(data: bytes, flags: int) -> np.ndarray | None:
    if data.startswith(PNG):
        data = _strip_chunks(data)
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:  # an empty file, an image larger than OpenCV accepts
        return None


def _strip_chunks(png: bytes) -> bytes:
    """The file without the chunks in `_STRIPPED_CHUNKS` that precede its pixels."""
    chunks, position = [PNG], len(PNG)
    while (kind := png[position + 4 : position + 8]) != b"IDAT" and len(kind) == 4:
        end = position + 12 + int.from_bytes(png[position : position + 4])  # length, kind, CRC
        if kind not in _STRIPPED_CHUNKS:
            chunks.append(png[position:end])
        position = end
    return b"".join([*chunks, png[position:]])


def resize(image: np.ndarray, height: int, width: int, method: Method) -> np.ndarray:
    """Resizes uint8 [H, W, C] to [height, width, C], pixel centres at half integers.

    Pillow's methods are the installed one's: from 13 on it chooses which axis to round first.
    ValueError if the result would be huge, or for Pillow's methods if the image is not uint8.
    """
    if height * width > _MAX_PIXELS:  # e.g. a strip, whose long side scales too
        raise ValueError(f"{height}x{width} pixels exceed the limit of {_MAX_PIXELS}")
    old_height, old_width, channels = image.shape
    if (old_height, old_width) == (height, width):
        return image
    if method in _CV2_METHODS:
        resized = cv2.resize(image, (width, height), interpolation=_CV2_METHODS[method])
        return resized.reshape(height, width, channels)  # cv2 drops a channel axis of one
    if image.dtype != np.uint8:
        raise ValueError(f"{method!r} needs uint8: put it before value_range or normalize")
    from PIL import Image

    resample = Image.Resampling[method.removeprefix("pillow_").upper()]
    picture = Image.fromarray(image if channels > 1 else image[:, :, 0])
    return np.asarray(picture.resize((width, height), resample)).reshape(height, width, channels)
