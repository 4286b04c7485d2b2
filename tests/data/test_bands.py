"""Satellite images and other files whose bands are no picture: refused with their number."""

import struct

import numpy as np
import pytest
from PIL import Image

from tests.fixtures_data import encoded
from vit_jax.data.decode import damage, decode_image, remark

GREY, COLOUR = 1, 2  # photometric interpretations of TIFF


def tiff(pixels, photometric, extra, planes=False, big=False, order="<"):
    """A TIFF file of [H, W, C] with the tag ExtraSamples, as GDAL writes it; `big`: BigTIFF."""
    height, width, bands = pixels.shape
    tags = {
        256: [width],
        257: [height],
        258: [8 * pixels.itemsize] * bands,
        259: [1],
        262: [photometric],
        273: [0] * (bands if planes else 1),  # where strips start: written below
        277: [bands],
        278: [height],
        279: [pixels.nbytes // bands] * bands if planes else [pixels.nbytes],
        284: [1 + planes],
        **({338: extra} if extra else {}),
    }
    entry, head = ("HHQ", 16) if big else ("HHI", 8)
    room = 8 if big else 4
    after = head + (8 if big else 2) + len(tags) * (20 if big else 12) + room
    sizes = [4 * len(values) for values in tags.values()]
    strips = after + sum(size for size in sizes if size > room)
    tags[273] = [strips + i * tags[279][0] for i in range(len(tags[273]))]
    entries, values = b"", b""
    for tag, numbers in tags.items():
        is_long = tag in (273, 279)
        raw = struct.pack(f"{order}{len(numbers)}{'I' if is_long else 'H'}", *numbers)
        entries += struct.pack(order + entry, tag, 4 if is_long else 3, len(numbers))
        if len(raw) > room:
            entries += struct.pack(order + ("Q" if big else "I"), after + len(values))
            values += raw.ljust(4 * len(numbers), b"\0")
        else:
            entries += raw.ljust(room, b"\0")
    values = values.ljust(strips - after, b"\0")
    start = struct.pack(f"{order}HHHQQ", 43, 8, 0, 16, len(tags)) if big else b""
    start = start or struct.pack(f"{order}HIH", 42, 8, len(tags))
    stored = np.moveaxis(pixels, 2, 0) if planes else pixels
    magic = {"<": b"II", ">": b"MM"}[order]
    stored = stored.astype(stored.dtype.newbyteorder(order))
    return magic + start + entries + bytes(room) + values + stored.tobytes()


def noise(bands, dtype):
    top = np.iinfo(dtype).max
    return np.random.default_rng(0).integers(0, top, (16, 12, bands), dtype, endpoint=True)


def high_bytes(pixels):
    return (pixels >> (8 * (pixels.itemsize - 1))).astype(int)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("form", [{}, {"big": True}, {"order": ">"}], ids=str)
def test_bands_are_counted_and_never_one_of_them_grey(form, dtype, planes):
    for bands, photometric, extra in (
        (2, GREY, [0]),
        (3, GREY, [0, 0]),
        (4, GREY, [0, 0, 0]),
        (4, GREY, [0, 0, 2]),
        (4, GREY, []),
        (5, COLOUR, [0, 0]),
        (6, GREY, [0] * 5),
    ):
        data = tiff(noise(bands, dtype), photometric, extra, planes, **form)
        message = f"its {bands} bands are not said to be red, green and blue"
        with pytest.raises(ValueError, match=message):
            decode_image(data, channels=3, exif=True)
        assert message in damage(data)
    # A picture: one band, three colours, and a fourth that is not opacity.
    for bands, photometric, extra in ((1, GREY, []), (3, COLOUR, []), (4, COLOUR, [0])):
        pixels = noise(bands, dtype)
        data = tiff(pixels, photometric, extra, planes, **form)
        decoded = decode_image(data, channels=3, exif=True)
        assert np.abs(decoded - high_bytes(pixels)[:, :, :3]).max() <= (pixels.itemsize > 1)
        assert not damage(data)
        assert not remark(data)


def test_a_band_of_opacity_is_composed_or_refused():
    for dtype in (np.uint8, np.uint16):
        pixels = noise(4, dtype)
        for planes in (False, True):
            data = tiff(pixels, COLOUR, [2], planes)
            if planes and dtype == np.uint16:
                assert "16-bit planes with transparency" in damage(data)
                continue
            rgba = high_bytes(pixels).astype(np.uint8)
            expected = decode_image(rgba, channels=3, exif=True)
            np.testing.assert_array_equal(decode_image(data, channels=3, exif=True), expected)
    # Grey with opacity, multiplied by it or not: Pillow reads 8 bits only.
    grey = noise(2, np.uint8)
    rgba = np.repeat(grey, [3, 1], axis=2)
    data = tiff(grey, GREY, [2])
    np.testing.assert_array_equal(
        decode_image(data, channels=3, exif=True), decode_image(rgba, channels=3, exif=True)
    )
    assert "transparent" in remark(tiff(grey, GREY, [1]))
    assert "2 bands" in damage(tiff(noise(2, np.uint16), GREY, [2]))


def jpeg_2000(bands, opacity, space=16):
    """A file of Pillow's with other headers: which band is opacity, and the colour space."""
    pixels = noise(bands, np.uint8)
    data = encoded(Image.fromarray(pixels), "JPEG2000")
    if not opacity:
        data = data.replace(b"cdef", b"free")
    at = data.index(b"colr") + 7
    return pixels, data[:at] + space.to_bytes(4) + data[at + 4 :]


def test_bands_of_jpeg_2000():
    pixels, data = jpeg_2000(4, opacity=True)
    expected = decode_image(pixels, channels=3, exif=True)
    np.testing.assert_array_equal(decode_image(data, channels=3, exif=True), expected)
    pixels, data = jpeg_2000(4, opacity=False)
    np.testing.assert_array_equal(decode_image(data, channels=3, exif=True), pixels[:, :, :3])
    assert not damage(data)
    assert "transparent" in remark(jpeg_2000(2, opacity=True, space=17)[1])
    for bands, space in ((2, 17), (4, 17)):
        assert f"its {bands} bands" in damage(jpeg_2000(bands, opacity=False, space=space)[1])
