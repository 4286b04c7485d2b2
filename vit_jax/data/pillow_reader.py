"""Files that Pillow reads: AVIF, HEIC and images with transparent pixels; and Pillow's images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from vit_jax.data.bands import JPEG_2000, band_problem, has_alpha
from vit_jax.errors import import_extra

PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_AVIF = (b"ftypavif", b"ftypavis")
_HEIC = (b"heic", b"heix", b"hevc")  # compatible brands of a file
_PAGE_KIND, _BITS, _PLANES = 254, 258, 284  # TIFF tags

Background = int | tuple[int, int, int] | None


def read_by_pillow(data: bytes, *, exif: bool) -> np.ndarray | None:
    """Pixels that OpenCV would get wrong, as `pillow_pixels`; None for a file that it may read.

    It cannot read HEIC, ignores the rotation of AVIF, and drops transparency. ValueError if the
    file is damaged, or its bands are no picture.
    """
    from PIL import Image

    if data.startswith(_JPEG) or _is_opaque_png(data):
        return None
    is_heic = data[4:8] == b"ftyp" and any(brand in data[8:40] for brand in _HEIC)
    kind = "HEIC" if is_heic else "AVIF" if data[4:12] in _AVIF else ""
    if is_heic:
        import_extra("a HEIC image", "pillow_heif", "heic").register_heif_opener()
    try:
        image: Any = Image.open(io.BytesIO(data))
    except Exception as error:  # plugins raise anything for a damaged header
        if kind:
            raise ValueError(f"the {kind} image cannot be decoded ({error})") from error
        image = None  # OpenCV reads other kinds too
    alpha = image is not None and image.has_transparency_data
    alpha = alpha and (not data.startswith(JPEG_2000) or has_alpha(data))
    if reason := band_problem(data, alpha=alpha):
        raise ValueError(reason)
    if not kind and not alpha:
        return None
    try:
        if image.format == "TIFF" and _has_deep_planes(image):
            raise ValueError("16-bit planes with transparency; interleave the bands")
        if data.startswith(PNG) and data[24:25] == b"\x10" and "transparency" in image.info:
            raise ValueError("a transparent colour of 16 bits; make transparency a band")
        pixels = pillow_pixels(image, exif=exif)
    except (OSError, ValueError, SyntaxError) as error:
        reason = f"the {image.format} image cannot be decoded ({error})"
        raise ValueError(reason) from error
    return pixels if kind or pixels.shape[2:] == (4,) else None


def _is_opaque_png(data: bytes) -> bool:
    """Grey, colour or palette without a transparent one: seen without the 12 us of Pillow."""
    is_plain = data.startswith(PNG) and data[25:26] in (b"\0", b"\2", b"\3")
    return is_plain and b"tRNS" not in data[: data.find(b"IDAT")]


def _has_deep_planes(image: Any) -> bool:
    """Whether a TIFF image has 16-bit bands one after the other, which Pillow misreads."""
    return image.tag_v2.get(_PLANES) == 2 and image.tag_v2[_BITS][0] > 8


def has_pages(data: bytes) -> bool:
    """Whether a TIFF file has several pages, besides overviews and masks, that Pillow can read."""
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(data)) as image:
            kinds = [page.tag_v2.get(_PAGE_KIND, 0) for page in ImageSequence.Iterator(image)]
    except (OSError, ValueError, SyntaxError):
        return False
    return sum(not kind & 5 for kind in kinds) > 1  # bits of an overview and of a mask


def pillow_pixels(image: Any, *, exif: bool) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3] of a Pillow image; RGBA [H, W, 4] if any pixel is transparent.

    `exif` turns it as its tag says. ValueError above 8 bits.
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
    below = Image.new("RGBA", image.size, (*colour, 255))
    return np.asarray(Image.alpha_composite(below, image))[:, :, :3]
