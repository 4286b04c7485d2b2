"""Image files to pixels, unusual and damaged ones too."""

import functools
import io
import sys
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.fixtures_data import broken_images, encoded, picture
from vit_jax.data.decode import crop, damage, decode_box, decode_image, remark
from vit_jax.data.jpeg import first_rows, read_frame
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
    palette = Image.fromarray(image).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    black_and_white = Image.fromarray(gray > 127)
    for stored, format in ((palette, "PNG"), (palette, "GIF"), (black_and_white, "PNG")):
        expected = np.asarray(stored.convert("RGB"))
        np.testing.assert_array_equal(decode(encoded(stored, format)), expected)
    deep = np.random.default_rng(0).integers(0, 65536, (6, 7), np.uint16)
    np.testing.assert_array_equal(decode(encoded(deep, "PNG"), 1)[..., 0], deep >> 8)
    np.testing.assert_array_equal(decode(encoded(deep, "TIFF"), 1)[..., 0], deep >> 8)
    cmyk = encoded(Image.fromarray(image).convert("CMYK"), quality=95)
    expected = np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"), int)
    assert np.abs(decode(cmyk) - expected).max() <= 2


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "float32", "float64"])
def test_samples_without_a_scale_to_8_bits_are_refused(dtype):
    data = cv2.imencode(".tif", np.arange(80).reshape(8, 10).astype(dtype))[1].tobytes()
    with pytest.raises(ValueError, match=f"its samples are {dtype}, with no known scale"):
        decode(data)
    assert damage(data)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_photographs_are_turned_upright(orientation, turns):
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg = encoded(picture(0), exif=exif)
    stored = np.asarray(Image.open(io.BytesIO(jpeg)))
    np.testing.assert_array_equal(decode(jpeg), np.rot90(stored, turns))
    np.testing.assert_array_equal(decode(jpeg, exif=False), stored)


def random_box(seed):
    """Draws a box (top, left, height, width) in an image of a size."""

    def sample(height, width):
        rng = np.random.default_rng(seed)
        top, left = int(rng.integers(height)), int(rng.integers(width))
        return (
            top,
            left,
            int(rng.integers(1, height - top + 1)),
            int(rng.integers(1, width - left + 1)),
        )

    return sample


def outcome(function, *arguments, **options):
    try:
        return function(*arguments, **options).tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"progressive": True},
        {"restart_marker_rows": 1},
        {"orientation": 1},
        {"orientation": 3},
        {"orientation": 6},
    ],
    ids=str,
)
def test_a_box_is_that_of_the_whole_image(options, channels):
    if orientation := options.get("orientation"):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"exif": exif}
    for seed in range(24):
        image = picture(seed, size=(70 + 9 * seed, 96), channels=1 if seed % 4 == 3 else 3)
        data, sample = encoded(image, quality=60 + seed, **options), random_box(seed)
        for exif in (True, False):
            whole = decode(data, channels, exif)
            box = decode_box(data, sample, channels=channels, exif=exif)
            np.testing.assert_array_equal(box, crop(whole, *sample(*whole.shape[:2])))


def test_rows_below_a_box_are_not_read():
    data = encoded(picture(0, size=(200, 90)), quality=90)
    frame = read_frame(data)
    assert (frame.height, frame.width) == (200, 90)
    start = data.index(b"\xff\xda")  # of the codes
    damaged = data[: (start + len(data)) // 2] + bytes(len(data) - (start + len(data)) // 2 - 2)
    box = decode_box(damaged + b"\xff\xd9", lambda *_: (0, 0, 64, 90), channels=3, exif=True)
    np.testing.assert_array_equal(box, decode(data)[:64])
    assert len(decode(first_rows(data, frame, 64))) == 68  # four more, for their chroma
    assert first_rows(data, frame, 190) is data


def test_a_box_of_a_damaged_file_is_what_it_was(capfd):
    rng = np.random.default_rng(0)
    for seed in range(300):
        data = bytearray(encoded(picture(seed, size=(90, 40)), quality=80))
        for _ in range(seed % 3):
            data[int(rng.integers(2, len(data)))] = int(rng.integers(256))
        end = int(rng.integers(2, len(data))) if seed % 5 == 0 else len(data)
        damaged = bytes(data[:end]) + (b"\xff\xd9" if seed % 10 == 0 else b"")
        sample = random_box(seed)

        def whole(data=damaged, sample=sample):
            pixels = decode(data)
            return crop(pixels, *sample(*pixels.shape[:2]))

        assert outcome(decode_box, damaged, sample, channels=3, exif=True) == outcome(whole), seed
    capfd.readouterr()  # the decoder's remarks


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_box_is_the_smallest_that_is_large_enough(orientation, channels):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(5, size=(400, 360)), quality=92, exif=exif)
    upright = decode(data, channels)
    for height, width, scale in ((320, 288, 8), (160, 280, 4), (152, 200, 2), (79, 300, 1)):
        sample = functools.partial(lambda *values: values[:4], 16, 8, height, width)
        options = {"channels": channels, "exif": True, "reduced_to": (40, 36)}
        box, expected = decode_box(data, sample, **options), crop(upright, 16, 8, height, width)
        shape = (width // scale, height // scale)
        expected = cv2.resize(expected, shape, interpolation=cv2.INTER_AREA).reshape(box.shape)
        assert np.abs(box.astype(float) - expected).mean() <= (1.5 if scale > 1 else 0)


def test_what_is_wrong_is_said():
    for name, data in broken_images().items():
        assert damage(data)
        if name != "lzw.tif":  # OpenCV returns what it has read
            with pytest.raises(ValueError, match="cannot be decoded"):
                decode(data)
    floats = cv2.imencode(".tiff", np.zeros((8, 8), np.float32))[1].tobytes()
    assert "its samples are float32" in damage(floats)
    ten_bits = encoded(np.full((8, 8), 1023, np.uint16), "PNG")
    assert "10 of 16 bits" in remark(ten_bits)
    assert not remark(encoded(np.full((8, 8), 60_000, np.uint16), "PNG"))
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
    assert not damage(data)
    for cut in (*range(0, len(data), max(len(data) // 8, 1)), len(data) - 4, len(data) - 1):
        assert damage(data[:cut]), f"{cut}/{len(data)}"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_small_images_are_whole_ones(format):
    for size in ((1, 1), (7, 12), (8, 3)):
        assert not damage(encoded(picture(0, size=size), format)), size


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
    assert not damage(with_remark)
    assert capfd.readouterr().err == ""
    assert damage(with_remark[: start + 6])


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
    assert not damage(data)
    assert damage(data[:-20])
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(data[:100])


def test_without_its_package_heic_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    header = b"\0\0\0\x1cftypmif1\0\0\0\0mif1heic"
    for function in (decode, damage):
        with pytest.raises(UserError, match=r"a HEIC image needs .*pillow_heif: .*'\.\[heic\]'"):
            function(header)
