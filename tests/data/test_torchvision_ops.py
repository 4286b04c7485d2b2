"""torchvision's random transforms: pixels as Pillow has them, distributions, and mistakes.

Torchvision is not here: what it calls of Pillow is called with the factors that an op has drawn.
"""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data.preprocess import parse
from vit_jax.data.torchvision_ops import BlockMasks, DinoCrops
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
        ("dino_crops(32, num_local=0)", "num_local=0 must be at least 1"),
        ("dino_crops(0)", "size=0"),
        ("dino_crops(32, local_area=(0.5, 0.1))", "local_area"),
        ("block_masks(8, p=2.0)", r"p=2.0 must be in \[0, 1\]"),
        ("block_masks(8, (0.0, 0.5))", "share"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(UserError, match=message):
        parse(spec)


@pytest.mark.parametrize("photometric", [True, False])
def test_dino_crops_are_views_of_one_image(photometric):
    """Two large crops and small ones, each with randomness of its own; labels stay."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 48, 3), np.uint8)
    op = DinoCrops(32, 16, 3, photometric=photometric)
    views = op({"image": image, "label": 2}, np.random.default_rng(1))
    assert views["image"].shape == views["image_2"].shape == (32, 32, 3)
    assert views["local"].shape == (3, 16, 16, 3)
    assert views["label"] == 2
    assert {views[key].dtype for key in ("image", "image_2", "local")} == {np.dtype(np.uint8)}
    assert len({view.tobytes() for view in views["local"]}) == 3
    assert not np.array_equal(views["image"], views["image_2"])
    again = op({"image": image, "label": 2}, np.random.default_rng(1))
    np.testing.assert_array_equal(views["local"], again["local"])
    # Scaling is of all views alike.
    scaled = parse("decode|normalize(0.5, 0.25)").ops[-1](views, rng)
    for key in ("image", "image_2", "local"):
        expected = (views[key] / 255 - 0.5) / 0.25
        np.testing.assert_allclose(scaled[key], expected, atol=1e-5)


def test_small_crops_show_less_of_the_image():
    y, x = np.mgrid[:64, :64]
    image = np.stack([4 * y, 4 * x, 0 * x], axis=-1).astype(np.uint8)  # a pixel says where it was
    op = DinoCrops(32, 16, 8, photometric=False)
    for seed in range(5):
        views = op({"image": image}, np.random.default_rng(seed))
        for large in (views["image"], views["image_2"]):
            assert np.prod(np.ptp(large[..., :2], axis=(0, 1)) / 256.0) > 0.3
        for small in views["local"]:
            assert np.prod(np.ptp(small[..., :2], axis=(0, 1)) / 256.0) < 0.42


def test_block_masks_have_the_shares_of_dinov2():
    op, rng = BlockMasks(14), np.random.default_rng(0)
    counts = []
    for _ in range(300):
        numbers = op({}, rng)["masked_patches"]
        assert numbers.shape == (2, 98)
        for row in numbers:
            masked = row[row >= 0]
            assert np.all(np.diff(masked) > 0)
            assert np.all(row[len(masked) :] == -1)
            counts.append(len(masked))
    counts = np.array(counts) / 196
    assert 0.44 < np.mean(counts > 0) < 0.56  # of 600 crops
    assert counts[counts > 0].min() > 0.05
    assert counts.max() <= 0.5
    assert 0.25 < counts[counts > 0].mean() < 0.32  # 0.3, less what found no place
