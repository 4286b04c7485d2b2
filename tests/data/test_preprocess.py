from __future__ import annotations

import io
import pickle
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from tests import fixtures_data
from vit_jax.data import preprocess
from vit_jax.data.decode import decode_image, decodes
from vit_jax.data.ops import InceptionCrop
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError


def picture(height=30, width=40, channels=3, seed=0):
    """Smooth random colours, so that JPEG loses little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, channels), np.uint8)
    return cv2.resize(small, (width, height)).reshape(height, width, channels)


def encode(image, kind="PNG", **options):
    mode = image if isinstance(image, Image.Image) else Image.fromarray(np.squeeze(image))
    buffer = io.BytesIO()
    mode.save(buffer, kind, **options)
    return buffer.getvalue()


def run(spec, image, seed=0):
    return parse(spec)({"image": image, "label": 3}, np.random.default_rng(seed))["image"]


# The grammar.


def test_repr_shows_every_argument():
    assert repr(parse("decode | inception_crop(224, ratio=[1, 2]) | flip_lr()")) == (
        "Chain(ops=(Decode(channels=3, exif=True), "
        "InceptionCrop(size=224, area=(0.05, 1.0), ratio=(1.0, 2.0)), FlipLr()))"
    )


def test_every_op_can_be_written_and_pickled():
    arguments = {
        "resize": "4, 5, method='area'",
        "resize_small": "4",
        "central_crop": "4",
        "random_crop": "4, 5",
        "inception_crop": "(4, 5)",
        "normalize": "0.5, std=(1, 2, 3)",
    }
    for name, op in preprocess.OPS.items():
        chain = parse(f"{name}({arguments.get(name, '')})")
        assert type(chain.ops[0]) is op
        assert pickle.loads(pickle.dumps(chain)) == chain


def test_named_pipelines_expand():
    assert parse("official_train(224)|value_range") == parse(
        "decode|inception_crop(224)|flip_lr|value_range"
    )
    assert parse("official_eval(224)") == parse("decode|resize(224, 224)")
    assert parse("official_eval((32, 64), exif=False)") == parse(
        "decode(exif=False)|resize(32, 64)"
    )
    assert parse("big_vision_eval(224, resize=256)") == parse(
        "decode|resize_small(256)|central_crop(224)"
    )


def test_pipelines_of_the_pytorch_world_expand():
    assert parse("timm_eval(224)") == parse(
        "decode|resize_small(248, 'pillow_bicubic', 'down')|central_crop(224, rounding='nearest')"
    )
    assert parse("timm_eval(384, crop_pct=1)").ops[1].size == 384
    assert parse("deit_eval(224, exif=False)") == parse(
        "decode(exif=False)|resize_small(256, 'pillow_bicubic', 'down')"
        "|central_crop(224, rounding='nearest')"
        "|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
    )
    assert parse("deit_eval(384)").ops[1].size == 438
    assert parse("huggingface_eval((32, 64))") == parse("decode|resize(32, 64, 'pillow_bilinear')")
    assert parse("huggingface_eval(8, mean=0, std=(1, 1, 1))").ops[2:] == (
        parse("normalize(0.0, (1.0, 1.0, 1.0))").ops
    )


def test_a_bar_in_a_string_does_not_split():
    with pytest.raises(UserError, match=r"method='a\|b' must be one of bilinear"):
        parse("decode|resize(4, method='a|b')|flip_lr")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("decod|flip_lr", r"unknown op 'decod'. Did you mean 'decode'\? Known: decode, resize"),
        ("decode|quux", r"unknown op 'quux'. Known: .*, official_train"),
        ("resize()", r"missing a required argument: 'height' \(arguments: resize\(height, width="),
        ("resize(4, widht=5)", r"unknown argument 'widht'\. Did you mean 'width'\? \(arguments:"),
        ("resize(1, 2, 'area', 3)", "too many positional arguments"),
        ("resize(4, height=5)", "multiple values for argument 'height'"),
        ("resize('4')", "height='4' is not int"),
        ("resize(4.5)", "height=4.5 is not int"),
        ("resize(True)", "height=True is not int"),
        ("inception_crop((1, 2, 3))", r"size=\(1, 2, 3\) is not int \| tuple\[int, int\]"),
        ("inception_crop(8, area=(0.5, 2))", r"area=\(0.5, 2.0\) must be .* <= 1"),
        ("inception_crop(8, ratio=(2, 1))", r"ratio=\(2.0, 1.0\) must be"),
        ("decode(channels=2)", "channels=2 must be one of 1, 3"),
        ("random_crop(0)", "height=0 must be from 1 to 8192 pixels"),
        ("resize(1000000000)", "height=1000000000 must be from 1 to 8192 pixels"),
        ("randaug(10000000, 10)", "num_layers=10000000 must be from 1 to 100"),
        ("random_affine(border='mirror')", "border='mirror' must be one of constant, replicate"),
        ("random_affine(degrees=-1)", "degrees=-1.0.* must have degrees, translate and shear >= 0"),
        ("resize(size)", r"'resize\(size\)': arguments must be literals"),
        ("random_affine(**{})", "unknown argument 'None'"),
        ("os.system('x')", "is not a name"),
        ("decode|3", "'3' is not a name"),
        ("decode|", "invalid syntax; write it like"),
        ("", "invalid syntax; write it like"),
        (
            "official_eval(0)",
            r"stands for preprocess 'decode.*resize\(0, 0\)': .* must be from 1 to 8192",
        ),
        ("timm_eval(224, 1.1)", r"crop_pct=1.1 must be in \(0, 1\] \(arguments: timm_eval\(size,"),
        ("timm_eval(224, method='cubic')", "'pillow_cubic' must be one of bilinear, area"),
        ("central_crop(4, rounding='up')", "rounding='up' must be one of nearest, down"),
        ("normalize(0.5, 0)", "std=0.0 must be positive"),
        ("official_train(8, 8)", r"exif=8 is not bool \(arguments: official_train\(size"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(spec)
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


# Decoding.


def test_decode_png_exactly_and_jpeg_as_pillow():
    image = picture()
    np.testing.assert_array_equal(run("decode", encode(image)), image)
    jpeg = encode(image, "JPEG", quality=90)
    expected = np.asarray(Image.open(io.BytesIO(jpeg)))
    np.testing.assert_array_equal(run("decode", jpeg), expected)
    webp = encode(image, "WEBP", lossless=True)
    np.testing.assert_array_equal(run("decode", webp), image)


def test_decode_unusual_files():
    image, gray = picture(), picture(channels=1)
    np.testing.assert_array_equal(run("decode", encode(gray)), np.repeat(gray, 3, axis=2))
    np.testing.assert_array_equal(run("decode(1)", encode(gray)), gray)
    alpha = np.concatenate([image, picture(channels=1, seed=1)], axis=2)
    np.testing.assert_array_equal(run("decode", encode(alpha)), image)
    palette = Image.fromarray(image).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    for kind in ("PNG", "GIF"):
        expected = np.asarray(palette.convert("RGB"))
        np.testing.assert_array_equal(run("decode", encode(palette, kind)), expected)
    black_and_white = Image.fromarray(gray[:, :, 0] > 127)
    expected = np.asarray(black_and_white.convert("RGB"))
    np.testing.assert_array_equal(run("decode", encode(black_and_white)), expected)
    deep = np.random.default_rng(0).integers(0, 65536, (6, 7), np.uint16)
    ok, data = cv2.imencode(".png", deep)
    assert ok
    np.testing.assert_array_equal(run("decode(1)", data.tobytes())[:, :, 0], deep >> 8)


def test_decode_cmyk():
    jpeg = encode(Image.fromarray(picture()).convert("CMYK"), "JPEG", quality=95)
    stored = Image.open(io.BytesIO(jpeg))
    assert stored.mode == "CMYK"
    expected = np.asarray(stored.convert("RGB"), int)
    assert np.abs(run("decode", jpeg) - expected).max() <= 2


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_decode_turns_photographs_upright(orientation):
    image = Image.fromarray(picture())
    exif = Image.Exif()
    exif[0x0112] = orientation
    jpeg = encode(image, "JPEG", exif=exif)
    stored = np.asarray(Image.open(io.BytesIO(jpeg)))
    turns = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    np.testing.assert_array_equal(run("decode", jpeg), np.rot90(stored, turns))
    np.testing.assert_array_equal(run("decode(exif=False)", jpeg), stored)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stored", [1, 3, 4])
def test_decode_takes_pixels(stored, channels):
    image = picture(channels=stored)
    out = run(f"decode({channels})", image)
    assert out.shape == (30, 40, channels)
    if stored == channels:
        np.testing.assert_array_equal(out, image)
    assert run("decode", image[:, :, 0]).shape == (30, 40, 3)


def test_decode_says_what_is_wrong():
    png = encode(picture())
    jpeg = encode(picture(), "JPEG")
    for data in (b"", b"<html>not an image</html>", png[:60], jpeg[:-20]):
        with pytest.raises(ValueError, match="cannot be decoded"):
            run("decode", data)
    with pytest.raises(ValueError, match=r"not float32 \[2, 2, 3\]"):
        run("decode", np.zeros((2, 2, 3), np.float32))
    with pytest.raises(UserError, match="must start with decode"):
        run("resize(4)", png)


# Geometry.


def bilinear(image, height, width):
    """Plain half-pixel bilinear interpolation, without antialiasing."""
    out = image.astype(np.float64)
    for axis, size in ((0, height), (1, width)):
        old = out.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, old - 1)
        weight = np.expand_dims(at - low, tuple(i for i in range(3) if i != axis))
        out = np.take(out, low, axis) * (1 - weight) + np.take(out, high, axis) * weight
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(64, 64), (13, 17), (30, 41)])
def test_resize_is_half_pixel_bilinear(size, channels):
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, channels), np.uint8)
    out = run(f"resize{size}", noise)
    assert out.shape == (*size, channels)
    assert np.abs(out - bilinear(noise, *size)).max() <= 1


def test_area_averages():
    noise = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    blocks = noise.reshape(8, 4, 12, 4, 3).mean(axis=(1, 3))
    assert np.abs(run("resize(8, 12, method='area')", noise) - blocks).max() <= 0.5
    np.testing.assert_array_equal(
        run("resize_small(8)", noise), run("resize(8, 12, 'area')", noise)
    )


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(37, 50), (64, 64), (240, 31), (11, 200)])
@pytest.mark.parametrize("size", [(25, 33), (64, 64), (31, 31), (5, 90), (37, 7)])
def test_pillow_methods_are_pillows_to_the_bit(method, shape, size):
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    noise[:4] = np.where(noise[:4] > 127, 255, 0)  # bicubic overshoots: it has to be clipped
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    wide = Image.fromarray(noise).resize((size[1], shape[0]), filters[method])
    expected = np.asarray(wide.resize(size[::-1], filters[method]))
    out = run(f"resize({size[0]}, {size[1]}, 'pillow_{method}')", noise)
    np.testing.assert_array_equal(out, expected)
    grey = run(f"resize({size[0]}, {size[1]}, 'pillow_{method}')", noise[:, :, :1])
    np.testing.assert_array_equal(grey, expected[:, :, :1])
    # In one call Pillow 13 sometimes begins with the other axis, and rounds (and clips) there.
    grays = noise // 4 + 96
    at_once = np.asarray(Image.fromarray(grays).resize(size[::-1], filters[method]), int)
    out = run(f"resize({size[0]}, {size[1]}, 'pillow_{method}')", grays)
    assert np.abs(out - at_once).max() <= 1


@pytest.mark.parametrize("shape", [(375, 500), (500, 334), (300, 301), (260, 333)])
def test_timm_eval_is_torchvisions(shape):
    """Resize(248, bicubic) and CenterCrop(224) of torchvision, written out for Pillow images."""
    image = picture(*shape)
    long = int(248 * max(shape) / min(shape))
    size = (248, long) if shape[1] < shape[0] else (long, 248)
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = (round((side - 224) / 2) for side in resized.size)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    np.testing.assert_array_equal(run("timm_eval(224)", image), expected)
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    normal = run(f"timm_eval(224, mean={mean.tolist()}, std={std.tolist()})", image)
    assert normal.dtype == np.float32
    np.testing.assert_allclose(normal, (expected / 255 - mean) / std, rtol=0, atol=1e-6)


def test_normalize_needs_pixels_and_fitting_channels():
    white = np.full((2, 2, 1), 255, np.uint8)
    np.testing.assert_array_equal(run("normalize(0.5, 0.25)", white), np.full((2, 2, 1), 2.0))
    with pytest.raises(ValueError, match=r"as numbers, not uint8 \[2, 2, 1\]"):
        run("normalize((0.5, 0.5, 0.5), 1)", white)
    with pytest.raises(ValueError, match="takes uint8 .* not float32"):
        run("value_range|normalize(0.5, 1)", white)


def test_resize_small_keeps_the_aspect_ratio():
    for shape, size, expected in [
        ((375, 500), 256, (256, 341)),
        ((500, 375), 256, (341, 256)),
        ((20, 20), 33, (33, 33)),
        ((10, 1000), 5, (5, 500)),
    ]:
        assert run(f"resize_small({size})", np.zeros((*shape, 3), np.uint8)).shape[:2] == expected


def test_central_crop():
    image = picture()
    np.testing.assert_array_equal(run("central_crop(10, 21)", image), image[10:20, 9:30])
    np.testing.assert_array_equal(run("central_crop(30)", image), image[:, 5:35])
    with pytest.raises(ValueError, match="30x40 holds no crop of 31x31; put resize_small before"):
        run("central_crop(31)", image)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("value_range|value_range", "scale the values only once"),
        ("normalize(0.5, 0.5)|value_range", "scale the values only once"),
        ("value_range|normalize(0.5, 0.5)", "takes uint8"),
        ("value_range|resize(8, method='pillow_bicubic')", "before value_range or normalize"),
    ],
)
def test_values_are_scaled_once_and_last(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(spec, picture(9, 11))


def test_random_crop_reaches_every_offset():
    image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    corners = {run("random_crop(2)", image, seed)[0, 0, 0] for seed in range(200)}
    assert corners == {0, 1, 2, 4, 5, 6}
    with pytest.raises(ValueError, match="holds no crop"):
        run("random_crop(4)", image)


def test_inception_crop_stays_within_area_and_ratio():
    height, width = 375, 500
    for seed in range(300):
        rng = np.random.default_rng(seed)
        top, left, h, w = InceptionCrop(1, (0.05, 0.6)).sample_box(rng, height, width)
        assert 0 <= top <= height - h
        assert 0 <= left <= width - w
        assert 0.05 <= h * w / (height * width) <= 0.6
        assert (w - 0.5) / h <= 1.33
        assert (w + 0.5) / h >= 0.75


def test_inception_crop_is_uniform_in_height_and_place():
    """As in TensorFlow; uniform in area, as in torchvision, the mean height would be 694."""
    rng = np.random.default_rng(0)
    op = InceptionCrop(1, ratio=(1.0, 1.0))
    boxes = np.array([op.sample_box(rng, 1000, 1000) for _ in range(4000)])
    heights = boxes[:, 2]
    assert abs(heights.mean() - 612) < 12  # (sqrt(0.05) + 1) / 2
    np.testing.assert_allclose(np.quantile(heights, [0.25, 0.75]), [418, 806], atol=20)
    free = 1000 - heights
    room = free > 0
    assert abs(np.mean(boxes[room, 0] / free[room]) - 0.5) < 0.02
    assert boxes[:, 2].tolist() == boxes[:, 3].tolist()


def test_inception_crop_takes_the_whole_image_where_no_box_fits():
    rng = np.random.default_rng(0)
    assert InceptionCrop(1, (0.9, 1.0)).sample_box(rng, 10, 1000) == (0, 0, 10, 1000)
    assert InceptionCrop(1).sample_box(rng, 1, 1) == (0, 0, 1, 1)
    assert run("inception_crop((8, 12))", picture(1, 1)).shape == (8, 12, 3)


def test_flip_mirrors_half_of_the_images():
    image = picture()
    flipped = [np.array_equal(run("flip_lr", image, s), image[:, ::-1]) for s in range(400)]
    kept = [np.array_equal(run("flip_lr", image, s), image) for s in range(400)]
    np.testing.assert_array_equal(flipped, np.logical_not(kept))
    assert 150 < sum(flipped) < 250
    assert run("flip_lr|flip_lr|flip_lr", picture(channels=1)).shape == (30, 40, 1)


def test_random_affine():
    image = picture(31, 31, 1)
    np.testing.assert_array_equal(run("random_affine()", image), image)
    turned = [run("random_affine(degrees=20)", image, s) for s in range(5)]
    assert all(t.shape == image.shape and not np.array_equal(t, image) for t in turned)
    # The centre stays, whatever the angle, the scale and the shear.
    dot = np.zeros((31, 31, 1), np.uint8)
    dot[14:17, 14:17] = 255
    for seed in range(20):
        out = run("random_affine(180, scale=(0.9, 1.5), shear=20)", dot, seed)[:, :, 0]
        rows, columns = np.mgrid[:31, :31]
        centre = np.array([(rows * out).sum(), (columns * out).sum()]) / out.sum()
        np.testing.assert_allclose(centre, 15, atol=0.3)
    white = np.full((9, 9, 1), 255, np.uint8)
    assert run("random_affine(translate=0.5)", white).min() == 0
    assert run("random_affine(translate=0.5, border='replicate')", white).min() == 255


def test_random_affine_shifts_and_turns_as_it_says():
    image = picture(21, 21)
    for seed in range(3):
        turn, down, right, _ = np.random.default_rng(seed).uniform(-1, 1, 4)
        shift = cv2.warpAffine(
            image, np.float32([[1, 0, right * 4.2], [0, 1, down * 4.2]]), (21, 21)
        )
        np.testing.assert_array_equal(run("random_affine(translate=0.2)", image, seed), shift)
        matrix = cv2.getRotationMatrix2D((10, 10), turn * 30, 1)
        expected = cv2.warpAffine(image, matrix, (21, 21)).astype(int)
        assert np.abs(run("random_affine(30)", image, seed) - expected).max() <= 1


def test_value_range():
    image = np.array([[[0, 51, 255]]], np.uint8)
    out = run("value_range", image)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[0, 0], [-1, -0.6, 1], atol=1e-6)
    np.testing.assert_allclose(run("value_range(0, 1)", image)[0, 0], [0, 0.2, 1], atol=1e-6)


RANDOM = "decode|random_affine(10, 0.1)|inception_crop(24)|random_crop(20)|flip_lr"


def test_same_seed_same_pixels():
    png = encode(picture())
    one, again, other = run(RANDOM, png, 1), run(RANDOM, png, 1), run(RANDOM, png, 2)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "spec", [RANDOM, "official_eval(16)", "big_vision_eval(16, 20)", "decode|central_crop(8)"]
)
def test_output_is_contiguous_uint8_and_the_example_is_not_touched(spec):
    example = {"image": encode(picture()), "label": 3, "name": "x"}
    before = dict(example)
    out = parse(spec)(example, np.random.default_rng(0))
    assert example == before
    assert out["image"].flags.c_contiguous
    assert out["image"].dtype == np.uint8
    assert (out["label"], out["name"]) == (3, "x")


def png_chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content).to_bytes(4)
    return len(content).to_bytes(4) + kind + content + check


@pytest.mark.parametrize("kind", ["iCCP", "sBIT", "tIME", "tEXt"])
def test_remarks_of_a_png_file_are_not_complained_of(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """libpng would print a line for each of these; what it needs to decode is kept."""
    image = fixtures_data.picture(0, size=(20, 30))
    data = fixtures_data.encoded(image, "PNG")
    odd = png_chunk(kind.encode(), b"\xff" * 9)[:-1] + b"\x00"
    start = 8 + 25  # signature and IHDR
    with_remark = data[:start] + odd + data[start:]
    assert cv2.imdecode(np.frombuffer(with_remark, np.uint8), cv2.IMREAD_COLOR) is not None
    assert f"libpng warning: {kind}" in capfd.readouterr().err
    np.testing.assert_array_equal(decode_image(with_remark, channels=3, exif=True), image)
    assert decodes(with_remark)
    assert capfd.readouterr().err == ""
    for cut in (8, 20, start, start + 6, len(with_remark) - 1):
        assert not decodes(with_remark[:cut])
