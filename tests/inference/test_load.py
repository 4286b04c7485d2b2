import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.images import at_image_size, spell
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model, get_variant
from vit_jax.models.description import Description

SIZES = get_variant("B/16")
BEFORE = Description(SIZES, (224, 224, 3), (14, 14), (), "")
CROP = "resize_small(439, 'pillow_bicubic', 'down')|central_crop(384, 384, 'nearest')"


@pytest.fixture
def weight_file(tmp_path: Path) -> Path:
    module = create_model(**weights.SMALL, num_classes=7)
    return write_arrays(tmp_path / "a.npz", weights.seeded(module, (32, 32, 3)))


def test_a_run_whose_best_step_is_another_says_so(weight_file, monkeypatch, caplog) -> None:
    weight_file.rename(weight_file.with_name("params.npz"))
    load_model(weight_file.parent)
    assert "/best" not in caplog.text
    monkeypatch.setattr("vit_jax.pretrained.load.best_text", lambda path: (f"{path}/best is", True))
    load_model(weight_file.parent)
    assert f"{weight_file.parent}/best is" in caplog.messages


@pytest.mark.parametrize(
    ("spec", "size", "expected"),
    [
        ("official_eval(224)", (384, 288), "decode|resize(384, 288)"),
        ("deit_eval(224)", (384, 384), CROP),
        ("deit_eval(224)", (384, 288), "|resize(384, 288, 'pillow_bicubic')|n"),
        ("decode|resize(256, 256)|central_crop(224)", (448, 448), "|resize(512, 512)"),
        ("decode(channels=1)|resize(224)", (384, 288), "decode(1)|resize(384, 288)"),
    ],
)
def test_preprocessing_at_another_size_is_what_it_was(spec, size, expected):
    """Normalisation, antialiasing and channels stay: only sizes change."""
    after = at_image_size(dataclasses.replace(BEFORE, eval_preprocess=spec), size)
    assert expected in after.eval_preprocess
    assert after.image_shape == (*size, 3)
    assert after.grid == (size[0] // 16, size[1] // 16)
    image = np.zeros((500, 400, 3), np.uint8)
    example = parse(after.eval_preprocess)({"image": image}, np.random.default_rng(0))
    assert example["image"].shape[:2] == size
    if "deit" in spec:
        assert "normalize((0.485" in after.eval_preprocess


def test_ops_are_spelled_as_they_are_read() -> None:
    chain = parse("decode|resize(8, 4)|inception_crop((8, 4))|flip_lr|normalize(0.5, 0.25)")
    assert parse(spell(chain.ops)) == chain


def test_sizes_that_the_patches_do_not_divide(weight_file: Path) -> None:
    with pytest.raises(
        UserError, match=r"--image_size=36,32: model.patch_size=8 does not .* 36 becomes 32 or 40"
    ):
        load_model(weight_file, image_size=(36, 32))


def test_another_size_interpolates(weight_file: Path) -> None:
    before, after = load_model(weight_file), load_model(weight_file, image_size=48)
    assert after.description.image_shape == (48, 48, 3)
    images = golden.images(1, 48, 48)
    assert weights.logits(after.module, after.params, images).shape == (1, 7)
    cubic = load_model(weight_file, image_size=48, posemb="bicubic")
    name = "pos_embedding"
    tables = [m.params["Transformer"]["posembed_input"][name] for m in (before, after, cubic)]
    assert [table.shape for table in tables] == [(1, 17, 24), (1, 37, 24), (1, 37, 24)]
    assert np.abs(tables[1] - tables[2]).max() > 0


def test_a_description_of_an_older_version_is_completed(weight_file: Path) -> None:
    model = load_model(weight_file)
    value = model.description.to_json()
    for key in ("gelu", "resnet_layers", "position_embedding"):
        del value["model"][key]
    weight_file.with_suffix(".json").write_text(json.dumps(value))
    again = load_model(weight_file, image_size=(48, 32))
    assert again.description.model == model.description.model


def test_a_damaged_description_is_named(weight_file: Path) -> None:
    for text in ("[]", "{}", '{"model": 3}', "no json", '{"grid": [1]}'):
        weight_file.with_suffix(".json").write_text(text)
        with pytest.raises(UserError, match=r"a\.json"):
            load_model(weight_file)


def test_bfloat16(weight_file: Path) -> None:
    images = golden.images(2, 32, 32)
    exact, rough = load_model(weight_file), load_model(weight_file, dtype="bfloat16")
    a, b = (weights.logits(m.module, m.params, images) for m in (exact, rough))
    assert a.dtype == b.dtype == np.float32
    assert 0 < np.abs(a - b).max() < 0.1
