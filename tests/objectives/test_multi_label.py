"""Images with any number of labels: loss, mixing, evaluation, and a run from table to answers."""

import csv
import json
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from tests import golden, tiny
from vit_jax.errors import UserError
from vit_jax.evaluators.classification import average_precisions
from vit_jax.export.convert import convert_checkpoint
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.features import extract_features
from vit_jax.inference.load import load_model
from vit_jax.inference.predict import predict_images
from vit_jax.models.create import create_model
from vit_jax.objectives.classification import MultiLabel
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate

RNG = jax.random.key(0)
MODEL: dict[str, Any] = {"name": "vit", "patch_size": 4, "hidden_size": 8, "num_layers": 1}
MODEL |= {"mlp_dim": 8, "num_heads": 2}


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (5, 8, 8, 3), np.uint8),
        "label": rng.integers(0, 2, (5, 3), np.uint8),
        "mask": np.float32([1.0, 1.0, 1.0, 1.0, 0.0]),
    }


@pytest.fixture(scope="module")
def objective() -> MultiLabel:
    return MultiLabel(
        Task(lambda n: create_model(**MODEL, num_classes=n), (8, 8, 3), ("a", "b", "c"))
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_the_loss_is_that_of_pytorch(objective, batch, mixed):
    params = golden.filled(objective.model, (1, 8, 8, 3))
    targets = np.asarray(batch["label"], np.float32)
    if mixed:
        weight = np.array([1.0, 0.7, 0.5, 0.9, 1.0], np.float32)
        other = np.roll(targets, 1, axis=0)
        batch = {**batch, "other_label": other, "label_weight": weight}
        targets = weight[:, None] * targets + (1 - weight[:, None]) * other
    logits = jax.jit(objective.predict)(params, batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(np.asarray(logits)), torch.tensor(targets), reduction="none"
    ).sum(1)
    loss, metrics = jax.jit(objective.loss)(params, batch, RNG)
    # Float32 sums of three terms, the mean of four.
    np.testing.assert_allclose(loss, expected[:4].mean(), rtol=1e-6)
    assert metrics == {}
    if not mixed:
        losses = jax.jit(objective.evaluate)(params, batch)["loss"]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("levels", [None, 4])
def test_average_precision_is_that_of_scikit_learn(levels: int | None) -> None:
    """Also where many scores are equal."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(200, 6)).astype(np.float32)
    if levels:
        scores = np.round(scores * levels) / levels
    labels = np.asarray(rng.random((200, 6)) < np.linspace(0.01, 0.9, 6), np.uint8)
    labels[:, 3] = 0
    precisions = average_precisions(scores, labels)
    assert np.isnan(precisions[3])
    for k in (0, 1, 2, 4, 5):
        assert precisions[k] == pytest.approx(average_precision_score(labels[:, k], scores[:, k]))


def photos(root: Path) -> str:
    """A red, a green, both or no patch on grey; a table with two splits."""
    rng, rows = np.random.default_rng(0), [["path", "labels", "split"]]
    for i in range(160):
        image = rng.integers(90, 130, (16, 16, 3)).astype(np.uint8)
        names = [name for name in ("green", "red") if rng.random() < 0.5]
        for name, channel in (("green", 1), ("red", 2)):
            if name in names:
                y, x = rng.integers(0, 8, 2)
                image[y : y + 8, x : x + 8, channel] = 250
        cv2.imwrite(str(root / f"{i}.png"), image)
        rows.append([f"{i}.png", "|".join(names), "train" if i < 120 else "test"])
    with open(root / "photos.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(root / "photos.csv")


def config(table: str, **overrides: Any) -> Any:
    keys = {
        "dataset__name": table,
        "dataset__split": "train",
        "dataset__preprocess": "decode|resize(16)",
        "objective__name": "multi_label",
        "evaluators__test__split": "test",
        "duration__steps": 60,
        "schedule__learning_rate": 3e-3,
        "checkpoint__every_steps": 60,
    }
    result = tiny.config(**{**keys, **overrides})
    tiny.default.set_kind(result, "evaluators.test", "average_precision")
    return result


@pytest.mark.slow
def test_from_the_table_to_the_answers(tmp_path: Path) -> None:
    table, workdir = photos(tmp_path), str(tmp_path / "run")
    multi_label = config(table, mix__mixup_alpha=0.2, checkpoint__best_metric="test/mAP")
    results = train_and_evaluate(multi_label, workdir)
    assert results["test/mAP"] > 0.9
    measured = evaluate(workdir, dataset=table, split="test", output=str(tmp_path / "report"))
    assert measured["mAP"] == pytest.approx(results["test/mAP"], abs=1e-6)
    assert measured["loss"] == pytest.approx(results["test/loss"], rel=1e-5)
    text = (tmp_path / "report" / "classes.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["class"] for row in rows] == ["green", "red"]
    precisions = [float(row["average_precision"]) for row in rows]
    assert np.mean(precisions) == pytest.approx(measured["mAP"], abs=1e-6)
    # A sigmoid for each class, without being asked.
    assert (
        json.loads((tmp_path / "run" / "model.json").read_text())["probabilities_by"] == "sigmoid"
    )
    features_of = {"split": "test", "features": ["cls"], "output": str(tmp_path / "f.npz")}
    extract_features(workdir, [table], **features_of)
    with np.load(tmp_path / "f.npz") as features:
        assert features["labels"].shape == (40, 2)
    convert_checkpoint(workdir, str(tmp_path / "hf"), format="huggingface")
    (tmp_path / "hf" / "model.json").unlink()
    assert load_model(tmp_path / "hf").description.probabilities_by == "sigmoid"
    [prediction] = predict_images(load_model(workdir), [str(tmp_path / "159.png")])
    total = sum(row["probability"] for row in prediction["predictions"])
    assert total != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("overrides", "evaluator", "message"),
    [
        ({"objective__name": "classification"}, "average_precision", "has several labels per "),
        ({"dataset__name": "digits"}, "average_precision", "one label per image; objective.name="),
        ({"evaluators__test__dataset": "digits"}, "average_precision", "'digits' has one label "),
        ({}, "classification", "'average_precision'"),
    ],
)
def test_labels_and_evaluators_that_do_not_fit_the_objective(
    tmp_path: Path, overrides: dict[str, Any], evaluator: str, message: str
) -> None:
    unfit = config(photos(tmp_path), **overrides)
    tiny.default.set_kind(unfit, "evaluators.test", evaluator)
    with pytest.raises(UserError, match=message):
        create_run(unfit, create_mesh())
