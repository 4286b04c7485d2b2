"""Image files to pixels, unusual and damaged ones too."""

import io
import sys
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.fixtures_data import broken_images, encoded, picture
from vit_jax.data import decode as decode_module
from vit_jax.data.decode import decode_image, decodes, sample_warning
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError


def decode(image, channels=3, exif=True):
    return decode_image(image, channels=channels, exif=exif)


def test_png_exactly_and_jpeg_as_pillow():
    image = picture(0)
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        np.testing.assert_array_equal(decode(encoded(image, format, **options)), image)
    jpeg = encoded(image, quality=90)
    np.testing.assert_array_equal(decode(jpeg), np.asarray(Image.open(io.BytesIO(jpeg))))


def test_unusual_files():
    image, gray = picture(0), picture(0, channels=1)
    np.testing.assert_array_equal(decode(encoded(gray, "PNG")), np.repeat(gray[..., None], 3, 2))
    np.testing.assert_array_equal(decode(encoded(gray, "PNG"), 1)[..., 0], gray)
    alpha = np.concatenate([image, gray[..., None]], axis=2)
    np.testing.assert_array_equal(decode(encoded(alpha, "PNG")), image)
    palette = Image.fromarray(image).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    black_and_white = Image.fromarray(gray > 127)
    for stored, format in ((palette, "PNG"), (palette, "GIF"), (black_and_white, "PNG")):
        expected = np.asarray(stored.convert("RGB"))
        np.testing.assert_array_equal(decode(encoded(stored, format)), expected)
    deep = np.random.default_rng(0).integers(0, 65536, (6, 7), np.uint16)
    np.testing.assert_array_equal(decode(encoded(deep, "PNG"), 1)[..., 0], deep >> 8)
    assert not sample_warning(encoded(deep, "PNG"))
    for format in ("PNG", "TIFF"):
        assert "use 12 of 16 bits" in sample_warning(encoded(deep >> 4, format))
    cmyk = encoded(Image.fromarray(image).convert("CMYK"), quality=95)
    expected = np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"), int)
    assert np.abs(decode(cmyk) - expected).max() <= 2


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "float32", "float64"])
def test_samples_without_a_scale_to_8_bits_are_refused(dtype):
    data = cv2.imencode(".tif", np.arange(80).reshape(8, 10).astype(dtype))[1].tobytes()
    with pytest.raises(ValueError, match=f"its samples are {dtype}, with no known scale"):
        decode(data)
    assert not decodes(data)
    assert dtype in sample_warning(data)


def test_an_empty_crop_is_one_line():
    for image in (np.zeros((0, 5, 3), np.uint8), np.zeros((5, 0), np.uint8)):
        with pytest.raises(ValueError, match="is empty"):
            decode(image)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_photographs_are_turned_upright(orientation, turns):
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg = encoded(picture(0), exif=exif)
    stored = np.asarray(Image.open(io.BytesIO(jpeg)))
    np.testing.assert_array_equal(decode(jpeg), np.rot90(stored, turns))
    np.testing.assert_array_equal(decode(jpeg, exif=False), stored)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3, 4])
def test_pixels_need_no_decoding(stored, channels):
    image = np.random.default_rng(0).integers(0, 256, (30, 40, stored), np.uint8)
    out = decode(image, channels)
    assert out.shape == (30, 40, channels)
    if stored == channels:
        np.testing.assert_array_equal(out, image)
    assert decode(image[:, :, 0]).shape == (30, 40, 3)


def test_what_is_wrong_is_said():
    for data in broken_images().values():
        with pytest.raises(ValueError, match="cannot be decoded"):
            decode(data)
    with pytest.raises(ValueError, match=r"not float32 \[2, 2, 3\]"):
        decode(np.zeros((2, 2, 3), np.float32))
    with pytest.raises(UserError, match="must start with decode"):
        parse("resize(4)")({"image": encoded(picture(0))}, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("format", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})],
)
def test_truncation_is_seen_wherever_it_is(format, options):
    data = encoded(picture(0, size=(64, 80)), format, **options)
    assert decodes(data)
    for cut in (*range(0, len(data), max(len(data) // 8, 1)), len(data) - 4, len(data) - 1):
        assert not decodes(data[:cut]), f"{cut}/{len(data)}"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_small_images_are_whole_ones(format):
    for size in ((1, 1), (7, 12), (8, 3)):
        assert decodes(encoded(picture(0, size=size), format)), size


@pytest.mark.parametrize(
    ("kind", "content"), [(b"iCCP", b"\xff" * 9), (b"gAMA", (45455).to_bytes(4)), (b"sRGB", b"\0")]
)
def test_remarks_in_a_png_file_change_nothing(kind, content, capfd):
    """libpng would print a line for a damaged one; grey is the same whatever the gamma."""
    image = picture(0, size=(20, 30))
    data = encoded(image, "PNG")
    check = zlib.crc32(kind + content) ^ (content[0] > 1)  # of what is no gamma, it is wrong
    start = 8 + 25  # signature and IHDR
    remark = len(content).to_bytes(4) + kind + content + check.to_bytes(4)
    with_remark = data[:start] + remark + data[start:]
    unfiltered = cv2.imdecode(np.frombuffer(with_remark, np.uint8), cv2.IMREAD_GRAYSCALE)
    expected = decode(data, 1)
    assert "libpng warning" in capfd.readouterr().err or np.any(unfiltered != expected[..., 0])
    np.testing.assert_array_equal(decode(with_remark), image)
    np.testing.assert_array_equal(decode(with_remark, 1), expected)
    assert decodes(with_remark)
    assert capfd.readouterr().err == ""
    assert not decodes(with_remark[: start + 6])


# Red over blue, 64 x 32; `orientation` is that of the file's Exif.
def heic(**options):
    package = pytest.importorskip("pillow_heif")  # of the extra `heic`
    pixels = np.zeros((64, 32, 3), np.uint8)
    pixels[:32, :, 0], pixels[32:, :, 2] = 220, 220
    file = io.BytesIO()
    package.from_pillow(Image.fromarray(pixels)).save(file, quality=-1, **options)
    return pixels, file.getvalue()


def test_heic_is_decoded_and_damage_is_seen():
    pixels, data = heic()
    # Lossless but for the chroma of YCbCr, which is shared by four pixels.
    np.testing.assert_allclose(decode(data).astype(int), pixels, atol=8)
    assert decode(data, channels=1).shape == (64, 32, 1)
    assert decodes(data)
    assert not decodes(data[:-20])
    with pytest.raises(ValueError, match="the HEIC image cannot be decoded"):
        decode(data[:100])


def test_without_its_package_heic_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decode_module._register_heic.cache_clear()
    header = b"\0\0\0\x1cftypmif1\0\0\0\0mif1heic"
    for function in (decode, decodes):
        with pytest.raises(UserError, match=r"a HEIC image needs .*pillow_heif: .*'\.\[heic\]'"):
            function(header)
