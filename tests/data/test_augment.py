"""RandAugment against plain references, written from the definition of each op, and Pillow; random
erasing against the distributions that it draws from."""

import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy import stats

from vit_jax.data.augment import AUGMENT_OPS, RandAug, RandomErasing
from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.data.pipeline import example_rng
from vit_jax.data.preprocess import parse

MAGNITUDES = (0, 3, 5, 9, 10, 15, 20)
MOVEMENTS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


class Draws:
    """A generator whose next numbers are known."""

    def __init__(self, sign=1, integers=()):
        self._sign, self._integers = sign, list(integers)

    def random(self):
        return 0.25 if self._sign > 0 else 0.75

    def integers(self, high):
        value = self._integers.pop(0)
        assert 0 <= value < high
        return value


def picture(height=61, width=90, channels=3, seed=0):
    """Smooth colours with noise that do not reach 0 or 255."""
    rng = np.random.default_rng(seed)
    smooth = cv2.resize(rng.uniform(40, 215, (5, 6, channels)), (width, height))
    noisy = smooth.reshape(height, width, channels) + rng.normal(0, 10, (height, width, channels))
    return np.clip(noisy, 3, 250).astype(np.uint8)


def run(name, image, magnitude, draws=None):
    before = image.copy()
    out = AUGMENT_OPS[name](image, magnitude / 10, draws or Draws())
    np.testing.assert_array_equal(image, before)
    assert out.dtype == np.uint8
    assert out.shape == image.shape
    return out


def blend(origin, image, magnitude):
    """float64, so a result that is an integer may be cut to the one below in float32."""
    factor = 0.1 + 1.8 * magnitude / 10
    return np.clip(origin + factor * (image.astype(float) - origin), 0, 255)


def smoothed(image):
    total = 4 * image[1:-1, 1:-1].astype(int)
    for dy in (0, 1, 2):
        for dx in (0, 1, 2):
            total += image[dy : dy + image.shape[0] - 2, dx : dx + image.shape[1] - 2]
    out = image.astype(int)
    out[1:-1, 1:-1] = total // 13
    return out


def grey(image):
    weights = [0.2989, 0.5870, 0.1140]
    return np.floor(image.astype(float) @ weights * 255.5 / 255)[..., None]


BLENDS: dict[str, Callable[[np.ndarray], Any]] = {
    "brightness": lambda _: 0,
    "contrast": lambda image: min(image.shape[0] * image.shape[1] // 256, 255),
    "color": grey,
    "sharpness": smoothed,
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", list(BLENDS))
def test_blends(name, magnitude):
    image = picture()
    expected = blend(BLENDS[name](image), image, magnitude)
    out = run(name, image, magnitude)
    # Cut, not rounded; a float32 error moves what is an integer within 1e-3 by one level.
    away_from_integers = np.abs(expected - np.rint(expected)) > 1e-3
    np.testing.assert_array_equal(
        out[away_from_integers], np.floor(expected[away_from_integers]).astype(np.uint8)
    )
    assert np.abs(out - expected).max() < 1.001
    if magnitude == 5:
        np.testing.assert_array_equal(out, image)
    else:
        assert np.any(out != image)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_pillow_has_too(channels):
    for seed in range(4):
        image = picture(channels=channels, seed=seed)
        pillow = Image.fromarray(np.squeeze(image))

        def same(name, magnitude, other, image=image):
            out = run(name, image, magnitude).astype(int)
            return int(np.abs(out - np.asarray(other).reshape(image.shape)).max())

        assert same("equalize", 7, ImageOps.equalize(pillow)) == 0
        # Pillow's table is made in float64 and cut, so an integer may become the one below.
        assert same("autocontrast", 7, ImageOps.autocontrast(pillow)) <= 1
        assert same("invert", 7, ImageOps.invert(pillow)) == 0
        for magnitude, bits in ((3, 1), (5, 2), (10, 4), (15, 6), (20, 8)):
            assert same("posterize", magnitude, ImageOps.posterize(pillow, bits)) == 0
        for magnitude, threshold in ((3, 76), (5, 128), (9, 230), (15, 128)):
            assert same("solarize", magnitude, ImageOps.solarize(pillow, threshold)) == 0


def test_strengths_at_0_10_and_20():
    image = picture()
    inverted = 255 - image
    for magnitude in (0, 10, 20):  # 256 and 512 are 0 as uint8
        np.testing.assert_array_equal(run("solarize", image, magnitude), inverted)
    top_bit = np.where(image < 128, 0, 128)
    np.testing.assert_array_equal(run("posterize", image, 0), top_bit)
    np.testing.assert_array_equal(run("posterize", image, 20), image)
    for magnitude, added in ((0, 0), (10, 110), (20, 220)):
        expected = np.where(image < 128, np.minimum(image.astype(int) + added, 255), image)
        np.testing.assert_array_equal(run("solarize_add", image, magnitude), expected)
    for name in MOVEMENTS:
        np.testing.assert_array_equal(run(name, image, 0), image)
    # Contrast blends from 196 at the usual size, a slip that published models were trained with.
    flat = np.full((224, 224, 3), 196, np.uint8)
    np.testing.assert_array_equal(run("contrast", flat, 20), flat)
    np.testing.assert_array_equal(run("cutout", image, 0, Draws(1, (5, 5))), image)


def source(name, magnitude, sign, x, y, shape):
    """Where the pixel at (x, y) comes from, from the definitions."""
    if name == "rotate":
        angle = sign * math.radians(30 * magnitude / 10)
        cx, cy = (shape[1] - 1) / 2, (shape[0] - 1) / 2
        dx, dy = x - cx, y - cy
        return (
            cx + dx * math.cos(angle) - dy * math.sin(angle),
            cy + dx * math.sin(angle) + dy * math.cos(angle),
        )
    shear, shift = sign * 0.3 * magnitude / 10, sign * 100 * magnitude / 10
    return {
        "shear_x": (x + shear * y, y + 0.0 * x),
        "shear_y": (x + 0.0 * y, y + shear * x),
        "translate_x": (x + shift + 0.0 * y, y + 0.0 * x),
        "translate_y": (x + 0.0 * y, y + shift + 0.0 * x),
    }[name]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [5, 10, 20])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_movements_take_the_nearest_pixel_and_fill_with_128(name, magnitude, sign):
    image = picture(150, 190)
    height, width = image.shape[:2]
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    from_x, from_y = source(name, magnitude, sign, x, y, image.shape)
    column, row = np.rint(from_x).astype(int), np.rint(from_y).astype(int)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    expected = np.full_like(image, 128)
    expected[inside] = image[row[inside], column[inside]]
    out = run(name, image, magnitude, Draws(sign))
    # cv2 has coordinates in steps of 1/1024: half-way between two pixels either may be taken.
    clear = np.ones((height, width), bool)
    for coordinate in (from_x, from_y):
        clear &= np.abs(np.abs(coordinate - np.floor(coordinate)) - 0.5) > 2e-3
    assert clear.mean() > 0.75
    np.testing.assert_array_equal(out[clear], expected[clear])


@pytest.mark.parametrize("magnitude", [10, 20])
def test_cutout(magnitude):
    image = picture(150, 190)
    half = 4 * magnitude
    for y, x in ((75, 95), (0, 0), (149, 189), (10, 180)):
        row, column = np.mgrid[-y : 150 - y, -x : 190 - x]
        inside = (-half <= row) & (row < half) & (-half <= column) & (column < half)
        expected = np.where(inside[..., None], 128, image)
        np.testing.assert_array_equal(run("cutout", image, magnitude, Draws(1, (y, x))), expected)


def test_every_op_comes_as_often_as_every_other(monkeypatch):
    seen: list[str] = []
    for name in AUGMENT_OPS:
        recorded = lambda image, _strength, _rng, name=name: seen.append(name) or image  # noqa: E731
        monkeypatch.setitem(AUGMENT_OPS, name, recorded)
    op, image = RandAug(2, 9), picture(8, 8)
    for position in range(4000):
        op.apply(image, example_rng(0, position))
    assert len(seen) == 8000
    counts = np.array([seen.count(name) for name in AUGMENT_OPS])
    assert len(counts) == 16
    # Chance alone exceeds these once in a thousand seeds; the seed is fixed.
    assert stats.chisquare(counts).pvalue > 1e-3


def test_grey_images():
    image = picture(channels=1)
    for name in AUGMENT_OPS:
        out = run(name, image, 9, np.random.default_rng(0))
        assert np.any(out != image) == (name != "color"), name
    floats = {"image": np.zeros((4, 4, 3), np.float32)}
    with pytest.raises(ValueError, match="before value_range"):
        parse("randaug")(floats, np.random.default_rng(0))


def boxes(op, draws, height=100, width=120):
    """(top, left, height, width) of each box, NaN where nothing was erased."""
    image = np.full((height, width, 3), 9.0, np.float32)  # a value that noise does not have
    drawn = []
    for position in range(draws):
        erased = np.any(op.apply(image, example_rng(0, position)) != 9.0, axis=2)
        rows, columns = np.nonzero(erased)
        if not len(rows):
            drawn.append([np.nan] * 4)
            continue
        top, left = rows.min(), columns.min()
        box = erased[top : rows.max() + 1, left : columns.max() + 1]
        assert box.all()
        drawn.append([top, left, *box.shape])
    assert np.all(image == 9.0)
    return np.array(drawn, float)


def test_boxes_have_the_area_ratio_and_place_that_they_should():
    drawn = boxes(RandomErasing(0.25), 4000)
    erased = ~np.isnan(drawn[:, 0])
    # Four deviations of a share of 4000 draws.
    assert erased.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 4000))
    top, left, height, width = drawn[erased].T
    area, ratio = height * width / 12000, height / width
    # Sides are whole pixels, of 15 at least: half a pixel in each is some 5 % of the area.
    assert 0.02 * 0.93 < area.min() < 0.022
    assert 1 / 3 * 0.97 < area.max() < 1 / 3 * 1.02
    assert ratio.min() > 0.3 * 0.93
    assert ratio.max() < 1 / 0.3 * 1.07
    # Uniform; boxes that do not fit are drawn again, which needs both a large area and an extreme
    # ratio, so the smaller half of the areas shows the distribution undisturbed.
    small = area < 0.15
    assert stats.kstest(area[small], stats.uniform(0.02, 0.13).cdf).pvalue > 1e-3
    logs = np.log(ratio[small])
    assert stats.kstest(logs, stats.uniform(np.log(0.3), -2 * np.log(0.3)).cdf).pvalue > 1e-3
    for place, room in ((top, 100 - height), (left, 120 - width)):
        assert np.all(place <= room)
        jittered = (place + np.random.default_rng(0).random(len(place))) / (room + 1)
        assert stats.kstest(jittered, "uniform").pvalue > 1e-3


def test_noise_is_normal_where_the_image_is_normalised():
    """Floats are; a uint8 image gets the same noise, clipped, once it is normalised."""
    op = RandomErasing(1.0, area=(0.3, 0.33), ratio=(1.0, 1.0))
    pixels = np.full((200, 200, 3), 255, np.uint8)
    noisy = op.apply(np.full((200, 200, 3), 9.0, np.float32), example_rng(0, 0))
    erased = np.all(noisy != 9.0, axis=2)
    noise = noisy[erased]
    assert noise.dtype == np.float32
    assert 0.29 * 40000 < len(noise) < 0.34 * 40000
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    out = op.apply(pixels, example_rng(0, 0))
    assert out.dtype == np.uint8
    normalised = (out[erased] / 255 - IMAGENET_MEAN) / IMAGENET_STD
    low, high = (np.array([v, v, v]) - IMAGENET_MEAN for v in (0, 1))
    expected = np.clip(noise, low / IMAGENET_STD, high / IMAGENET_STD)
    # Rounding to a level, half of 1/255 over the smallest deviation.
    np.testing.assert_allclose(normalised, expected, rtol=0, atol=0.5 / 255 / 0.224 + 1e-5)
    assert np.mean((out[erased] == 0) | (out[erased] == 255)) == pytest.approx(0.05, abs=0.02)
