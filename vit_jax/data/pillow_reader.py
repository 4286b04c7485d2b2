"""What Pillow reads: AVIF, HEIC, images with transparent pixels, headers; and its own images."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import import_extra

PNG = b"\x89PNG\r\n\x1a\n"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # and BigTIFF
JPEG_2000 = (b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51")  # a file, and its codestream
DEEP = (*TIFF, *JPEG_2000)  # may have more than 8 bits
_HEIC = (b"heic", b"heix", b"hevc")  # compatible brands of a file
_BITS, _PHOTOMETRIC, _BANDS, _PLANES, _KIND = 258, 262, 277, 284, 339  # tags of TIFF
_KINDS = {2: "int", 3: "float", 5: "complex", 6: "complex"}  # of samples; others are unsigned

Background = int | tuple[int, int, int] | None


def read(data: bytes, *, exif: bool) -> np.ndarray | None:
    """`pillow_pixels` of a file that OpenCV would read wrongly, else None.

    It cannot read HEIC, ignores the rotation of AVIF and drops transparency. ValueError if the file
    is damaged, or its bands or samples are no picture.
    """
    from PIL import Image

    if data.startswith(b"\xff\xd8"):
        return None
    if data[4:8] == b"ftyp" and any(brand in data[8:40] for brand in _HEIC):
        import_extra("a HEIC image", "pillow_heif", "heic").register_heif_opener()
    image: Any = None
    tags: Mapping[int, Any] = {}
    with contextlib.suppress(Exception):  # of a damaged header; OpenCV reads more kinds, and judges
        tags = _tiff_tags(data) if data.startswith(TIFF) else {}
        image = Image.open(io.BytesIO(data))
    is_wanted = image is not None and image.format in ("AVIF", "HEIF")
    if not _has_alpha(data, tags, image) and not is_wanted:
        return None
    try:
        pixels = pillow_pixels(image, exif=exif)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"the {image.format} image cannot be decoded ({error})") from error
    return pixels if is_wanted or is_transparent(pixels) else None


def _tiff_tags(data: bytes) -> Mapping[int, Any]:
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    tags, file = ImageFileDirectory_v2(data[: 16 if data[2:3] == b"+" else 8]), io.BytesIO(data)
    file.seek(tags.next)
    tags.load(file)
    return tags


def _has_alpha(data: bytes, tags: Mapping[int, Any], image: Any) -> bool:
    """Whether a band or a colour is transparent; ValueError if bands or samples are no picture.

    OpenCV takes the first of several bands for grey.
    """
    has_alpha = image is not None and image.has_transparency_data
    count, is_grey = tags.get(_BANDS, 1), tags.get(_PHOTOMETRIC) in (0, 1, 3)  # 3: a palette
    bits, kind = max(tags.get(_BITS, (1,))), _KINDS.get(tags.get(_KIND, (1,))[0], "uint")
    if data.startswith(JPEG_2000):  # Pillow takes any fourth band for opacity
        start = data.find(JPEG_2000[1])
        channels, space = (data[:start].partition(box)[2] for box in (b"cdef", b"colr"))
        kinds = channels[5 : 2 + 6 * int.from_bytes(channels[:2]) : 6]
        has_alpha, count = 1 in kinds or 2 in kinds, int.from_bytes(data[start + 40 : start + 42])
        is_grey = count == 2 or space[:1] + space[3:7] == b"\1\0\0\0\x11"
    if bits > 16 or kind != "uint":
        samples = f"its samples are {kind}{bits}, with no known scale to 8 bits"
        raise ValueError(f"{samples}; convert it to uint8")
    if has_alpha and bits > 8 and tags.get(_PLANES) == 2:  # Pillow misreads them
        raise ValueError("it has 16-bit planes with transparency; interleave them")
    if count > 4 or (is_grey and count - has_alpha > 1):
        choice = "choose three, such as gdal_translate -b 3 -b 2 -b 1 -co PHOTOMETRIC=RGB"
        raise ValueError(f"its {count} bands are not said to be red, green and blue; {choice}")
    return has_alpha


def pillow_pixels(image: Any, *, exif: bool) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3] of a Pillow image; RGBA [H, W, 4] if any pixel is transparent.

    ValueError above 8 bits.
    """
    from PIL import ImageOps

    colour = image.info.get("transparency")
    if image.mode[0] in "IF" or (isinstance(colour, tuple) and max(colour) > 255):
        raise ValueError(f"a Pillow image of mode {image.mode} has no 8-bit pixels; pass its path")
    if exif:
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image  # to RGBA in two steps only
        pixels = np.asarray(image.convert("RGBA"))
        if is_transparent(pixels):
            return pixels
    return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))


def is_transparent(pixels: np.ndarray) -> bool:
    """Whether it is uint8 RGBA [H, W, 4] with a transparent pixel."""
    is_rgba = pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 4
    return is_rgba and bool(np.any(pixels[:, :, 3] < 255))


def compose(pixels: np.ndarray, background: int | tuple[int, int, int]) -> np.ndarray:
    """RGBA [H, W, 4] over a colour, as Pillow computes it: uint8 [H, W, 3]."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    colour = background if isinstance(background, tuple) else (background,) * 3
    below = Image.new("RGBA", image.size, colour)
    below.alpha_composite(image)
    return np.asarray(below.convert("RGB"))
