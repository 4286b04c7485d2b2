"""The fine-tuning recipes against the published tables, and on the real layouts of their data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import augreg, finetune, photos, transfer
from tests.kinds import small
from tests.saved_models import save_model
from vit_jax.config import get_config
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.models.create import get_variant
from vit_jax.models.tokens import token_grid
from vit_jax.models.variants import HYBRIDS

GRID = (0.001, 0.003, 0.01, 0.03)
# Paper, table 4 and section B.1.1: steps, learning rates, percent of train held out.
TABLE_4 = {
    "imagenet2012": (20_000, (0.003, 0.01, 0.03, 0.06), 1),
    "cifar100": (10_000, GRID, 2),
    "cifar10": (10_000, GRID, 2),
    "oxford_iiit_pet": (500, GRID, 10),
    "oxford_flowers102": (500, GRID, 10),
}


def common(config: ConfigDict) -> dict[str, Any]:
    """What the three recipes share, of the papers and of the official code."""
    return {
        **{key: config.optimizer[key] for key in ("name", "momentum", "momentum_dtype")},
        **{key: config.optimizer[key] for key in ("clip_norm", "weight_decay")},
        "schedule": config.schedule.name,
        "batch_size": config.dataset.batch_size,
        "loss": config.objective.loss,
        "dropout_rate": config.model.dropout_rate,
    }


@pytest.mark.parametrize("recipe", [finetune, augreg, transfer])
def test_what_the_recipes_share(recipe: Any) -> None:
    assert common(recipe.get_config("B/16,cifar100")) == {
        "name": "sgd",
        "momentum": 0.9,
        "momentum_dtype": "bfloat16",
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "schedule": "cosine",
        "batch_size": 512,
        "loss": "softmax",
        "dropout_rate": 0.0,
    }


@pytest.mark.parametrize("dataset", TABLE_4)
def test_table_4(dataset: str) -> None:
    config = finetune.get_config(f"B/16,{dataset}")
    steps, rates, held_out = TABLE_4[dataset]
    assert config.duration.steps == steps
    assert config.sweep.learning_rates == rates
    assert config.schedule.learning_rate in rates
    assert config.dataset.split == "train"  # the final runs are on all of it
    assert config.sweep.train_split == f"train[:{100 - held_out}%]"
    assert config.sweep.validation_split == f"train[{100 - held_out}%:]"
    assert config.evaluators.test.split == ("validation" if dataset == "imagenet2012" else "test")
    assert config.dataset.preprocess == "official_train(384)"
    assert config.train_step.polyak_decay == 0.0


def test_table_2_has_its_resolutions_and_polyak_averaging() -> None:
    for argument, resolution in (("L/16,imagenet2012,512", 512), ("H/14,imagenet2012,518", 518)):
        config = finetune.get_config(argument)
        assert config.dataset.preprocess == f"official_train({resolution})"
        assert config.dataset.eval_preprocess == f"official_eval({resolution})"
        assert config.train_step.polyak_decay == 0.9999
        assert config.duration.steps == 20_000
        assert "table 2" in config.sweep.published
    assert finetune.get_config("L/16,cifar10,512").train_step.polyak_decay == 0.0


@pytest.mark.parametrize(
    ("argument", "published"),
    [
        ("B/16,cifar10", "98.95 from ImageNet-21k, 98.13 from ImageNet (2010.11929, table 5)"),
        ("B/32,imagenet2012", "81.28 from ImageNet-21k, 73.38 from ImageNet (2010.11929, table 5)"),
        ("H/14,oxford_flowers102", "99.51 from ImageNet-21k (2010.11929, table 5)"),
        ("R50+B/16,cifar10", "98.94 from ImageNet-21k (official README)"),
        ("L/16,vtab/caltech101", "90.8 from ImageNet-21k (2010.11929, table 9)"),
        ("B/16,cifar10,224", ""),
    ],
)
def test_published_numbers(argument: str, published: str) -> None:
    assert finetune.get_config(argument).sweep.published == published


@pytest.mark.parametrize("variant", ["B/32", "H/14", "B/7", *HYBRIDS])
def test_every_model_has_a_resolution_that_its_tokens_divide(variant: str) -> None:
    row = get_variant(variant)
    for recipe in (finetune, augreg, transfer):
        config = recipe.get_config(f"{variant},cifar100")
        image = {"image": np.zeros((500, 400, 3), np.uint8)}
        for spec in (config.dataset.preprocess, config.dataset.eval_preprocess):
            size = parse(spec)(image, np.random.default_rng(0))["image"].shape[:2]
            grid = token_grid(size, row["patch_size"], row.get("resnet_layers"))
            stride = finetune.pixels_per_token(variant)
            assert grid == (384 // stride, 384 // stride)
            assert size == (grid[0] * stride, grid[1] * stride)


@pytest.mark.parametrize("variant", ["B/16", "L/16", "R50+B/16"])
def test_large_models_are_fine_tuned_with_dropout(variant: str) -> None:
    rate = 0.0 if variant == "B/16" else 0.1  # the official README's table
    assert finetune.get_config(f"{variant},cifar10").model.dropout_rate == rate
    assert augreg.get_config(f"{variant},cifar10").model.dropout_rate == 0.0


@pytest.mark.parametrize(
    ("recipe", "argument", "message"),
    [
        (finetune, "B/16", r"VARIANT,DATASET\[,RESOLUTION\]"),
        (finetune, "B/17,cifar10", "Did you mean"),
        (finetune, "B/16,vtab/clevr-count", "Did you mean 'clevr_count'"),
        (finetune, "H/14,imagenet2012,512", "512 pixels .* 14 pixels wide; use 504 or 518"),
        (augreg, "B/16", r"configs/augreg\.py:B/16 must be VARIANT"),
        (augreg, "B/16,cifar100,384,500", "cifar100 are 2500 and 10000 steps"),
        (transfer, "B/32", r"VARIANT,DATASET\[,CROP\]"),
        (transfer, "B/32,cifar10,resmal_crop", "Did you mean 'resmall_crop'"),
    ],
)
def test_arguments_that_make_no_sense(recipe: Any, argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.get_config(argument)


@pytest.mark.parametrize("recipe", [finetune, augreg, transfer])
def test_image_folders(recipe: Any) -> None:
    config = recipe.get_config("B/16,./a,b/photos")
    assert config.dataset.name == "./a,b/photos"
    assert config.evaluators.test.split == "test"
    assert config.sweep.validation_split == "train[90%:]"


# 2106.10270, table 4: learning rates, {steps: warm-up}.
AUGREG = {
    "imagenet2012": ((0.01, 0.03), {20_000: 500}),
    "cifar100": ((0.001, 0.003, 0.01), {2_500: 200, 10_000: 500}),
    "oxford_iiit_pet": ((0.001, 0.003, 0.01), {500: 100, 2_500: 200}),
    "kitti": ((0.001, 0.003, 0.01), {500: 100, 2_500: 200}),
}


@pytest.mark.parametrize("dataset", AUGREG)
def test_augreg(dataset: str) -> None:
    rates, schedules = AUGREG[dataset]
    assert augreg.get_config(f"B/16,{dataset}").duration.steps == max(schedules)
    for steps, warmup_steps in schedules.items():
        config = augreg.get_config(f"B/16,{dataset},224,{steps}")
        assert config.duration.steps == steps
        assert config.schedule.warmup_steps == warmup_steps
        assert config.sweep.learning_rates == rates
        assert config.schedule.learning_rate in rates
        assert config.dataset.preprocess == "official_train(224)"
        assert config.evaluators.validation.split == config.sweep.validation_split
        assert config.dataset.split == config.sweep.train_split
    assert augreg.get_config("B/16,kitti").dataset.label_key == "vtab_kitti_distance"


def test_augreg_defaults_of_the_official_code_and_its_table() -> None:
    config = augreg.get_config("R+Ti/16,dtd")
    assert (config.duration.steps, config.schedule.warmup_steps) == (500, 100)
    assert config.schedule.learning_rate == 0.03
    assert config.dataset.preprocess == "official_train(384)"
    best = augreg.get_config("R26+S/32,imagenet2012")
    assert best.schedule.learning_rate == 0.01
    assert best.sweep.published == "83.85 from ImageNet-21k (official README)"
    small = augreg.get_config("B/16,imagenet2012,224")
    assert small.sweep.published == "83.96 from ImageNet-21k (2106.10270, table 3)"


# Header of big_vision's configs/transfer.py: crop, learning rate, mean; and its splits and steps.
TRANSFER = {
    "imagenet2012": ("inception_crop", 0.03, 83.27, 99, 20_000, 500),
    "cifar10": ("random_crop", 0.003, 98.55, 98, 10_000, 500),
    "cifar100": ("random_crop", 0.01, 91.35, 98, 10_000, 500),
    "oxford_iiit_pet": ("inception_crop", 0.003, 93.78, 90, 500, 100),
    "oxford_flowers102": ("inception_crop", 0.003, 99.43, 90, 500, 100),
}


@pytest.mark.parametrize("dataset", TRANSFER)
def test_transfer(dataset: str) -> None:
    config = transfer.get_config(f"B/32,{dataset}")
    crop, rate, accuracy, percent, steps, warmup_steps = TRANSFER[dataset]
    assert crop in config.dataset.preprocess
    assert config.schedule.learning_rate == rate
    assert config.sweep.published.startswith(f"{accuracy} ")
    assert config.dataset.split == f"train[:{percent}%]"
    assert config.evaluators.validation.split == f"train[{percent}%:]"
    assert (config.duration.steps, config.schedule.warmup_steps) == (steps, warmup_steps)
    assert config.dataset.eval_preprocess == "big_vision_eval(384, resize=448)"


def test_transfer_crops() -> None:
    specs = {
        crop: transfer.get_config(f"B/32,dtd,{crop}").dataset.preprocess for crop in transfer.CROPS
    }
    assert specs == {
        "inception_crop": "decode|inception_crop(384)|flip_lr",
        "resmall_crop": "decode|resize_small(448)|random_crop(384)|flip_lr",
        "resize_crop": "decode|resize(448)|random_crop(384)|flip_lr",
    }
    assert transfer.get_config("B/32,dtd").dataset.preprocess == specs["resmall_crop"]


def test_weights_bring_their_model(tmp_path: Path) -> None:
    """A folder in VARIANT's place: sizes, what no array shows, and the start of training."""
    sizes = small("modern_vit:DINOv3")
    save_model(tmp_path / "weights", class_names=("a", "b"), **sizes)
    for recipe in (photos, finetune):
        config = recipe.get_config(f"{tmp_path}/weights,digits,24")
        assert {key: config.model[key] for key in sizes} == sizes
        assert config.pretrained.source == f"{tmp_path}/weights"
    assert config.dataset.preprocess == "official_train(24)"
    assert finetune.get_config(f"{tmp_path}/weights,digits").dataset.preprocess.endswith("(384)")
    with pytest.raises(UserError, match="unknown model 'nowhere/at/all'"):
        finetune.get_config("nowhere/at/all,digits")
    with pytest.raises(UserError, match="25 pixels are not divisible by .* 8 pixels wide"):
        finetune.get_config(f"{tmp_path}/weights,digits,25")


@pytest.mark.parametrize("options", ["", ",scratch", ",multi_label"])
def test_large_photos_are_resized_antialiased(options: str) -> None:
    """Stripes of a pixel become grey, not black or white, where no paper says how to resize."""
    stripes = np.zeros((510, 510, 3), np.uint8)
    stripes[:, ::2] = 255
    official = parse("official_eval(34)")({"image": stripes}, np.random.default_rng(0))["image"]
    assert official.max() - official.min() == 255
    for dataset in (photos.get_config(f"S/16,photos,32{options}").dataset, get_config().dataset):
        for spec in (dataset.preprocess, dataset.eval_preprocess):
            image = parse(spec)({"image": stripes}, np.random.default_rng(0))["image"]
            assert np.abs(image.astype(int) - 127).max() < 32
