"""The life of a BiT ResNet: trained, resumed, measured, fine-tuned, converted, exported."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from configs import finetune
from tests import tiny
from tests.pretrained import weights
from tests.test_train import run_until_saved
from vit_jax.errors import UserError
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.features import extract_features
from vit_jax.inference.load import load_model
from vit_jax.inference.predict import predict_images
from vit_jax.models.create import create_model, get_variant
from vit_jax.parameters.sharding import create_mesh
from vit_jax.pretrained.load import load_pretrained
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names

# The smallest there is: convolutions take long to compile.
ROW: dict[str, Any] = {**get_variant("R50x1"), "resnet_layers": (1,)}
OVERRIDES: dict[str, Any] = {
    **{f"model__{key}": value for key, value in ROW.items()},
    "duration__steps": 4,
    "checkpoint__every_steps": 2,
    "optimizer__name": "sgd",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interrupted after two steps and continued."""
    workdir = tmp_path_factory.mktemp("resnet") / "run"
    run_until_saved(tiny.config(**OVERRIDES), workdir, 2)
    results = train_and_evaluate(tiny.config(**OVERRIDES), str(workdir))
    assert results["step"] == 4
    return workdir


def test_the_loop_trains_it(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(10), rel=1e-5)  # its head is zero
    model = json.loads((finished / "model.json").read_text())
    assert model["grid"] == [4, 4]  # places of the feature map
    assert model["model"]["name"] == "bit"
    flat = flatten_names(load_model(finished).params)
    assert np.any(flat["head/kernel"])
    assert not np.allclose(flat["norm-pre-head/bias"], 0)


def test_it_is_evaluated_and_predicts_at_any_size(finished: Path, tmp_path: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    measured = evaluate(str(finished), dataset="digits", split="test[:50]")
    assert measured["accuracy"] == pytest.approx(results["test/accuracy"])
    assert measured["loss"] == pytest.approx(results["test/loss"], rel=1e-5)
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((30, 40, 3), np.uint8))
    model = load_model(finished, image_size=(21, 18))
    assert model.description.image_shape == (21, 18, 3)
    assert model.description.grid == (6, 5)
    (prediction,) = predict_images(model, [str(tmp_path / "a.png")], top=3)
    assert len(prediction["predictions"]) == 3


def test_features_are_what_the_head_sees(finished: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "features.npz")
    extract_features(
        str(finished),
        ["digits"],
        split="test[:16]",
        features=("gap", "pre_logits", "logits"),
        output=output,
        batch_size=16,
    )
    features = dict(np.load(output))
    np.testing.assert_array_equal(features["gap"], features["pre_logits"])
    assert features["gap"].shape == (16, 256)
    head = load_model(finished).params["head"]
    expected = features["gap"] @ head["kernel"] + head["bias"][None]
    np.testing.assert_allclose(features["logits"], expected, rtol=0, atol=1e-5)
    for name in ("tokens", "cls", "block_0"):
        with pytest.raises(UserError, match=f"no '{name}'.* It has logits, pre_logits, gap."):
            extract_features(
                *(str(finished), ["digits"]), split="test[:16]", features=(name,), output=output
            )


def test_fine_tuning_at_another_size_resets_the_head_only(finished: Path, tmp_path: Path) -> None:
    size = "decode|resize(19)"
    overrides = {
        **OVERRIDES,
        "dataset__preprocess": size,
        "dataset__eval_preprocess": size,
        "pretrained__source": str(finished),
        "schedule__learning_rate": 0.0,
        "duration__steps": 1,
        "evaluators__test__split": "test[:16]",
    }
    train_and_evaluate(tiny.config(**overrides), str(tmp_path / "tuned"))
    before, after = (load_model(path) for path in (finished, tmp_path / "tuned"))
    assert after.description.image_shape == (19, 19, 3)
    old, new = flatten_names(before.params), flatten_names(after.params)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {"head/kernel", "head/bias"}
    assert not np.any(new["head/kernel"])


def test_published_files_of_big_transfer(finished: Path, tmp_path: Path) -> None:
    """Written here name by name, with the numbered convolutions of some of them."""
    ours = flatten_names(load_model(finished).params)
    unit = "block1/unit01"
    theirs = {
        "resnet/root_block/standardized_conv2d/kernel": ours["root_block/conv_root/kernel"],
        "resnet/group_norm/gamma": ours["norm-pre-head/scale"],
        "resnet/group_norm/beta": ours["norm-pre-head/bias"],
        "resnet/head/conv2d/kernel": ours["head/kernel"][None, None],
        "resnet/head/conv2d/bias": ours["head/bias"],
        f"resnet/{unit}/a/proj/standardized_conv2d/kernel": ours[f"{unit}/conv_proj/kernel"],
    }
    for number, letter in ((1, "a"), (2, "b"), (3, "c")):
        conv = "standardized_conv2d_2" if letter == "c" else "standardized_conv2d"
        theirs[f"resnet/{unit}/{letter}/{conv}/kernel"] = ours[f"{unit}/conv{number}/kernel"]
        theirs[f"resnet/{unit}/{letter}/group_norm/gamma"] = ours[f"{unit}/gn{number}/scale"]
        theirs[f"resnet/{unit}/{letter}/group_norm/beta"] = ours[f"{unit}/gn{number}/bias"]
    np.savez(tmp_path / "BiT.npz", **theirs)
    model = load_model(tmp_path / "BiT.npz", image_size=16)
    assert model.format == "npz_published"
    read = flatten_names(model.params)
    assert read.keys() == ours.keys()
    assert all(np.array_equal(read[name], ours[name]) for name in ours)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    # Its code pads zeros, where ours trained with minus infinity as big_vision.
    trained = load_model(finished).module
    assert (trained.max_pool_padding, model.module.max_pool_padding) == ("-inf", "zero")
    expected = weights.logits(trained, load_model(finished).params, images)
    same = model.module.clone(max_pool_padding="-inf")
    np.testing.assert_array_equal(weights.logits(same, model.params, images), expected)
    np.savez(tmp_path / "more.npz", **{**theirs, "resnet/block1/unit01/d/what": ours["head/bias"]})
    with pytest.raises(UserError, match="1 unexpected array.*unit01/d/what"):
        load_model(tmp_path / "more.npz", image_size=16)
    del theirs["resnet/group_norm/beta"]
    np.savez(tmp_path / "less.npz", **theirs)
    with pytest.raises(UserError, match="norm-pre-head/bias"):
        load_model(tmp_path / "less.npz", image_size=16)


def test_transformers_and_resnets_do_not_fit_each_other(finished: Path, tmp_path: Path) -> None:
    module = weights.module_of("mu/16")
    params = weights.seeded(module, (32, 32, 3))
    resnet = weights.seeded(load_model(finished).module, (32, 32, 3))
    np.savez(tmp_path / "vit.npz", **params)
    with pytest.raises(UserError, match="model.name=bit") as error:
        load_pretrained(finished, like=params, kind="vit")
    assert "class_token" not in str(error.value)  # a ResNet has none to add
    with pytest.raises(UserError, match="model.name=vit"):
        load_pretrained(tmp_path / "vit.npz", like=resnet, kind="bit")
    other = weights.module_of("R50x1", resnet_layers=(1, 2), resnet_width_factor=2)
    with pytest.raises(UserError, match=r"model.resnet_layers=\(1,\).*model.resnet_width_factor=1"):
        load_pretrained(finished, like=weights.seeded(other, (32, 32, 3)), kind="bit")


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 32), ("dropout_rate", 0.1), ("patch_size", 16)]
)
def test_an_override_that_it_cannot_follow_is_an_error(key: str, value: Any) -> None:
    config = tiny.config(**OVERRIDES)
    with config.unlocked():
        config.model[key] = value
    with pytest.raises(UserError, match=f"model.{key} is not a key of model.name='bit'"):
        create_run(config, create_mesh())


@pytest.mark.parametrize(("argument", "size"), [("", 384), (",500", 500)])
def test_the_fine_tuning_recipe_takes_it_at_any_size(argument: str, size: int) -> None:
    config = finetune.get_config(f"R152x2,cifar10{argument}")
    assert config.dataset.eval_preprocess == f"official_eval({size})"
    assert create_model(**config.model, num_classes=10).resnet_width_factor == 2
