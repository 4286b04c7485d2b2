"""JSON files beside weights: what is not ours is an error that names the key, never a guess."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import peers
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.export.convert import write
from vit_jax.inference.load import attributes, load_model
from vit_jax.models.create import create_model
from vit_jax.models.description import Description
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
    ("config.json", {"hidden_act": 3}, "hidden_act=3 is unknown"),
    ("config.json", {"num_attention_heads": "x"}, "config.json has a value of the wrong type"),
    ("config.json", {"image_size": "32"}, "config.json has a value of the wrong type"),
    ("config.json", {"id2label": ["cat"]}, "config.json has a value of the wrong type"),
    ("config.json", {"id2label": {"a": "cat"}}, "config.json has a value of the wrong type"),
    ("preprocessor_config.json", {"do_rescale": False}, "multiply pixels by 1;"),
    ("preprocessor_config.json", {"rescale_factor": 1 / 127.5}, "multiply pixels by 0.0078"),
]
TIMM: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"model_args__act_layer": "relu"}, "act_layer='relu' is unknown"),
    ("config.json", {"model_args__global_pool": "max"}, "global_pool='max' is unknown"),
    ("config.json", {"model_args__block_fn": "ParallelScalingBlock"}, "block_fn='ParallelS"),
    ("config.json", {"model_args__depth": 12}, "config.json has 12 blocks, but the file has 2"),
    ("config.json", {"model_args": [1]}, "config.json has a value of the wrong type"),
    ("config.json", {"pretrained_cfg": 3}, "config.json has a value of the wrong type"),
    ("config.json", {"model_args__act_layer": ["gelu"]}, "act_layer=['gelu'] is unknown"),
    ("config.json", {"model_args__num_heads": "3"}, "config.json has a value of the wrong type"),
    ("config.json", {"pretrained_cfg__crop_pct": "big"}, "config.json has a value of the wrong"),
    ("config.json", {"label_names": 3}, "config.json has a value of the wrong type"),
    ("config.json", {"label_names": ["a"]}, "1 class names"),
]


@pytest.mark.parametrize(
    ("format", "file", "changes", "message"),
    [("huggingface", *row) for row in HUGGING_FACE] + [("timm", *row) for row in TIMM],
)
def test_what_is_not_ours_is_named(
    format: str, file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, format)
    assert load_model(folder).format == format
    change(folder / file, **changes)
    with pytest.raises(UserError) as caught:
        load_model(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_heads_are_taken_from_a_published_size_as_a_whole_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not from the width: models of 384 and 12 heads exist."""
    module = weights.module_of("S/16", num_layers=2)
    params = weights.seeded(module, (32, 32, 3))
    weights.write(tmp_path / "two", "timm", module, params, (32, 32, 3))
    (tmp_path / "two" / "config.json").unlink()
    with pytest.raises(UserError, match="cannot infer num_heads"):
        load_model(tmp_path / "two")
    assert load_model(tmp_path / "two", num_heads=12).description.model["num_heads"] == 12
    whole = weights.module_of("Ti/16")
    params = weights.seeded(whole, (32, 32, 3))
    weights.write(tmp_path / "whole", "timm", whole, params, (32, 32, 3))
    (tmp_path / "whole" / "config.json").unlink()
    with caplog.at_level(logging.INFO):
        assert load_model(tmp_path / "whole").description.model["num_heads"] == 3
    assert "Assuming 3 attention heads, as in Ti." in caplog.text


# Of images of 16 x 40 pixels.
RECTANGLE: dict[str, Any] = {
    "name": "vit",
    "patch_size": 8,
    "hidden_size": 192,
    "num_layers": 1,
    "mlp_dim": 8,
    "num_heads": 3,
    "num_classes": 3,
}


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"grid": [5, 2]}, r"a.json: it has grid=\(5, 2\), but images of \(16, 40\) have \(2, 5\)"),
        ({"image_shape": [16, 48, 3]}, r"images of \(16, 48\) have \(2, 6\) tokens"),
        ({"image_shape": [0, 0, 3]}, "does not divide images of 0x0 pixels"),
        ({"model__num_layers": 10**9}, "has a value of the wrong type.*the maximum is 10000"),
        ({"model__name": None}, "describe a model|description"),
        ({"model__hidden_size": "24"}, "hidden_size='24' must be an int"),
        ({"model__num_classes": -1}, "but -1 outputs"),
        ({"model__unknown": 1}, "unknown"),
        ({"class_names": ["a", "b"]}, r"2 class names \(class_names\), but 3 outputs"),
    ],
)
def test_a_description_that_contradicts_itself(
    tmp_path: Path, change_of: dict[str, Any], message: str
) -> None:
    """A grid with rows and columns swapped would load, and see another image."""
    model = {**RECTANGLE, "hidden_size": 8, "num_heads": 2}
    params = weights.seeded(create_model(**model), (16, 40, 3))
    description = Description(model, (16, 40, 3), (2, 5), ("a", "b", "c"), "decode|resize(16, 40)")
    write(tmp_path / "a.npz", "npz", params, description)
    assert load_model(tmp_path / "a.npz").description.grid == (2, 5)
    change(tmp_path / "a.json", **change_of)
    with pytest.raises(UserError, match=message) as error:
        load_model(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_the_size_of_the_images_tells_the_grid_of_a_rectangle(tmp_path: Path) -> None:
    model = RECTANGLE
    params = weights.seeded(create_model(**model), (16, 40, 3))
    description = Description(model, (16, 40, 3), (2, 5), (), "decode|resize(16, 40)")
    write(tmp_path / "a.npz", "npz", params, description)
    (tmp_path / "a.json").unlink()
    with pytest.raises(UserError, match="not a square; give .* rows and columns"):
        load_model(tmp_path / "a.npz", num_heads=3)
    assert load_model(tmp_path / "a.npz", num_heads=3, image_size=(16, 40)).description.grid == (
        2,
        5,
    )


def test_a_class_token_without_position(tmp_path: Path) -> None:
    """timm's `no_embed_class`, as of FlexiViT, of a rectangle: zeros are added to the token."""
    timm = peers.import_timm()
    sizes = {"img_size": (32, 96), "embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 5}
    theirs = timm.models.vision_transformer.VisionTransformer(**sizes, no_embed_class=True).eval()
    for parameter in (theirs.pos_embed, theirs.cls_token, theirs.head.weight):
        torch.nn.init.normal_(parameter)
    (tmp_path / "flexi").mkdir()
    save_file(theirs.state_dict(), tmp_path / "flexi" / "model.safetensors")
    settings = {
        "architecture": "flexivit_small",
        "pretrained_cfg": {"input_size": [3, 32, 96]},
        "model_args": {"no_embed_class": True, "num_heads": 3},
    }
    (tmp_path / "flexi" / "config.json").write_text(json.dumps(settings))
    loaded = load_model(tmp_path / "flexi")
    images = np.random.default_rng(0).normal(size=(2, 32, 96, 3)).astype(np.float32)
    ours = weights.logits(loaded.module, loaded.params, images)
    with torch.no_grad():
        expected = theirs(torch.tensor(images).permute(0, 3, 1, 2)).numpy()
    # One block in float32, sums in another order.
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module.", "net.model."])
def test_what_a_wrapper_puts_before_all_names(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    wrapped = {f"{prefix}{name}": array for name, array in arrays.items()}
    save_file(wrapped, tmp_path / "a.safetensors")
    expected = load_model(tmp_path / "model")
    found = load_model(tmp_path / "a.safetensors", num_heads=expected.module.num_heads)
    weights.assert_same(flatten_names(found.params), flatten_names(expected.params))
    assert f"Stripped the wrapper's prefix {prefix!r}" in caplog.text
    assert "no config.json found; guessed: layer_norm_epsilon=1e-06, gelu=exact" in (caplog.text)


def test_of_several_models_that_in_a_wrapper_is_taken(tmp_path: Path) -> None:
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    both = {
        f"module.{part}.{name}": array + k
        for k, part in enumerate(("base_encoder", "momentum_encoder"))
        for name, array in arrays.items()
    }
    save_file(both, tmp_path / "moco.safetensors")
    found = load_model(tmp_path / "moco.safetensors", num_heads=2)
    expected = flatten_names(load_model(tmp_path / "model").params)
    np.testing.assert_array_equal(found.params["head"]["bias"], expected["head/bias"])
    assert found.report["dropped"]["module.momentum_encoder.head.bias"] == "outside the model"


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_quantised_weights_are_refused(format: str, tmp_path: Path) -> None:
    file = folder_of(tmp_path, format) / "model.safetensors"
    arrays = load_file(file)
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        small = {n: x.to(dtype) if n.endswith(".weight") else x for n, x in arrays.items()}
        save_file(small, file)
        with pytest.raises(UserError, match="quantised|float8"):
            load_model(tmp_path / "model")
    save_file({**arrays, "blocks.0.mlp.fc1.SCB": torch.ones(2)}, file)
    with pytest.raises(UserError, match="unexpected array: blocks.0.mlp.fc1.SCB"):
        load_model(tmp_path / "model")


def test_what_no_model_here_has_is_said_before_heads_are_asked_for(tmp_path: Path) -> None:
    arrays = load_file(folder_of(tmp_path, "timm") / "model.safetensors")
    for change_, message in (
        ({"blocks.0.attn.lambda_q1": torch.ones(2)}, "differential attention"),
        ({"blocks.1.attn.gate.weight": torch.ones(2)}, "gated attention"),
        ({"patch_embed.proj.weight": torch.ones(2, 3, 2, 8, 8)}, "videos or volumes"),
    ):
        save_file({**arrays, **change_}, tmp_path / "a.safetensors")
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / "a.safetensors")
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras/tf_model.h5").touch()
    with pytest.raises(UserError, match="name one of its files: tf_model.h5"):
        load_model(tmp_path / "keras")


def test_the_config_of_timm_before_0_8(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "timm")
    expected = load_model(folder).description
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**settings.pop("pretrained_cfg"), **settings, "labels": list("vwxyz")})
    )
    change(folder / "config.json", label_names=None)
    found = load_model(folder).description
    assert found.eval_preprocess == expected.eval_preprocess
    assert found.class_names == tuple("vwxyz")


@pytest.mark.parametrize("keys", [range(1, 6), (0, 1, 2, 3, 7), range(-1, 4)])
def test_names_that_are_not_numbered_as_the_outputs_are_left_out(
    keys: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, "huggingface")
    change(folder / "config.json", id2label={str(key): f"name {key}" for key in keys})
    assert load_model(folder).class_names == ()
    assert "its names are ignored" in caplog.text


def test_one_output_is_a_probability_and_a_regression_none(tmp_path: Path) -> None:
    module = weights.create_model(**weights.SMALL, num_classes=1)
    params = weights.seeded(module, (16, 16, 3))
    model = attributes(module, "vit")
    description = Description(model, (16, 16, 3), (2, 2), ("defect",), "decode|resize(16, 16)")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    for format in ("timm", "huggingface"):
        write(tmp_path / format, format, params, description)
        (tmp_path / format / "model.json").unlink()
        found = load_model(tmp_path / format)
        logits = found.logits(pixels)[:, 0]
        for answer, logit in zip(found.predict(pixels), logits, strict=True):
            assert answer == [("defect", pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5))]
    change(tmp_path / "huggingface/config.json", problem_type="regression")
    found = load_model(tmp_path / "huggingface")
    with pytest.raises(UserError, match="outputs are regression targets"):
        found.predict(pixels)
    write(tmp_path / "again", "huggingface", params, found.description)
    assert json.loads((tmp_path / "again/config.json").read_text())["problem_type"] == "regression"
