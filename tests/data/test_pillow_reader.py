"""Transparent pixels of every kind of file, of arrays and of Pillow's images: on a background."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.fixtures_data import encoded, picture
from vit_jax.data.check_images import usable_images
from vit_jax.data.decode import damage, decode_box, decode_image, remark
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError

ALPHA = np.clip(np.arange(48) * 8 - 60, 0, 255).astype(np.uint8) * np.ones((40, 1), np.uint8)
RGBA = Image.fromarray(np.dstack([picture(0), ALPHA]))
LA = Image.fromarray(np.dstack([picture(0, channels=1), ALPHA]))
PALETTE = Image.fromarray(picture(0)).quantize(16)
CORNER = RGBA.convert("RGB").getpixel((0, 0))
FILES = {
    "png": encoded(RGBA, "PNG"),
    "png_grey": encoded(LA, "PNG"),
    "png_palette": encoded(PALETTE, "PNG", transparency=3),
    "png_palette_levels": encoded(PALETTE, "PNG", transparency=bytes([0, 128] * 8)),
    "png_colour": encoded(RGBA.convert("RGB"), "PNG", transparency=CORNER),
    "png_bits": encoded(LA.convert("1"), "PNG", transparency=0),
    "png_interlaced": encoded(RGBA, "PNG", interlace=1),
    "gif": encoded(PALETTE, "GIF", transparency=3),
    "webp": encoded(RGBA, "WEBP", lossless=True),
    "tiff": encoded(RGBA, "TIFF", compression="tiff_lzw"),
    "tiff_grey": encoded(LA, "TIFF"),
    "jpeg_2000": encoded(RGBA, "JPEG2000"),
    "avif": encoded(RGBA, "AVIF"),
}


def decode(image, channels=3, **options):
    return decode_image(image, channels=channels, exif=True, **options)


def composed(image, colour="white"):
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, colour), image).convert("RGB")


@pytest.mark.parametrize("name", FILES)
def test_transparent_pixels_are_composed(name, tmp_path):
    data = FILES[name]
    (path := tmp_path / name).write_bytes(data)
    with Image.open(path) as image:
        image.load()
    expected, hidden = np.asarray(composed(image)), np.asarray(image.convert("RGBA"))[:, :, :3]
    assert np.any(expected != hidden)
    np.testing.assert_array_equal(decode(data), expected)
    np.testing.assert_array_equal(decode(data, background=255), expected)
    on_green = np.asarray(composed(image, (0, 200, 7)))
    np.testing.assert_array_equal(decode(data, background=(0, 200, 7)), on_green)
    np.testing.assert_array_equal(decode(data, background=None), hidden)
    np.testing.assert_array_equal(decode(data, 1), decode(expected, 1))
    box = decode_box(data, lambda *_: (2, 3, 20, 30), channels=3, exif=True, background=9)
    np.testing.assert_array_equal(box, decode(data, background=9)[2:22, 3:33])
    assert not damage(data)
    assert remark(data).startswith("transparent pixels, composed on white")


def test_arrays_and_images_in_memory_are_composed():
    pixels = np.asarray(RGBA)
    expected = np.asarray(composed(RGBA))
    np.testing.assert_array_equal(decode(pixels), expected)
    assert "transparent" in remark(pixels)
    run = parse("decode(background=0)|resize(40, 48)")
    black = run({"image": pixels}, np.random.default_rng(0))["image"]
    np.testing.assert_array_equal(black, np.asarray(composed(RGBA, "black")))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_opaque_alpha_changes_nothing(format):
    image = picture(0)
    opaque = np.dstack([image, np.full((40, 48), 255, np.uint8)])
    options = {"lossless": True} if format == "WEBP" else {}
    for stored in (opaque, encoded(opaque, format, **options)):
        np.testing.assert_array_equal(decode(stored), image)
        assert not remark(stored)
    plain = encoded(image, format, **options)
    np.testing.assert_array_equal(decode(encoded(opaque, format, **options), 1), decode(plain, 1))


def deep_png(pixels, kind, transparent=()):
    """A PNG file of 16 bits: big-endian [H, W, C], its colour type and its transparent colour."""

    def chunk(name, content):
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    colour = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)),
            colour if transparent else b"",
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        ]
    )


def test_16_bits():
    deep = np.random.default_rng(0).integers(0, 65536, (6, 7, 4), np.uint16)
    expected = decode((deep >> 8).astype(np.uint8))
    np.testing.assert_array_equal(decode(deep_png(deep, 6)), expected)
    for bands, kind in ((1, 0), (3, 2)):
        data = deep_png(deep[:, :, :bands], kind, (1000, 2000, 3000)[:bands])
        assert "has no 8-bit pixels" in damage(data)
        assert not damage(deep_png(deep[:, :, :bands], kind))


def test_damage_to_a_transparent_file_is_seen():
    for name in ("png", "webp", "tiff", "gif", "jpeg_2000"):
        data = FILES[name]
        for cut in (10, len(data) // 2):
            assert damage(data[:cut]), name
            with pytest.raises(ValueError, match="cannot be decoded"):
                decode(data[:cut])


def test_the_check_counts_them_once(caplog):
    images = [FILES["png"], encoded(picture(1)), np.asarray(RGBA), FILES["gif"]]
    assert len(usable_images(4, images.__getitem__, str, "error")) == 4
    [line] = [record.getMessage() for record in caplog.records]
    start = "3 of 4 images with transparent pixels, composed on white (or on decode's background)"
    assert line == f"{start}: 0, 2, 3."


@pytest.mark.parametrize("background", ["256", "(0, 0, -1)", "'white'", "0.5"])
def test_a_background_is_a_colour(background):
    with pytest.raises(UserError, match="background"):
        parse(f"decode(background={background})")
    assert parse("decode(background=None)").ops[0].background is None
