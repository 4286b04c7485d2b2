"""JSON files beside weights: what is not ours is an error that names the key, never a guess."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs import pretrain
from tests.peers import import_timm
from tests.pretrained import weights
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.export.convert import write
from vit_jax.inference.load import attributes, load_model
from vit_jax.models.create import create_model
from vit_jax.models.description import Description
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.adopt import adopt
from vit_jax.trees import flatten_names


def folder_of(tmp_path: Path, format: str) -> Path:
    """A small model as a folder of that format."""
    module = weights.create_model(**weights.SMALL, num_classes=5)
    params = weights.seeded(module, (16, 16, 3))
    names = tuple("abcde")
    model = attributes(module, "vit")
    description = Description(model, (16, 16, 3), (2, 2), names, "decode|resize(16, 16)")
    write(tmp_path / "model", format, params, description)
    (tmp_path / "model" / "model.json").unlink()  # ours says all of it
    return tmp_path / "model"


REMOVED = "removed"


def change(file: Path, **values: Any) -> None:
    """Sets keys, `a__b` in a section, or removes them."""
    settings = json.loads(file.read_text())
    for key, value in values.items():
        *sections, last = key.split("__")
        node = settings
        for section in sections:
            node = node[section]
        node[last] = value
        if value == REMOVED:
            del node[last]
    file.write_text(json.dumps(settings))


HUGGING_FACE: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"pooler_act": "gelu"}, "pooler_act='gelu' is unknown"),
    ("config.json", {"hidden_act": "relu"}, "hidden_act='relu' is unknown"),
    ("config.json", {"num_hidden_layers": 3}, "config.json has 3 blocks, but the file has 2"),
    ("config.json", {"id2label": {"0": "a", "1": "b"}}, "2 class names"),
    ("config.json", {"num_attention_heads": 5}, "with 5 heads"),
    ("config.json", {"num_attention_heads": "x"}, "config.json has a value of the wrong type"),
    ("preprocessor_config.json", {"rescale_factor": "x"}, "value of the wrong type"),
]
TIMM: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"model_args__act_layer": "relu"}, "act_layer='relu' is unknown"),
    ("config.json", {"model_args__global_pool": "max"}, "global_pool='max' is unknown"),
    ("config.json", {"model_args__block_fn": "ParallelScalingBlock"}, "block_fn='ParallelS"),
    ("config.json", {"model_args__depth": 12}, "config.json has 12 blocks, but the file has 2"),
    ("config.json", {"pretrained_cfg__crop_pct": "big"}, "config.json has a value of the wrong"),
    ("config.json", {"label_names": ["a"]}, "1 class names"),
]


@pytest.mark.parametrize(("format", "rows"), [("huggingface", HUGGING_FACE), ("timm", TIMM)])
def test_what_is_not_ours_is_named(format, rows, tmp_path):
    folder = folder_of(tmp_path, format)
    assert load_model(folder).format == format
    for file, changes, message in rows:
        before = (folder / file).read_text()
        change(folder / file, **changes)
        with pytest.raises(UserError) as caught:
            load_model(folder)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        (folder / file).write_text(before)


def test_names_that_are_not_numbered_as_the_outputs_are_ignored(tmp_path, caplog):
    """Taken in their order, they would be the names of other classes."""
    folder = folder_of(tmp_path, "huggingface")
    for keys in (range(1, 6), (0, 1, 2, 3, 7)):
        caplog.clear()
        change(folder / "config.json", id2label={str(key): f"name {key}" for key in keys})
        assert load_model(folder).class_names == ()
        assert "its names are ignored" in caplog.text


def test_images_that_are_no_whole_patches(tmp_path: Path) -> None:
    """timm's convolution passes over the last rows, as SigLIP's of 384 pixels and patches of 14."""
    folder = folder_of(tmp_path, "timm")
    side = 16 + load_model(folder).module.patch_size - 1
    change(folder / "config.json", pretrained_cfg__input_size=[3, side, side])
    change(folder / "config.json", model_args__img_size=side, pretrained_cfg__crop_mode="squash")
    model = load_model(folder)
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    assert model.description.image_shape == (16, 16, 3)
    np.testing.assert_allclose(model.preprocess(image)[0], image[:16, :16] / 127.5 - 1, atol=1e-6)


def test_heads_are_taken_from_a_published_size_as_a_whole_and_said(tmp_path, caplog):
    """Not from the width: models of 384 and 12 heads exist."""
    for variant, depth in (("S/16", 2), ("Ti/16", 12)):
        module = weights.module_of(variant, num_layers=depth)
        params = weights.seeded(module, (32, 32, 3))
        weights.write(tmp_path / variant[0], "timm", module, params, (32, 32, 3))
        (tmp_path / variant[0] / "config.json").unlink()
    with pytest.raises(UserError, match="cannot infer num_heads"):
        load_model(tmp_path / "S")
    assert load_model(tmp_path / "S", num_heads=12).description.model["num_heads"] == 12
    with caplog.at_level(logging.INFO):
        assert load_model(tmp_path / "T").description.model["num_heads"] == 3
    assert "Assuming 3 attention heads, as in Ti." in caplog.text


def test_a_description_that_contradicts_itself(tmp_path: Path) -> None:
    """A grid with rows and columns swapped would load, and see another image."""
    model = {**weights.SMALL, "num_classes": 3}
    params = weights.seeded(create_model(**model), (16, 40, 3))
    description = Description(model, (16, 40, 3), (2, 5), ("a", "b", "c"), "decode|resize(16, 40)")
    write(tmp_path / "a.npz", "npz", params, description)
    before = (tmp_path / "a.json").read_text()
    for changes, message in (
        ({"grid": [5, 2]}, r"a.json: it has grid=\(5, 2\), but images of \(16, 40\) have \(2, 5\)"),
        ({"image_shape": [16, 48, 3]}, r"images of \(16, 48\) have \(2, 6\) tokens"),
        ({"image_shape": [0, 0, 3]}, "does not divide images of 0x0 pixels"),
        ({"model__num_layers": 10**9}, "has a value of the wrong type.*the maximum is 10000"),
        ({"model__name": None}, "describe a model|description"),
        ({"model__hidden_size": "24"}, "hidden_size='24' must be int"),
        ({"model__num_classes": -1}, "but -1 outputs"),
        ({"model__unknown": 1}, "unknown"),
        ({"class_names": ["a", "b"]}, r"2 class names \(class_names\), but 3 outputs"),
    ):
        change(tmp_path / "a.json", **changes)
        with pytest.raises(UserError, match=message) as error:
            load_model(tmp_path / "a.npz")
        assert "\n" not in str(error.value)
        (tmp_path / "a.json").write_text(before)
    (tmp_path / "a.json").unlink()
    with pytest.raises(UserError, match="not a square; give .* rows and columns"):
        load_model(tmp_path / "a.npz", num_heads=3)
    loaded = load_model(tmp_path / "a.npz", num_heads=3, image_size=(16, 40))
    assert loaded.description.grid == (2, 5)


def test_what_a_wrapper_puts_before_all_names(tmp_path, caplog):
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    expected = flatten_names(load_model(tmp_path / "model").params)
    for prefix in ("_orig_mod.module.", "net.model."):
        wrapped = {f"{prefix}{name}": array for name, array in arrays.items()}
        save_file(wrapped, tmp_path / "a.safetensors")
        loaded = load_model(tmp_path / "a.safetensors", num_heads=3)
        weights.assert_same(flatten_names(loaded.params), expected)
        assert f"Stripped the wrapper's prefix {prefix!r}" in caplog.text
    assert "no config.json found; guessed: layer_norm_epsilon=1e-06, gelu=exact" in caplog.text


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    file = folder_of(tmp_path, "timm") / "model.safetensors"
    arrays = load_file(file)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        small = {n: x.to(dtype) if n.endswith(".weight") else x for n, x in arrays.items()}
        save_file(small, file)
        with pytest.raises(UserError, match="quantised|float8"):
            load_model(tmp_path / "model")
    save_file({**arrays, "blocks.0.mlp.fc1.SCB": torch.ones(2)}, file)
    with pytest.raises(UserError, match="unexpected array: blocks.0.mlp.fc1.SCB"):
        load_model(tmp_path / "model")


def test_what_no_model_here_has_is_said_before_heads_are_asked_for(tmp_path: Path) -> None:
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    for alien, message in (
        ({"blocks.0.attn.lambda_q1": torch.ones(2)}, "differential attention"),
        ({"blocks.1.attn.gate.weight": torch.ones(2)}, "gated attention"),
        ({"patch_embed.proj.weight": torch.ones(2, 3, 2, 8, 8)}, "videos or volumes"),
    ):
        save_file({**arrays, **alien}, tmp_path / "a.safetensors")
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / "a.safetensors")
    arrays.pop("pos_embed")
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="may have rotary positions .*config.json is needed"):
        load_model(tmp_path / "a.safetensors", num_heads=3)
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras/tf_model.h5").touch()
    with pytest.raises(UserError, match="holds tf_model.h5 only, which is not supported"):
        load_model(tmp_path / "keras")


def test_one_output_is_a_probability_and_a_regression_none(tmp_path: Path) -> None:
    module = weights.create_model(**weights.SMALL, num_classes=1)
    params = weights.seeded(module, (16, 16, 3))
    model = attributes(module, "vit")
    description = Description(model, (16, 16, 3), (2, 2), ("defect",), "decode|resize(16, 16)")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    for format in ("timm", "huggingface"):
        write(tmp_path / format, format, params, description)
        (tmp_path / format / "model.json").unlink()
        loaded = load_model(tmp_path / format)
        logits = loaded.logits(pixels)[:, 0]
        for answer, logit in zip(loaded.predict(pixels), logits, strict=True):
            assert answer == [("defect", pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5))]
    change(tmp_path / "huggingface/config.json", problem_type="regression")
    loaded = load_model(tmp_path / "huggingface")
    with pytest.raises(UserError, match="outputs are regression targets"):
        loaded.predict(pixels)
    write(tmp_path / "again", "huggingface", params, loaded.description)
    assert json.loads((tmp_path / "again/config.json").read_text())["problem_type"] == "regression"


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SCALE = "normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
SQUASHED = "decode|resize(16, 16, 'pillow_bilinear')"
# What one setting changes, and what is said of it, if that is a guess. All else holds.
PARTS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "huggingface": [
        ({"do_resize": False}, SQUASHED, r".*, if it is of another size \(do_resize=False\)"),
        ({"resample": 1}, "decode|resize(16, 16, 'pillow_lanczos')", ""),
        ({"resample": 9}, SQUASHED, "bilinear for resample=9"),
        ({"size": 16, "do_center_crop": True, "crop_size": 16}, SQUASHED, ""),
        (
            {"size": {"longest_edge": 16}},
            SQUASHED,
            "the whole image .*for size={'longest_edge': 16}",
        ),
        (
            {"size": {"shortest_edge": 16}},
            "decode|resize_small(16, 'pillow_bilinear', 'down')|central_crop(16, 16)",
            "a central crop, as size=.* has none",
        ),
        ({"do_pad": True}, SQUASHED, "do_pad left out"),
        ({"image_processor_type": "OwnProcessor"}, SQUASHED, "OwnProcessor as ViTImageProcessor"),
        ({"resample": None}, SQUASHED, ""),
    ],
    "timm": [
        ({"interpolation": "nearest"}, "decode|resize(16, 16, 'pillow_nearest')", ""),
        (
            {"interpolation": "random"},
            "decode|resize(16, 16, 'pillow_bicubic')",
            "'bicubic' for inter",
        ),
        (
            {"crop_mode": "border"},
            "decode|resize_small(16, 'pillow_bilinear', 'down')|central_crop(16, 16, 'nearest')",
            "'center' for crop_mode='border'",
        ),
        ({"crop_pct": 1.5}, SQUASHED, "1.0 for crop_pct=1.5"),
        (
            {"interpolation": REMOVED},
            "decode|resize(16, 16, 'pillow_bicubic')",
            "interpolation=bic",
        ),
    ],
}


@pytest.mark.parametrize("format", list(PARTS))
def test_each_part_of_the_settings_holds_on_its_own(format, tmp_path, caplog):
    folder, changes_of_scale = folder_of(tmp_path, format), {"image_mean": MEAN, "image_std": STD}
    file, prefix = folder / "preprocessor_config.json", ""
    if format == "timm":
        file, prefix = folder / "config.json", "pretrained_cfg__"
        changes_of_scale = {"mean": MEAN, "std": STD}
    before = file.read_text()
    for changes, ops, said in PARTS[format]:
        caplog.clear()
        file.write_text(before)
        changed = {**changes_of_scale, **changes}
        change(file, **{f"{prefix}{key}": value for key, value in changed.items()})
        assert load_model(folder).description.eval_preprocess == f"{ops}|{SCALE}", changes
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(lines) == bool(said), (changes, lines)
        assert not said or re.search(f"assumed of its images: .*{said}", lines[0]), (changes, lines)
        # Fine-tuning adopts the same scale.
        config = pretrain.get_config("Ti/16,imagenet2012")
        config.pretrained.source = str(folder)
        assert adopt(config, str(tmp_path / "run")).dataset.preprocess.endswith(SCALE)


def test_pixels_that_are_not_divided_by_255(tmp_path, caplog):
    """As transformers computes it: (factor x - mean) / std."""
    folder = folder_of(tmp_path, "huggingface")
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    for changes, factor in (({"rescale_factor": 1 / 127.5}, 1 / 127.5), ({"do_rescale": False}, 1)):
        change(folder / "preprocessor_config.json", image_mean=MEAN, image_std=STD, **changes)
        expected = (image * factor - MEAN) / np.array(STD)
        np.testing.assert_allclose(load_model(folder).preprocess(image)[0], expected, rtol=1e-4)
    assert "pixels from 0 to 255, as do_rescale=False" in caplog.text


def test_a_file_of_settings_that_is_missing_is_said(tmp_path, caplog):
    folder = folder_of(tmp_path, "huggingface")
    processor = folder / "preprocessor_config.json"
    change(processor, image_mean=MEAN, image_std=STD)
    # transformers 5 writes all processors of a model into one file, and looks there first.
    content = {"image_processor": json.loads(processor.read_text()), "processor_class": "X"}
    (folder / "processor_config.json").write_text(json.dumps(content))
    processor.write_text("{}")
    assert load_model(folder).description.eval_preprocess == f"{SQUASHED}|{SCALE}"
    assert "found" not in caplog.text
    (folder / "processor_config.json").unlink()
    for kind, ops in (
        ("vit", SQUASHED),
        ("vit_mae", f"{SQUASHED}|{SCALE}"),
        ("deit", "decode|resize(18, 18, 'pillow_bicubic')|central_crop(16, 16)|" + SCALE),
    ):
        caplog.clear()
        change(folder / "config.json", model_type=kind)
        assert load_model(folder).description.eval_preprocess == ops
        assert (
            f"no preprocessor_config.json found; guessed: images prepared by {ops}." in caplog.text
        )
    timm = folder_of(tmp_path / "timm", "timm")
    change(timm / "config.json", pretrained_cfg=REMOVED)
    assert load_model(timm).description.eval_preprocess.endswith(SCALE)
    assert "images: interpolation=bicubic, crop_pct=0.875, mean=(0.485" in caplog.text


def test_the_size_that_a_processor_names_is_said(tmp_path, caplog):
    """As DINOv2's: positions of 518 pixels, images of 224."""
    folder = folder_of(tmp_path, "huggingface")
    size = {"height": 8, "width": 8}
    change(folder / "preprocessor_config.json", size=size)
    assert load_model(folder).description.image_shape == (16, 16, 3)
    assert "images of 16x16 pixels, as its positions; its settings of images say 8x8" in caplog.text
    caplog.clear()
    assert load_model(folder, image_size=8).description.image_shape == (8, 8, 3)
    assert not caplog.records


def test_a_bare_files_pixels_are_guessed_and_said(tmp_path, caplog):
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    save_file(arrays, tmp_path / "a.safetensors")
    load_model(tmp_path / "a.safetensors", num_heads=3)
    assert "images prepared by official_eval (pixels from -1 to 1)." in caplog.text
    # Facebook's own DINOv2 has timm's names but for the mask token.
    dino = {**arrays, "mask_token": torch.zeros(1, 24)}
    save_file(dino, tmp_path / "b.safetensors")
    loaded = load_model(tmp_path / "b.safetensors", num_heads=3, image_size=32)
    ops = str(parse(loaded.description.eval_preprocess))
    assert all(part in ops for part in ("pillow_bicubic", "CentralCrop", str(tuple(MEAN)))), ops
    assert loaded.report["adapted"][POSITIONS] == "dinov2 2x2 -> 4x4"
    # A pooled model has no class token to pool by.
    caplog.clear()
    pooled = arrays | {f"fc_{name}": arrays.pop(name) for name in ("norm.weight", "norm.bias")}
    save_file(pooled, tmp_path / "c.safetensors")
    load_model(tmp_path / "c.safetensors", num_heads=3)
    assert "classifier=gap" in caplog.text
    assert "class token" not in caplog.text


def test_a_name_of_the_zoo_settles_a_bare_file(tmp_path, caplog):
    """If its sizes are those of that model; else it is only a name."""
    name = "deit_tiny_patch16_224-a1311bcf.pth"
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    torch.save({"model": arrays}, tmp_path / name)
    assert load_model(tmp_path / name, num_heads=3).description.eval_preprocess.startswith(
        "official"
    )
    assert "the zoo's" not in caplog.text
    timm = import_timm()
    torch.save({"model": timm.create_model("deit_tiny_patch16_224").state_dict()}, tmp_path / name)
    assert load_model(tmp_path / name).description.eval_preprocess == "deit_eval(224)"
    assert "by its name the zoo's 'deit/deit_tiny_patch16_224'" in caplog.messages[-1]
    assert "images prepared" not in caplog.messages[-1]
