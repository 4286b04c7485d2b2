"""The ops against plain references, Pillow and OpenCV."""

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.ops import InceptionCrop
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError


def picture(height=30, width=40, channels=3, seed=0):
    """Smooth random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, channels), np.uint8)
    return cv2.resize(small, (width, height)).reshape(height, width, channels)


def run(spec, image, seed=0):
    return parse(spec)({"image": image, "label": 3}, np.random.default_rng(seed))["image"]


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


@pytest.mark.parametrize("method", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_pillow_methods_have_the_pixels_of_pillow(method):
    """In one call: which axis comes first, and is rounded, is the installed Pillow's choice."""
    noise = np.random.default_rng(0).integers(0, 256, (37, 50, 3), np.uint8)
    for image in (noise, noise[:, :, :1]):
        for height, width in ((25, 33), (64, 64), (5, 90)):
            resample = Image.Resampling[method.upper()]
            expected = Image.fromarray(np.squeeze(image)).resize((width, height), resample)
            pixels = run(f"resize({height}, {width}, 'pillow_{method}')", image)
            np.testing.assert_array_equal(np.squeeze(pixels), np.asarray(expected))


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
    with pytest.raises(ValueError, match="30x40 is smaller than the crop 31x31; put resize_small"):
        run("central_crop(31)", image)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("normalize(0.5, 0.5)|value_range", "scale the values only once"),
        ("value_range|normalize(0.5, 0.5)", "takes uint8, .* not float32"),
        ("decode(1)|normalize((0.5, 0.5, 0.5), 1)", r"per number, not uint8 \[9, 11, 1\]"),
        ("value_range|resize(8, method='pillow_bicubic')", "before value_range or normalize"),
    ],
)
def test_values_are_scaled_once_and_last(spec, message):
    with pytest.raises(ValueError, match=message):
        run(spec, picture(9, 11))


def test_random_crop_reaches_every_offset():
    image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    corners = {run("random_crop(2)", image, seed)[0, 0, 0] for seed in range(200)}
    assert corners == {0, 1, 2, 4, 5, 6}
    with pytest.raises(ValueError, match="is smaller than the crop"):
        run("random_crop(4)", image)
    # Reflected without repeating the border, as by torchvision.
    rows = np.arange(3, dtype=np.uint8).reshape(3, 1, 1) * np.ones((1, 3, 1), np.uint8)
    columns = {tuple(run("random_crop(3, padding=2)", rows, seed)[:, 0, 0]) for seed in range(99)}
    assert columns == {(2, 1, 0), (1, 0, 1), (0, 1, 2), (1, 2, 1), (2, 1, 0)}
    with pytest.raises(UserError, match="padding=-1 must be from 0"):
        parse("random_crop(4, padding=-1)")


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


def test_inception_crop_stays_within_area_and_ratio():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        top, left, h, w = InceptionCrop(1, (0.05, 0.6)).sample_box(rng, 375, 500)
        assert 0 <= top <= 375 - h
        assert 0 <= left <= 500 - w
        assert 0.05 <= h * w / (375 * 500) <= 0.6
        assert (w - 0.5) / h <= 1.33
        assert (w + 0.5) / h >= 0.75


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


def test_random_affine_shifts_and_turns_as_it_says():
    image = picture(21, 21)
    np.testing.assert_array_equal(run("random_affine()", image), image)
    for seed in range(3):
        turn, down, right, _ = np.random.default_rng(seed).uniform(-1, 1, 4)
        shift = cv2.warpAffine(
            image, np.float32([[1, 0, right * 4.2], [0, 1, down * 4.2]]), (21, 21)
        )
        np.testing.assert_array_equal(run("random_affine(translate=0.2)", image, seed), shift)
        matrix = cv2.getRotationMatrix2D((10, 10), turn * 30, 1)
        expected = cv2.warpAffine(image, matrix, (21, 21)).astype(int)
        assert np.abs(run("random_affine(30)", image, seed) - expected).max() <= 1
    # The centre stays, whatever the angle, the scale and the shear.
    dot = np.zeros((31, 31, 1), np.uint8)
    dot[14:17, 14:17] = 255
    out = run("random_affine(180, scale=(0.9, 1.5), shear=20)", dot)[:, :, 0]
    centre = np.argwhere(out > 127).mean(axis=0)
    np.testing.assert_allclose(centre, 15, atol=0.5)


def test_value_range():
    image = np.array([[[0, 51, 255]]], np.uint8)
    out = run("value_range", image)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[0, 0], [-1, -0.6, 1], atol=1e-6)
    np.testing.assert_allclose(run("value_range(0, 1)", image)[0, 0], [0, 0.2, 1], atol=1e-6)
