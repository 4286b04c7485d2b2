"""What a run says of its data and its model."""

import csv
import json
import logging
from pathlib import Path

import pytest

from tests import tiny
from tests.data.test_table import write_images, write_table
from tests.fixtures_data import write_folder
from vit_jax.config import section
from vit_jax.data.datasets import create_dataset
from vit_jax.models.create import MODELS, VARIANTS
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.description import model_name, write_splits


def test_splits_that_were_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workdir = tmp_path / "run"
    photos = write_folder(tmp_path, {"photos": {"cat": 10, "dog": 10}}) / "photos"
    config = tiny.config(
        dataset__name=str(photos),
        dataset__split="train",
        dataset__batch_size=8,
        dataset__preprocess="decode|resize(16)",
        evaluators__test__split="test",
        duration__steps=1,
    )
    with caplog.at_level(logging.INFO):
        train_and_evaluate(config, str(workdir))
    rows = list(csv.DictReader((workdir / "splits.csv").read_text().splitlines()))
    files = {f"{name}/{i:03}.jpg" for name in ("cat", "dog") for i in range(10)}
    assert {row["file"] for row in rows} == files
    for name in ("train", "test"):
        assert {row["file"][:3] for row in rows if row["split"] == name} == {"cat", "dog"}
    counts = [sum(row["split"] == name for row in rows) for name in ("train", "test")]
    assert f"{photos}' has no splits: 'test' is {counts[1]} of 20 images" in caplog.text
    assert (
        f"Data: {photos} test, {counts[1]} images of 16x16x3, 2 classes: cat, dog." in caplog.text
    )


def test_images_without_labels_have_splits_too(tmp_path: Path) -> None:
    names = [f"{i:02}.png" for i in range(20)]
    write_images(tmp_path, names)
    table = write_table(tmp_path / "t.csv", {"path": names, "caption": ["a cat"] * 20})
    datasets = [
        create_dataset(name=str(table), split=split, preprocess="decode", needs=())
        for split in ("train", "test")
    ]
    write_splits(tmp_path / "splits.csv", datasets)
    rows = list(csv.DictReader((tmp_path / "splits.csv").read_text().splitlines()))
    assert sorted(row["file"] for row in rows) == names


def test_models_are_called_by_their_variant() -> None:
    for variant, row in VARIANTS.items():
        name = model_name(json.loads(json.dumps(section("model", **row).to_dict())))
        # DeiT's plain models are a ViT's sizes, with another GELU.
        size = variant.removeprefix("DeiT-") if row["name"] == "vit" else variant
        assert name in (size, f"{MODELS[row['name']].acronym}-{size}")
    ti = section("model", **VARIANTS["Ti/16"]).to_dict()
    assert model_name(ti) == "ViT-Ti/16"
    assert model_name(section("model", **VARIANTS["DeiT3-B/16"]).to_dict()) == "DeiT3-B/16"
    assert model_name(section("model", **VARIANTS["g-opt/14"]).to_dict()) == "ViT-g-opt/14"
    assert model_name(ti | {"num_layers": 4}) == "ViT/16"
    assert model_name(ti | {"num_layers": 4, "resnet_layers": [1]}) == "R+ViT/16"
    assert model_name(ti | {"patch_size": (8, 16)}) == "ViT"
