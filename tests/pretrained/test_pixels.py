"""Ten photographs of odd sizes as transformers, timm and torchvision prepare them, per setting.

To the bit on Pillow. transformers' other processors resize tensors by torchvision, which rounds
weights to 8 bits and more: up to two levels were seen, 2 / 255 / 0.229 after normalising.
"""

from typing import Any

import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_sample_images

from tests.peers import import_timm, import_transformers
from vit_jax.data.preprocess import Chain
from vit_jax.models.description import PILLOW_METHODS
from vit_jax.pretrained.formats.huggingface_config import read_processor
from vit_jax.pretrained.formats.timm_config import read_settings

timm = import_timm()
transformers: Any = None
SIZES = ((427, 639), (331, 333), (225, 401), (97, 95), (33, 64), (64, 33), (31, 47), (301, 52))
SIZES += ((224, 223), (65, 65))
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    global transformers
    transformers = import_transformers()


@pytest.fixture(scope="module")
def photos() -> list[np.ndarray]:
    whole = load_sample_images().images
    return [np.ascontiguousarray(whole[i % 2][:h, :w]) for i, (h, w) in enumerate(SIZES)]


def ours(ops: list[Any], photo: np.ndarray) -> np.ndarray:
    image = Chain(tuple(ops))({"image": photo}, np.random.default_rng(0))["image"]
    return image / np.float32(127.5) - 1 if image.dtype == np.uint8 else image


SQUARE, SIDE = {"height": 64, "width": 64}, {"shortest_edge": 71}
PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"size": SQUARE}),
    ("ViT", {"size": {"height": 48, "width": 80}, "image_mean": MEAN, "image_std": STD}),
    ("DeiT", {"size": {"height": 73, "width": 73}, "crop_size": SQUARE}),
    ("Bit", {"size": SIDE, "crop_size": SQUARE, "image_mean": MEAN, "image_std": STD}),
    ("CLIP", {"size": {"shortest_edge": 64}, "crop_size": SQUARE}),
    ("CLIP", {"size": SIDE, "crop_size": {"height": 64, "width": 65}, "do_normalize": False}),
    ("Siglip", {"size": SQUARE, "rescale_factor": 1 / 127.5}),
    ("Beit", {"size": SQUARE, "do_rescale": False}),
    *(("ViT", {"size": SQUARE, "resample": number}) for number in (0, 1, 4, 5)),
]


@pytest.mark.parametrize(("processor", "settings"), PROCESSORS)
def test_processors_of_transformers(processor, settings, photos):
    on_pillow = getattr(transformers, f"{processor}ImageProcessorPil")(**settings)
    ops, _ = read_processor(on_pillow.to_dict(), "vit", None)
    for photo in photos:
        theirs = on_pillow(PIL.Image.fromarray(photo), return_tensors="np")["pixel_values"][0]
        expected = theirs.transpose(1, 2, 0)
        scale = max(1.0, np.abs(expected).max())  # only the order of float32 operations differs
        np.testing.assert_allclose(ours(ops, photo), expected, rtol=0, atol=1e-6 * scale)


def test_processors_of_transformers_on_torchvision(photos):
    processor = transformers.BitImageProcessor(size=SIDE, crop_size=SQUARE, image_std=STD)
    ops, _ = read_processor(processor.to_dict(), "vit", None)
    for photo in photos:
        theirs = processor(PIL.Image.fromarray(photo), return_tensors="np")["pixel_values"][0]
        difference = np.abs(ours(ops, photo) - theirs.transpose(1, 2, 0))
        assert difference.max() < 2.5 / 255 / min(STD)
        assert difference.mean() < 0.1 / 255 / min(STD)  # a crop off by one pixel: 6 levels


CONFIGS = [
    *({"interpolation": method, "crop_pct": 0.9} for method in PILLOW_METHODS),
    {"crop_mode": "squash", "crop_pct": 0.95},
    {"crop_mode": "squash", "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3},
    {"input_size": [3, 64, 48], "crop_pct": 0.9},
    {"input_size": [3, 48, 64], "crop_pct": 1.0},
    {"input_size": [3, 48, 64], "crop_pct": 0.9, "crop_mode": "squash"},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_of_timm(config, photos):
    """`timm.data.create_transform` is torchvision's Resize and CenterCrop on Pillow's images."""
    settings = {"input_size": [3, 64, 64], "mean": MEAN, "std": STD, **config}
    theirs = timm.data.create_transform(**timm.data.resolve_data_config(settings))
    stored = read_settings({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": settings})
    assert stored.ops is not None
    for photo in photos:
        expected = theirs(PIL.Image.fromarray(photo)).numpy().transpose(1, 2, 0)
        np.testing.assert_allclose(ours(stored.ops, photo), expected, rtol=0, atol=1e-6)
