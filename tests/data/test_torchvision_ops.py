"""torchvision's random transforms: pixels as Pillow has them, distributions, and mistakes.

Torchvision is not here: what it calls of Pillow is called with the factors that an op has drawn.
"""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


class Fixed:
    """Draws what it is told: the upper end, the order 0, 1, 2, 3, and the integer `choice`."""

    def __init__(self, choice=0):
        self.choice = choice

    def random(self):
        return 0.0

    def uniform(self, _low, high):
        return high

    def permutation(self, count):
        return np.arange(count)

    def integers(self, *_args, **_kwargs):
        return self.choice


def run(spec, rng=None, pixels=PIXELS):
    [op] = parse(spec).ops
    return op.apply(pixels, rng or Fixed())


def turned(picture, hue):
    """As torchvision's adjust_hue, but in integers of more bits."""
    h, s, v = (np.array(band).astype(int) for band in picture.convert("HSV").split())
    bands = [(h + int(hue * 255)) % 256, s, v]
    merged = [Image.fromarray(band.astype(np.uint8)) for band in bands]
    return Image.merge("HSV", merged).convert("RGB")


@pytest.mark.parametrize(
    ("spec", "rng", "expected"),
    [
        ("color_jitter(0.4)", Fixed(), ImageEnhance.Brightness(PICTURE).enhance(1.4)),
        ("color_jitter(contrast=0.4)", Fixed(), ImageEnhance.Contrast(PICTURE).enhance(1.4)),
        ("color_jitter(saturation=3)", Fixed(), ImageEnhance.Color(PICTURE).enhance(4.0)),
        ("color_jitter(hue=0.3)", Fixed(), turned(PICTURE, 0.3)),
        (
            "color_jitter(0.4, 0.2)",
            Fixed(),
            ImageEnhance.Contrast(ImageEnhance.Brightness(PICTURE).enhance(1.4)).enhance(1.2),
        ),
        ("gaussian_blur(1, (0.1, 3))", Fixed(), PICTURE.filter(ImageFilter.GaussianBlur(3.0))),
        ("grayscale(0.1)", Fixed(), PICTURE.convert("L").convert("RGB")),
        ("solarize(1, threshold=100)", Fixed(), ImageOps.solarize(PICTURE, 100)),
        ("three_augment(0)", Fixed(0), PICTURE.convert("L").convert("RGB")),
        ("three_augment(0)", Fixed(1), ImageOps.solarize(PICTURE)),
        ("three_augment(0)", Fixed(2), PICTURE.filter(ImageFilter.GaussianBlur(2.0))),
    ],
)
def test_pixels_are_those_of_pillow(spec, rng, expected):
    pixels = run(spec, rng)
    assert not np.array_equal(pixels, PIXELS)
    np.testing.assert_array_equal(pixels, np.asarray(expected))


def test_probabilities_and_orders_are_what_is_asked_for():
    draws = [run("solarize(0.2)", np.random.default_rng(seed)) for seed in range(500)]
    share = np.mean([not np.array_equal(pixels, PIXELS) for pixels in draws])
    assert 0.14 < share < 0.26  # three standard errors
    jitter = "color_jitter(0.4, 0.4)"
    both = [run(jitter, np.random.default_rng(seed)).mean() for seed in range(200)]
    assert min(both) < 0.75 * PIXELS.mean() < 1.25 * PIXELS.mean() < max(both)


def test_random_resized_crop_has_the_distribution_of_torchvision():
    """The share of the area is uniform, the logarithm of the aspect ratio too, where they fit."""
    [op] = parse("random_resized_crop(8, area=(0.1, 0.4))").ops
    rng = np.random.default_rng(0)
    boxes = np.array([op.sample_box(rng, 600, 600) for _ in range(2000)])
    share = boxes[:, 2] * boxes[:, 3] / 600**2
    aspect = np.log(boxes[:, 3] / boxes[:, 2]) / np.log(4 / 3)
    for values, low, high in ((share, 0.1, 0.4), (aspect, -1, 1)):
        counts = np.histogram(values, 5, (low, high))[0]
        assert counts.sum() >= 1990  # rounding to pixels moves a few over the ends
        np.testing.assert_allclose(counts, 400, atol=75)  # four standard deviations
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= 600).all()
    # A strip has no box that fits: the middle of it.
    assert parse("random_resized_crop(8, (1, 1))").ops[0].sample_box(rng, 30, 90) == (0, 25, 30, 40)
    resized = run("random_resized_crop((8, 9), (1, 1), (1.5, 1.5), 'pillow_bicubic')")
    np.testing.assert_array_equal(resized, np.asarray(PICTURE.resize((9, 8), Image.BICUBIC)))


def test_the_lists_of_papers_stand_for_ops():
    names = [type(op).__name__ for op in parse("deit3_train(224)").ops]
    assert names == ["Decode", "RandomResizedCrop", "FlipLr", "ThreeAugment", "Normalize"]
    simple = parse("deit3_train(224, simple_crop=True)").ops
    assert [str(op) for op in simple[1:3]] == [
        "ResizeSmall(size=224, method='pillow_bicubic', rounding='down')",
        "RandomCrop(height=224, width=None, padding=4)",
    ]
    first, second = (parse(f"dino_train(224, {view})").ops for view in (1, 2))
    assert first[:5] == second[:5]
    assert [str(op) for op in second[5:7]] == [
        "GaussianBlur(p=0.1, sigma=(0.1, 2.0))",
        "Solarize(p=0.2, threshold=128)",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("grayscale", "missing a required argument: 'p'"),
        ("grayscale(1.5)", r"p=1.5 must be in \[0, 1\]"),
        ("color_jitter(hue=0.6)", "hue at most 0.5"),
        ("color_jitter(-0.1)", "must have amounts >= 0"),
        ("gaussian_blur(1, (0, 2))", "sigma"),
        ("random_resized_crop(8, (0.5, 1.5))", "area"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(UserError, match=message):
        parse(spec)
