"""Data without labels, for objectives that need none."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from tests import fixtures_data, tiny
from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import train_batches
from vit_jax.errors import UserError
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run


def check_first_losses(name: str, **keys: Any) -> None:
    """A run of masked patch prediction on 20 images without labels."""
    config = tiny.config(
        dataset__name=name,
        dataset__split="train",
        objective__name="masked_patch",
        model__classifier="token_unpooled",
        evaluators__test__split="train[-4:]",
        **keys,
    )
    run = create_run(config, create_mesh())
    assert (run.dataset.num_examples, run.dataset.class_names) == (20, ())
    params = jax.jit(run.objective.init)(
        jax.random.key(0), {"image": np.zeros((1, *run.dataset.image_shape))}
    )
    with train_batches(run.dataset, batch_size=8, seed=0, total_steps=1) as batches:
        (batch,) = batches
    assert not batch["label"].any()
    assert np.isfinite(jax.jit(run.objective.evaluate)(params, batch)["loss"]).all()


def test_a_tfds_set_without_labels(tmp_path: pathlib.Path) -> None:
    fixtures_data.Unlabelled(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    keys = {"preprocess": "decode|resize(16)", "data_dir": str(tmp_path)}
    with pytest.raises(UserError, match="no label; set dataset.label_key"):
        create_dataset(name="unlabelled", split="train", **keys)
    check_first_losses("unlabelled", dataset__data_dir=str(tmp_path))


def test_labels_outside_of_the_classes_are_not_read(tmp_path: pathlib.Path) -> None:
    def unlabelled(split: str, index: int) -> dict[str, Any]:
        return {**fixtures_data.image_example(split, index), "label": -1}  # as in ImageNet's test

    fixtures_data.tiny_tfds("imagenet2012", tmp_path, {"test": 3}, example=unlabelled)
    keys = {"split": "test", "preprocess": "decode", "data_dir": str(tmp_path)}
    with pytest.raises(UserError, match="label -1 is not in"):
        create_dataset(name="imagenet2012", **keys).source[0]
    assert create_dataset(name="imagenet2012", needs_label=False, **keys).source[0]["label"] == 0


def test_a_folder_without_class_folders(tmp_path: pathlib.Path) -> None:
    for seed in range(20):
        image = fixtures_data.encoded(fixtures_data.picture(seed, size=(16, 20)))
        (tmp_path / f"{seed}.jpg").write_bytes(image)
    keys = {"split": "train", "preprocess": "decode|resize(16)"}
    with pytest.raises(UserError, match="no folders of classes"):
        create_dataset(name=str(tmp_path), **keys)
    check_first_losses(str(tmp_path))


def test_splits_with_and_without_class_folders(tmp_path: pathlib.Path) -> None:
    fixtures_data.write_folder(tmp_path, {"train": {"cat": 3}, "extra": {"cow": 2, "cat": 1}})
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.jpg").write_bytes(fixtures_data.encoded(fixtures_data.picture(0)))
    for split, count in {"train": 3, "extra": 3, "test": 1, "all": 7}.items():
        dataset = create_dataset(
            name=str(tmp_path), split=split, preprocess="decode", needs_label=False
        )
        assert dataset.check().num_examples == count
