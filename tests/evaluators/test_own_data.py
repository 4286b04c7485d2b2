"""Evaluators with a data set, keys and metrics of their own."""

from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests import fixtures_data, tiny
from vit_jax import config as schema
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.evaluators.create import EvaluatorKeys
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.task import open_data


def with_evaluator(folder: Path, **overrides: object) -> ConfigDict:
    config = tiny.config()
    with config.unlocked():
        config.evaluators.photos = schema.evaluator(
            "test",
            "classification",
            dataset=str(folder),
            preprocess="decode|resize_small(20)|central_crop(16)",
            **overrides,
        )
    return config


def test_another_data_set_with_some_of_the_classes_in_another_order(tmp_path: Path) -> None:
    counts = {"test": {"7": 3, "3": 2}}
    photos = fixtures_data.write_folder(tmp_path / "photos", counts)
    config = with_evaluator(photos)
    config.checkpoint.best_metric = "photos/calibration_error"
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        run = create_run(config, mesh)
        evaluator = run.evaluations["photos"].evaluator
        params = run.initial_state(0).params
        # The model says 7 whatever it sees: right for the sevens.
        params["head"]["bias"] = params["head"]["bias"].at[7].set(9.0)
        metrics = evaluator(params)
        labels = evaluator.examples(params)["label"]
    assert set(metrics) == set(evaluator.metric_names)
    assert {"accuracy_top5", "calibration_error"} < set(metrics)
    assert metrics["num_examples"] == 5
    assert metrics["accuracy"] == pytest.approx(3 / 5)
    assert sorted(np.unique(labels)) == [3, 7]
    assert run.evaluations["test"].evaluator.metric_names == ("loss", "accuracy", "num_examples")


def test_a_data_set_of_its_own_has_not_the_trainings_label() -> None:
    training = {"name": "a", "data_dir": "/data", "label_key": "fine", "cache_gib": 9.0}
    assert EvaluatorKeys(split="val").data(training) == {**training, "split": "val"}
    assert EvaluatorKeys(dataset="b").data(training)["label_key"] == ""


def test_classes_that_training_does_not_have(tmp_path: Path) -> None:
    photos = fixtures_data.write_folder(tmp_path / "photos", {"test": {"cat": 2, "7": 2}})
    with pytest.raises(UserError, match=r"evaluators.photos: 1 of the dataset's 2 .*'cat'"):
        create_run(with_evaluator(photos), create_mesh())


def test_mistakes_are_named(tmp_path: Path) -> None:
    photos = fixtures_data.write_folder(tmp_path / "photos", {"test": {"3": 2, "7": 2}})
    config = with_evaluator(photos)
    config.checkpoint.best_metric = "test/calibration_error"
    with pytest.raises(UserError, match="checkpoint.best_metric='test/calibration_error'"):
        create_run(config, create_mesh())
    with pytest.raises(UserError, match=r"evaluators.\*.top is not a key"):
        with_evaluator(photos, top=5)
    config = with_evaluator(photos)
    schema.set_kind(config, "objective", "masked_patch")
    config.model.classifier = "token_unpooled"
    with pytest.raises(UserError, match="needs an objective with one class per image"):
        create_run(config, create_mesh())


def test_examples_that_are_trained_on_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    def opened(split: str) -> str:
        config = tiny.config(dataset__split=split)
        with config.unlocked():
            config.evaluators.near = schema.evaluator("test[20:30]", "nearest_neighbors")
        caplog.clear()
        open_data(config, create_dataset)
        return caplog.text

    assert opened("train") == ""
    text = opened("train+test[:10]")
    assert "test: 10 examples of 'test[:50]' are in dataset.split='train+test[:10]' too" in text
    assert "evaluators.near" not in text  # which only fits its features on `train`
