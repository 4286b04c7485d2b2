"""Files of BiT ResNets: loaded for images of any size, and beside those of other models."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from configs import finetune
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.inference.features import extract_features
from vit_jax.inference.load import load_model
from vit_jax.inference.predict import predict_images
from vit_jax.models.create import create_model, get_variant
from vit_jax.pretrained.load import load_pretrained
from vit_jax.trees import flatten_names

ROW: dict[str, Any] = {**get_variant("R50x1"), "resnet_layers": (1,)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = tuple(map(str, range(10)))
    return save_model(tmp_path_factory.mktemp("resnet") / "run", class_names=names, **ROW)


def test_it_predicts_at_any_size(saved: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((30, 40, 3), np.uint8))
    model = load_model(saved, image_size=(21, 18))
    assert model.description.image_shape == (21, 18, 3)
    assert model.description.grid == (6, 5)
    (prediction,) = predict_images(model, [str(tmp_path / "a.png")], top=3)
    assert len(prediction["predictions"]) == 3


def test_features_are_what_the_head_sees(saved: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "features.npz")
    extract_features(
        str(saved),
        ["digits"],
        split="test[:16]",
        features=("gap", "pre_logits", "logits"),
        output=output,
        batch_size=16,
    )
    features = dict(np.load(output))
    np.testing.assert_array_equal(features["gap"], features["pre_logits"])
    assert features["gap"].shape == (16, 256)
    head = load_model(saved).params["head"]
    expected = features["gap"] @ head["kernel"] + head["bias"][None]
    np.testing.assert_allclose(features["logits"], expected, rtol=0, atol=1e-5)
    for name in ("tokens", "cls", "block_0"):
        with pytest.raises(UserError, match=f"no '{name}'.* It has logits, pre_logits, gap."):
            extract_features(
                *(str(saved), ["digits"]), split="test[:16]", features=(name,), output=output
            )


def test_published_files_of_big_transfer(saved: Path, tmp_path: Path) -> None:
    """Written here name by name, with the numbered convolutions of some of them."""
    ours = flatten_names(load_model(saved).params)
    unit = "block1/unit01"
    published = {
        "resnet/root_block/standardized_conv2d/kernel": ours["root_block/conv_root/kernel"],
        "resnet/group_norm/gamma": ours["norm-pre-head/scale"],
        "resnet/group_norm/beta": ours["norm-pre-head/bias"],
        "resnet/head/conv2d/kernel": ours["head/kernel"][None, None],
        "resnet/head/conv2d/bias": ours["head/bias"],
        f"resnet/{unit}/a/proj/standardized_conv2d/kernel": ours[f"{unit}/conv_proj/kernel"],
    }
    for number, letter in ((1, "a"), (2, "b"), (3, "c")):
        conv = "standardized_conv2d_2" if letter == "c" else "standardized_conv2d"
        published[f"resnet/{unit}/{letter}/{conv}/kernel"] = ours[f"{unit}/conv{number}/kernel"]
        published[f"resnet/{unit}/{letter}/group_norm/gamma"] = ours[f"{unit}/gn{number}/scale"]
        published[f"resnet/{unit}/{letter}/group_norm/beta"] = ours[f"{unit}/gn{number}/bias"]
    np.savez(tmp_path / "BiT.npz", **published)
    model = load_model(tmp_path / "BiT.npz", image_size=16)
    assert model.format == "npz_published"
    read = flatten_names(model.params)
    assert read.keys() == ours.keys()
    assert all(np.array_equal(read[name], ours[name]) for name in ours)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    # Its code pads zeros, where ours trained with minus infinity as big_vision.
    trained = load_model(saved).module
    assert (trained.max_pool_padding, model.module.max_pool_padding) == ("-inf", "zero")
    expected = weights.logits(trained, load_model(saved).params, images)
    same = model.module.clone(max_pool_padding="-inf")
    np.testing.assert_array_equal(weights.logits(same, model.params, images), expected)
    np.savez(
        tmp_path / "more.npz", **{**published, "resnet/block1/unit01/d/what": ours["head/bias"]}
    )
    with pytest.raises(UserError, match="1 unexpected array.*unit01/d/what"):
        load_model(tmp_path / "more.npz", image_size=16)
    del published["resnet/group_norm/beta"]
    np.savez(tmp_path / "less.npz", **published)
    with pytest.raises(UserError, match="norm-pre-head/bias"):
        load_model(tmp_path / "less.npz", image_size=16)


def test_transformers_and_resnets_do_not_fit_each_other(saved: Path, tmp_path: Path) -> None:
    module = weights.module_of("mu/16")
    params = weights.seeded(module, (32, 32, 3))
    resnet = weights.seeded(load_model(saved).module, (32, 32, 3))
    np.savez(tmp_path / "vit.npz", **params)
    with pytest.raises(UserError, match="model.name=bit") as error:
        load_pretrained(saved, like=params, kind="vit")
    assert "class_token" not in str(error.value)  # a ResNet has none to add
    with pytest.raises(UserError, match="model.name=vit"):
        load_pretrained(tmp_path / "vit.npz", like=resnet, kind="bit")
    other = weights.module_of("R50x1", resnet_layers=(1, 2), resnet_width_factor=2)
    with pytest.raises(UserError, match=r"model.resnet_layers=\(1,\).*model.resnet_width_factor=1"):
        load_pretrained(saved, like=weights.seeded(other, (32, 32, 3)), kind="bit")


@pytest.mark.parametrize(("argument", "size"), [("", 384), (",500", 500)])
def test_the_fine_tuning_recipe_takes_it_at_any_size(argument: str, size: int) -> None:
    config = finetune.get_config(f"R152x2,cifar10{argument}")
    assert config.dataset.eval_preprocess == f"official_eval({size})"
    assert create_model(**config.model, num_classes=10).resnet_width_factor == 2
