"""The exported settings beside the real libraries: the pixels that these make of a large photo."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs import photos
from tests.fixtures_data import encoded, picture
from tests.peers import import_timm, import_transformers
from tests.saved_models import save_model
from vit_jax.data.preprocess import parse
from vit_jax.export.convert import convert_checkpoint, input_settings, report_text
from vit_jax.inference.load import load_model

# 300 x 2 pixels become 32: what is not antialiased is far from what is.
PHOTO = encoded(picture(0, size=(300, 401)), quality=95)
OURS = photos.get_config("Ti/16,photos,32").dataset.eval_preprocess


def levels(spec: str) -> np.ndarray:
    """The model's input as levels of 255, [H, W, C]."""
    image = parse(spec)({"image": PHOTO}, np.random.default_rng(0))["image"]
    return image.astype(int)


def exported(folder: Path, spec: str, format: str) -> tuple[Path, dict]:
    model = {"num_classes": 3, "image_size": 32, "scale": 0.2}
    save_model(folder / "run", **model, eval_preprocess=spec)
    return folder / format, convert_checkpoint(
        str(folder / "run"), str(folder / format), format=format
    )


def pixels_of_timm(folder: Path) -> np.ndarray:
    import_timm()
    from timm.data import create_transform, resolve_data_config

    settings = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    transform = create_transform(**resolve_data_config(pretrained_cfg=settings))
    made = transform(Image.open(io.BytesIO(PHOTO)).convert("RGB")).numpy()  # [C, H, W]
    return np.rint((made * 0.5 + 0.5) * 255).astype(int).transpose(1, 2, 0)


def pixels_of_transformers(folder: Path, kind: str) -> np.ndarray:
    processor = getattr(import_transformers(), kind).from_pretrained(folder)
    made = processor(Image.open(io.BytesIO(PHOTO)), return_tensors="np")["pixel_values"][0]
    return np.rint((made * 0.5 + 0.5) * 255).astype(int).transpose(1, 2, 0)


def test_a_model_of_photos_sees_the_same_in_timm(tmp_path):
    folder, report = exported(tmp_path, OURS, "timm")
    np.testing.assert_array_equal(pixels_of_timm(folder), levels(OURS))
    assert not [note for note in report["notes"] if "resizing" in note]
    assert np.abs(levels("official_eval(32)") - levels(OURS)).max() > 20


def test_a_model_of_photos_sees_the_same_in_transformers(tmp_path):
    """Resized by Pillow to the bit, by torchvision's kernel, its default today, within a level."""
    folder, _ = exported(tmp_path, OURS, "huggingface")
    np.testing.assert_array_equal(
        pixels_of_transformers(folder, "ViTImageProcessorPil"), levels(OURS)
    )
    others = pixels_of_transformers(folder, "ViTImageProcessor")
    assert np.abs(others - levels(OURS)).max() <= 1


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_what_their_settings_cannot_say_is_said(format, tmp_path):
    folder, report = exported(tmp_path, "official_eval(32)", format)
    said = " ".join(report["notes"])
    for text in (
        "resizing by 'bilinear' becomes Pillow's bilinear, antialiased: large photos look",
        "photos are turned upright and transparent pixels composed on a background here",
    ):
        assert text in said
        assert text in report_text(report)
        assert text in (folder / "README.md").read_text()


def test_methods_and_rounding_in_their_words(tmp_path):
    model = load_model(save_model(tmp_path / "a", num_classes=3, image_size=32))

    def stated(spec):
        description = dataclasses.replace(model.description, eval_preprocess=spec)
        settings, notes = input_settings(description)
        return settings.method, sum("resizing" in note for note in notes)

    for method, expected in {
        "bilinear": ("bilinear", 1),
        "bicubic": ("bicubic", 1),
        "area": ("box", 1),
        "nearest": ("nearest", 0),
        "pillow_lanczos": ("lanczos", 0),
        "pillow_hamming": ("hamming", 0),
    }.items():
        assert stated(f"decode|resize(32, method='{method}')") == expected
    assert not input_settings(
        dataclasses.replace(
            model.description,
            eval_preprocess="decode(exif=False, background=None)|resize(32, 32, 'pillow_box')",
        )
    )[1]
    crop = "decode|resize_small(37, 'pillow_bicubic', 'down')|central_crop(32, rounding='{}')"
    for format, rounding in (("timm", "nearest"), ("huggingface", "down")):
        for ours in ("nearest", "down"):
            folder = tmp_path / f"{format}_{ours}"
            _, report = exported(folder, crop.format(ours), format)
            said = f"corners of crops are rounded {ours} here, {rounding} there: off by a pixel."
            assert (said in report["notes"]) == (ours != rounding)
