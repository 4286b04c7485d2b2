"""Headers of JPEG files, and shorter files that hold only the first rows of one.

Most of the time of a decoder goes into Huffman codes, which it must read from the first row on. So
what lies above or beside a crop saves little, but the rows below it need not be read.
"""

import dataclasses
import struct

# Segments that change nothing below: Huffman and quantization tables, restarts, remarks, APPn.
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive; with Huffman codes
_END = b"\xff\xd9"


@dataclasses.dataclass(frozen=True)
class Frame:
    """The size of a file's image as stored, and where the file says so."""

    height: int
    width: int
    position: int  # of the height
    mcu_height: int  # rows that are coded together; 0 if rows are not coded one after the other
    orientation: int  # Exif's; 1 is upright


def read_frame(data: bytes) -> Frame | None:
    """None if it is not a JPEG file, or has no plain header and end."""
    if not data.startswith(b"\xff\xd8") or not data.endswith(_END):
        return None
    position, frame, has_restarts, exif = 2, b"", False, []
    while len(head := data[position : position + 4]) == 4 and head[0] == 0xFF:
        kind, content = head[1], position + 4
        position += 2 + int.from_bytes(head[2:])
        if kind in _FRAMES and not frame:
            frame, start = data[content:position], content
            is_progressive = kind == 0xC2
        elif kind == 0xDA and len(frame) >= 9:  # the first scan
            break
        elif kind not in _SKIPPED:
            return None
        has_restarts |= kind == 0xDD
        if kind == 0xE1 and data.startswith(b"Exif\0\0", content):
            exif.append(data[content + 6 : position])
    else:
        return None
    _, height, width, channels = struct.unpack_from(">BHHB", frame)
    orientation = _orientation(exif[0]) if exif else 1
    if not height or not width or not orientation or len(exif) > 1:
        return None
    # Left alone: files with one scan for each channel, and restart markers, which libjpeg reports.
    in_rows = not is_progressive and not has_restarts and data[content] == channels
    sampling = max(factor & 15 for factor in frame[7::3]) if channels > 1 else 1
    return Frame(height, width, start + 1, 8 * sampling * in_rows, orientation)


def _orientation(tiff: bytes) -> int:
    """That of Exif data, 1 without one; 0 if it cannot be told."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4], "")
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, start)
        places = range(start + 2, start + 2 + 12 * count, 12)
        entries = [struct.unpack_from(f"{order}HHIH", tiff, place) for place in places]
    except struct.error:
        return 0
    tags = [entry[1:] for entry in entries if entry[0] == 0x0112] or [(3, 1, 1)]
    kind, number, value = tags[0]
    is_plain = order and len(tags) == 1 and (kind, number) == (3, 1) and 1 <= value <= 8
    return value if is_plain else 0


def first_rows(data: bytes, frame: Frame, count: int) -> bytes:
    """A file, without an end, whose first `count` rows decode to those of `data`, to the bit.

    Some rows more, since chroma is interpolated between rows. The header says a smaller height; a
    decoder that waits for more data after the last row never sees the rest.
    """
    unit = frame.mcu_height
    count += unit // 4
    if not unit or -(-count // unit) >= -(-frame.height // unit):
        return data
    at = frame.position
    return data[:at] + count.to_bytes(2) + data[at + 2 : -len(_END)]
