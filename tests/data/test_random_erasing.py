"""Random erasing against the distributions that it draws from."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vit_jax.data.augment import RandomErasing
from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.data.pipeline import example_rng


def boxes(op: RandomErasing, draws: int, height: int = 100, width: int = 120) -> np.ndarray:
    """(top, left, height, width) of each box, NaN where nothing was erased."""
    image = np.full((height, width, 3), 9.0, np.float32)  # a value that noise does not have
    found = []
    for position in range(draws):
        erased = np.any(op.apply(image, example_rng(0, position)) != 9.0, axis=2)
        rows, columns = np.nonzero(erased)
        if not len(rows):
            found.append([np.nan] * 4)
            continue
        top, left = rows.min(), columns.min()
        box = erased[top : rows.max() + 1, left : columns.max() + 1]
        assert box.all()
        found.append([top, left, *box.shape])
    assert np.all(image == 9.0)
    return np.array(found, float)


def test_boxes_have_the_area_ratio_and_place_that_they_should() -> None:
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


def test_noise_is_normal_where_the_image_is_normalised() -> None:
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


def test_grey_images_get_noise_about_the_mean_of_the_channels() -> None:
    op = RandomErasing(1.0, area=(0.9, 0.9), ratio=(1.0, 1.0))
    out = op.apply(np.full((200, 200, 1), 255, np.uint8), example_rng(0, 0))
    middle = out[50:150, 50:150]
    assert np.median(middle) == pytest.approx(np.mean(IMAGENET_MEAN) * 255, abs=3)


def test_an_image_in_which_no_box_fits_stays() -> None:
    image = np.full((1, 50, 3), 7, np.uint8)
    for position in range(20):
        out = RandomErasing(1.0).apply(image, example_rng(0, position))
        np.testing.assert_array_equal(out, image)
