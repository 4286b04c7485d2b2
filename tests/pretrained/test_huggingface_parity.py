"""Hugging Face transformers computes our logits from our folder, and we its logits from its files.

Tolerances as in test_timm_parity.py: 1e-5 where GELU and epsilon agree, 1e-3 where they do not.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests import golden
from tests.peers import import_transformers
from tests.pretrained import weights
from tests.pretrained.weights import difference, randomise
from vit_jax.data.preprocess import parse
from vit_jax.data.sized import at_size, size_of
from vit_jax.inference.load import load_model
from vit_jax.pretrained.formats import huggingface_config
from vit_jax.trees import flatten_names, unflatten_names

transformers: Any = None  # imported when the first test begins: it takes 3 s

SAME, AS_IT_COMES = 1e-5, 1e-3
SIZES = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}


@pytest.fixture(autouse=True, scope="module")
def _import() -> None:
    globals()["transformers"] = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def their_logits(model: Any, images: np.ndarray) -> np.ndarray:
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():  # in float64: the rounding that a tolerance allows for is ours alone
        logits = model.eval().double()(pixel_values=pixels.double()).logits.numpy()
    model.float()
    return logits


def load(architecture: str, folder: Path, **changes: Any) -> Any:
    """Their model from our folder; every one of its parameters must be in it."""
    cls = getattr(import_transformers(), architecture)
    config = cls.config_class.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    model, info = cls.from_pretrained(folder, config=config, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize(
    ("variant", "recipe", "depth"), [("Ti/16", "r02", 12), ("S/32", "fanin", 2)]
)
def test_transformers_reads_our_folder_and_we_what_it_saves(variant, recipe, depth, tmp_path):
    module = weights.module_of(variant, num_layers=depth)
    params = weights.seeded(module, (64, 64, 3), recipe)
    weights.write(tmp_path, "huggingface", module, params, (64, 64, 3))
    images = golden.images(1, 64, 64)
    ours = weights.logits(module, unflatten_names(params), images)
    model = load("ViTForImageClassification", tmp_path)
    assert difference(their_logits(model, images), ours) < SAME
    # What it saves of it is what we had.
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    assert (loaded.format, loaded.module) == ("huggingface", module)
    weights.assert_same(flatten_names(loaded.params), params)
    if recipe == "r02":  # its own defaults are another function, which is ours too
        changes = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
        theirs = their_logits(load("ViTForImageClassification", tmp_path, **changes), images)
        assert 2 * SAME < difference(theirs, ours) < AS_IT_COMES
        same = weights.module_of(variant, gelu="exact", layer_norm_epsilon=1e-12)
        assert difference(weights.logits(same, unflatten_names(params), images), theirs) < SAME


OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
CROPPED = {"resample": 3, "do_center_crop": True, "crop_size": 224}
CROPPED_AS = "'pillow_bicubic', 'down')|central_crop({0}, {0})"


@pytest.mark.parametrize(
    ("settings", "image_size", "expected"),
    [
        ({"size": 40}, None, "resize(40, 40, 'pillow_bilinear')"),
        (
            {"size": 32, "do_normalize": False},
            None,
            "resize(32, 32, 'pillow_bilinear')|normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))",
        ),
        ({"size": 32, "resample": 0}, None, "resize(32, 32, 'pillow_nearest')"),
        # facebook/dinov2-base: positions of 518 pixels, images of 224.
        ({**CROPPED, "size": {"shortest_edge": 256}}, 518, "resize_small(592, " + CROPPED_AS),
        # openai/clip-vit-base-patch32, of before sizes had names; the class's mean and deviation.
        (
            {**CROPPED, "size": 224, "feature_extractor_type": "CLIPFeatureExtractor"},
            224,
            "resize_small(224, " + CROPPED_AS + f"|normalize({OPENAI_MEAN}, {OPENAI_STD})",
        ),
    ],
)
def test_preprocessor_settings(settings: dict[str, Any], image_size: Any, expected: str) -> None:
    sizes = {"image_size": image_size} if image_size else {}
    stated = huggingface_config.read_settings(sizes, settings, "vit")
    size = (image_size, image_size)
    ops = at_size(stated.ops, size_of(stated.ops), size) if image_size else stated.ops
    assert tuple(ops) == parse(f"decode|{expected.format(image_size)}").ops


SIDE = {"height": 32, "width": 32}


@pytest.mark.parametrize(
    ("name", "sizes", "tolerance"),
    [
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": SIDE}, 1e-6),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 36}, "crop_size": SIDE}, 1e-6),
        ("SiglipImageProcessorPil", {"size": SIDE}, 1e-6),
        # It resizes floats; Pillow rounds to bytes after each axis: up to a level, 1 / 255 / 0.224.
        ("DINOv3ViTImageProcessor", {"size": SIDE}, 0.0176),
    ],
)
def test_pixels_of_each_processor(name, sizes, tolerance, tmp_path):
    """Of the classes that resize as Pillow; the others resize as torchvision, off by a level."""
    smooth = np.indices((48, 64)).sum(axis=0)[..., None] + [0, 40, 80]
    image = PIL.Image.fromarray(smooth.astype(np.uint8))
    processor = getattr(transformers, name)(**sizes)
    theirs = processor(images=image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    processor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    image.save(tmp_path / "a.png")
    ours: Any = (tmp_path / "a.png").read_bytes()
    for op in huggingface_config.read_settings({}, settings, "vit").ops or ():
        ours = op.apply(ours, np.random.default_rng(0))
    ours = ours / 127.5 - 1 if ours.dtype == np.uint8 else ours
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def test_rectangles_both_ways(tmp_path: Path) -> None:
    sides = {"image_size": [32, 48], "patch_size": [8, 16]}
    names = {1: "dog", 0: "cat"}
    config = transformers.ViTConfig(**SIZES, **sides, num_hidden_layers=2, id2label=names)
    model = transformers.ViTForImageClassification(config)
    randomise(model)
    model.save_pretrained(tmp_path / "theirs")
    images = golden.images(2, 32, 48)
    theirs = their_logits(model, images)
    loaded = load_model(tmp_path / "theirs")
    assert loaded.description.grid == (4, 3)
    assert loaded.class_names == ("cat", "dog")
    assert difference(weights.logits(loaded.module, loaded.params, images), theirs) < SAME
    flat = flatten_names(loaded.params)
    weights.write(tmp_path / "ours", "huggingface", loaded.module, flat, (32, 48, 3))
    again = load("ViTForImageClassification", tmp_path / "ours")
    assert difference(their_logits(again, images), theirs) == 0.0
