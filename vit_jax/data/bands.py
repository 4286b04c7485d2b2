"""Headers of TIFF and JPEG 2000 files: whether their bands are a picture.

OpenCV shows the first band of satellite images as grey, Pillow takes any fourth for transparency.
"""

from __future__ import annotations

import struct

JPEG_2000 = b"\0\0\0\x0cjP"
_CODESTREAM = b"\xff\x4f\xff\x51"
# Where the first directory is, and its number of entries, an entry, and the bytes of one.
_CLASSIC, _BIG = ("4xI", "H", "HHIH", 12), ("8xQ", "Q", "HHQH", 20)
_LAYOUTS = {
    b"II*\0": ("<", *_CLASSIC),
    b"MM\0*": (">", *_CLASSIC),
    b"II+\0": ("<", *_BIG),
    b"MM\0+": (">", *_BIG),
}
TIFF = tuple(_LAYOUTS)
_PHOTOMETRIC, _SAMPLES = 262, 277  # tags
_GREY = (0, 1, 3)  # white is 0, black is 0, a palette


def tiff_entries(data: bytes) -> list[tuple[int, int, int, int]] | None:
    """(tag, type, count, first 16 bits of the value) of a file's first directory, or of Exif data.

    None if it is damaged.
    """
    if (layout := _LAYOUTS.get(data[:4])) is None:
        return None
    order, first, count, entry, size = layout
    try:
        (start,) = struct.unpack_from(order + first, data)
        (number,) = struct.unpack_from(order + count, data, start)
        start += struct.calcsize(order + count)
        places = range(start, start + size * number, size)
        return [struct.unpack_from(order + entry, data, place) for place in places]
    except (struct.error, OverflowError):
        return None


def has_alpha(data: bytes) -> bool:
    """Whether a JPEG 2000 file says that one of its bands is opacity."""
    _, _, channels = data[: data.find(_CODESTREAM)].partition(b"cdef")
    end = 2 + 6 * int.from_bytes(channels[:2])  # after (band, kind, colour) of each, 16 bits
    return not {1, 2}.isdisjoint(channels[5:end:6])  # 2: colours are multiplied by it


def band_problem(data: bytes, *, alpha: bool) -> str:
    """Why the bands of a file are no picture, else ""; `alpha`: one of them is opacity."""
    if data.startswith(TIFF):
        tags = {tag: value for tag, _, _, value in tiff_entries(data) or ()}
        count, is_grey = tags.get(_SAMPLES, 1), tags.get(_PHOTOMETRIC) in _GREY
    elif data.startswith((JPEG_2000, _CODESTREAM)):
        start = data.find(_CODESTREAM)
        space = data[:start].partition(b"colr")[2][:7]  # method, two bytes, colour space
        count = int.from_bytes(data[start + 40 : start + 42])
        is_grey = count == 2 or (space[:1], space[3:]) == (b"\1", b"\0\0\0\x11")
    else:
        return ""
    if count <= 4 and not (is_grey and count - alpha > 1):
        return ""
    choice = "choose three, such as gdal_translate -b 3 -b 2 -b 1 -co PHOTOMETRIC=RGB"
    return f"its {count} bands are not said to be red, green and blue; {choice}"
