"""Evaluation of saved models: every number against its definition, classes by name, ReaL."""

import csv
import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_fscore_support

from tests import fixtures_data
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.data.class_names import class_names, wordnet_ids
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.evaluators.classification import calibration_error
from vit_jax.evaluators.create import EVALUATORS
from vit_jax.evaluators.stream import Reader
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.evaluation_tables import per_class_scores, table
from vit_jax.inference.load import load_model
from vit_jax.inference.real_labels import real_labels
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Task
from vit_jax.parameters.sharding import create_mesh

CLASSES = tuple("abcdefg")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 images: neither divides over 8 devices nor fills the last batch."""
    counts = {"test": {name: 3 + (name in "bcdefg") for name in CLASSES}}
    return fixtures_data.write_folder(tmp_path_factory.mktemp("photos"), counts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "abc", class_names=CLASSES)


def all_logits(model: Path, photos: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, K] in float64 and labels [N], one image at a time."""
    loaded = load_model(model)
    data = create_dataset(
        name=str(photos), split="test", preprocess=loaded.description.eval_preprocess
    )
    examples = [data.example(i, np.random.default_rng(0)) for i in range(data.num_examples)]
    images = np.stack([example["image"] for example in examples]) / np.float32(127.5) - 1
    logits = weights.logits(loaded.module, loaded.params, images)
    return np.asarray(logits, np.float64), np.array([example["label"] for example in examples])


def test_every_number_by_its_definition(model: Path, photos: Path, tmp_path: Path) -> None:
    results = evaluate(
        str(model), dataset=str(photos), split="test", batch_size=10, output=str(tmp_path / "out")
    )
    logits, labels = all_logits(model, photos)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    prediction, confidence = logits.argmax(axis=1), probabilities.max(axis=1)
    of_label = probabilities[np.arange(27), labels]
    best = np.argsort(-logits, axis=1)[:, :5]
    assert results["num_examples"] == 27
    assert results["accuracy"] == np.mean(prediction == labels)
    assert results["accuracy_top5"] == np.mean((best == labels[:, None]).any(axis=1))
    assert results["loss"] == pytest.approx(-np.log(of_label).mean(), rel=1e-5)
    expected = calibration_error(confidence, prediction == labels)
    assert results["calibration_error"] == pytest.approx(expected, rel=1e-4)
    assert results["preprocess"] == "decode|resize(16)"
    assert 0 < results["accuracy"] < results["accuracy_top5"] < 1  # they tell something

    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written == results
    with open(tmp_path / "out" / "examples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [CLASSES[label] for label in labels]
    assert [row["prediction"] for row in rows] == [CLASSES[number] for number in prediction]
    assert [Path(row["example"]).parent.name for row in rows] == [row["label"] for row in rows]
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], confidence, atol=1e-5)
    np.testing.assert_allclose(
        [float(row["loss"]) for row in rows], -np.log(of_label), rtol=1e-4, atol=1e-6
    )
    with open(tmp_path / "out" / "confusion.csv", newline="") as file:
        (_, *columns), *counts = csv.reader(file)
    assert [name for name, *_ in counts] == columns
    for name, *row in counts:
        for column, count in zip(columns, row, strict=True):
            same = (labels == CLASSES.index(name)) & (prediction == CLASSES.index(column))
            assert int(count) == same.sum()
    assert sum(int(count) for _, *row in counts for count in row) == 27
    assert f"top-1 accuracy     {results['accuracy']:9.2%}\n" in table(results)

    precision, recall, f1, images = precision_recall_fscore_support(
        labels, prediction, labels=range(7), zero_division=0
    )
    assert results["macro_f1"] == pytest.approx(
        f1_score(labels, prediction, average="macro", zero_division=0)
    )
    with open(tmp_path / "out" / "classes.csv", newline="") as file:
        of_classes = list(csv.DictReader(file))
    assert [row["class"] for row in of_classes] == list(CLASSES)
    assert [int(row["images"]) for row in of_classes] == images.tolist()
    for name, expected in (("accuracy", recall), ("precision", precision), ("f1", f1)):
        assert [row[f"{name}_percent"] for row in of_classes] == [
            f"{100 * x:.2f}" for x in expected
        ]
    a = f"a           3 {recall[0]:9.2%} {precision[0]:10.2%} {f1[0]:8.2%}\n"
    assert f"class  images  accuracy  precision       F1\n{a}b " in table(results)


def test_of_many_classes_the_worst_are_shown() -> None:
    """And none of them for having no image."""
    labels = np.repeat(np.arange(1, 25), 24)
    prediction = np.where(np.arange(576) % 24 < labels, labels, 0)  # 1 of 24 right, 2 of 24, ...
    scores = per_class_scores({1: "first"}, {"label": labels, "prediction": prediction})
    assert (len(scores), scores[0]["images"], scores[3]["accuracy"]) == (25, 0, 3 / 24)
    results = {"num_examples": 576, "dataset": "x", "split": "test", "per_class": scores}
    lines = table(results).splitlines()[2:]
    assert lines[0].startswith("worst of 25 classes  images")
    assert [line.split()[0] for line in lines[1:]] == ["first", *map(str, range(2, 11))]


def test_the_training_loop_measures_the_same(model: Path, photos: Path) -> None:
    loaded = load_model(model)
    reader = Reader(
        create_dataset(name=str(photos), split="test", preprocess="decode|resize(16)"),
        create_mesh(),
        batch_size=16,
        loader={"num_threads": 1, "num_workers": 2, "prefetch": 1},
    )
    evaluator = EVALUATORS["objective"](Classification(Task.of(loaded.module)), reader)
    in_training = evaluator(jax.device_put(loaded.params))
    assert set(in_training) == set(evaluator.metric_names) == {"loss", "accuracy", "num_examples"}
    results = evaluate(str(model), dataset=str(photos), split="test", batch_size=16)
    for name, value in in_training.items():
        assert results[name] == pytest.approx(value, rel=1e-6)


def test_a_run_is_measured_on_what_it_was_tested_on(model, photos, tmp_path):
    run = Path(shutil.copytree(model, tmp_path / "run"))
    own = {"dataset": str(photos), "split": "test[:5]", "data_dir": "", "label_key": ""}
    training = {"name": "digits", "data_dir": "", "label_key": ""}
    config = {"dataset": training, "evaluators": {"val": {}, "test": own}}
    (run / "config.json").write_text(json.dumps(config))
    results, expected = (
        evaluate(str(folder), **options, batch_size=4)
        for folder, options in ((run, {}), (model, {"dataset": str(photos), "split": "test[:5]"}))
    )
    for name in ("accuracy", "loss", "num_examples", "dataset", "split"):
        assert results[name] == expected[name]
    with pytest.raises(UserError, match="not a run with test data: give --data"):
        evaluate(str(model))


def test_few_classes_have_no_top5_and_sigmoids_are_no_softmax(tmp_path: Path) -> None:
    counts = {"test": {"cat": 3, "dog": 2}}
    photos = fixtures_data.write_folder(tmp_path / "photos", counts)
    model = save_model(tmp_path / "model", class_names=("cat", "dog"))
    softmax = evaluate(str(model), dataset=str(photos), split="test")
    assert "accuracy_top5" not in softmax
    sigmoid = evaluate(str(model), dataset=str(photos), split="test", loss="sigmoid")
    assert sigmoid["accuracy"] == softmax["accuracy"]
    logits, labels = all_logits(model, photos)
    expected = np.logaddexp(0, np.where(np.eye(2, dtype=bool)[labels], -logits, logits)).sum(axis=1)
    assert sigmoid["loss"] == pytest.approx(expected.mean(), rel=1e-5)
    confidence = 1 / (1 + np.exp(-logits.max(axis=1)))
    error = calibration_error(confidence, logits.argmax(axis=1) == labels)
    assert sigmoid["calibration_error"] == pytest.approx(error, rel=1e-4)


# Calibration and ReaL.


def test_calibration_error_by_hand() -> None:
    rng = np.random.default_rng(0)
    confidence = np.concatenate([rng.random(500), np.arange(16) / 15])
    correct = rng.random(516) < confidence**2
    expected = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = (confidence > low) & (confidence <= high)
        if number == 0:
            inside |= confidence == 0
        gap = abs(correct[inside].mean() - confidence[inside].mean())
        expected += gap * inside.sum() / 516
    assert calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-12)


def test_classes_that_the_split_does_not_have_need_not_compete(tmp_path: Path) -> None:
    names = ("d", "a", "c", "b", "e", "f", "g")
    counts = {"test": {"a": 5, "c": 6, "g": 4}, "train": {"b": 1, "a": 1, "c": 1, "g": 1}}
    photos = fixtures_data.write_folder(tmp_path / "photos", counts)
    model = save_model(tmp_path / "model", class_names=names, seed=3)
    plain = evaluate(str(model), dataset=str(photos), split="test", output=str(tmp_path / "all"))
    present = evaluate(
        str(model),
        dataset=str(photos),
        split="test",
        classes="present",
        output=str(tmp_path / "present"),
    )
    assert (plain["classes"], present["classes"]) == (4, 3)
    assert "accuracy_top5" in plain
    assert "accuracy_top5" not in present
    assert present["loss"] < plain["loss"]  # a softmax over fewer
    with open(tmp_path / "present" / "examples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    loaded = load_model(model)
    data = create_dataset(
        name=str(photos), split="test", preprocess=loaded.description.eval_preprocess
    )
    images = np.stack([data.example(i, np.random.default_rng(0))["image"] for i in range(15)])
    logits = weights.logits(loaded.module, loaded.params, images.astype(np.float32) / 127.5 - 1)
    among = [names.index(name) for name in "acg"]
    best = [names[among[k]] for k in np.asarray(logits)[:, among].argmax(axis=1)]
    assert [row["prediction"] for row in rows] == best
    assert sorted(row["label"] for row in rows) == ["a"] * 5 + ["c"] * 6 + ["g"] * 4
    assert present["accuracy"] == pytest.approx(
        np.mean([row["label"] == b for row, b in zip(rows, best, strict=True)])
    )
    with pytest.raises(UserError, match="--classes='presen' is unknown"):
        evaluate(str(model), dataset=str(photos), split="test", classes="presen")


def write_validation(root: Path, numbers: dict[str, list[int]]) -> Path:
    """Files called as ImageNet's validation images, by class."""
    for name, of_class in numbers.items():
        (root / "val" / name).mkdir(parents=True)
        for number in of_class:
            data = fixtures_data.encoded(fixtures_data.picture(number, size=(20, 24)))
            (root / "val" / name / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(data)
    return root


def test_real_labels_of_a_folder(tmp_path: Path) -> None:
    numbers = {"n01440764": [1, 50_000, 77], "n01443537": [293, 4], "n01484850": [5, 6]}
    photos = write_validation(tmp_path / "imagenet", numbers)
    # The model has another order of the classes: ReaL labels have to follow.
    names = ("n01484850", "n01440764", "n01443537")
    model = save_model(tmp_path / "model", class_names=names, seed=10)
    plain = evaluate(str(model), dataset=str(photos), split="val", output=str(tmp_path / "out"))
    assert "accuracy_real" not in plain
    with open(tmp_path / "out" / "examples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    predicted = {
        int(row["example"][-13:-5]): sorted(names).index(row["prediction"]) for row in rows
    }
    assert len(set(predicted.values())) > 1

    labels: list[list[int]] = [[] for _ in range(50_000)]
    for number in (1, 50_000, 293):
        labels[number - 1] = [predicted[number]]  # hits
    labels[77 - 1] = [(predicted[77] + 1) % 3, predicted[77]]  # one of two
    labels[4 - 1] = [(predicted[4] + 1) % 3, (predicted[4] + 2) % 3]  # a miss
    real = tmp_path / "real.json"  # 5 and 6 have no label
    real.write_text(json.dumps(labels))
    results = evaluate(str(model), dataset=str(photos), split="val", real=str(real))
    assert results["num_examples"] == 7
    assert results["num_examples_real"] == 5
    assert results["accuracy_real"] == 4 / 5
    assert results["accuracy"] == plain["accuracy"]
    assert "over the 5 images" in table(results)

    for content, message in (
        ("[[1], 2]", "not a list of lists of labels"),
        ("{", "not a JSON file"),
        ("[[1], [0]]", "ends before image 50000"),
        (json.dumps([[999]] * 50_000), "go up to 999, but .* has only 3 classes"),
        (json.dumps([[]] * 50_000), "no images of 'val' have ReaL labels"),
    ):
        real.write_text(content)
        with pytest.raises(UserError, match=message):
            evaluate(str(model), dataset=str(photos), split="val", real=str(real))


def validation_example(_: str, index: int) -> dict[str, Any]:
    data = fixtures_data.encoded(fixtures_data.picture(index, size=(20, 24)))
    name = f"ILSVRC2012_val_{4 - index:08d}.JPEG"
    return {"image": io.BytesIO(data), "label": 10 * index, "file_name": name}


def test_real_labels_of_tfds(tmp_path: Path) -> None:
    """By the names of the files, whatever order they are stored in."""
    fixtures_data.tiny_tfds("imagenet2012", tmp_path, {"validation": 4}, example=validation_example)
    data = create_dataset(
        name="imagenet2012", split="validation", preprocess="decode", data_dir=str(tmp_path)
    )
    labels: list[list[int]] = [[], [3, 10], [20, 7, 4], [999]]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    expected = [labels[3 - data.source[i]["label"] // 10] for i in range(4)]
    assert real_labels(data, str(tmp_path / "real.json")) == expected
    photos = fixtures_data.write_folder(tmp_path / "photos", {"test": {"a": 1, "b": 1}})
    others = create_dataset(name=str(photos), split="test", preprocess="decode")
    with pytest.raises(UserError, match=r"called '0\d\d.jpg', not like ILSVRC2012_val_0000"):
        real_labels(others, str(tmp_path / "real.json"))


# Classes.


def test_another_order_of_the_classes_changes_nothing(photos, model, tmp_path, caplog):
    """The same model with its outputs turned round, and a class more."""
    other = save_model(tmp_path / "other", class_names=(*CLASSES[::-1], "h"))
    with np.load(model / "params.npz") as file:
        params = dict(file)
    for name, value in (("head/kernel", 0.0), ("head/bias", -100.0)):
        never = np.full_like(params[name][..., :1], value)
        params[name] = np.concatenate([params[name][..., ::-1], never], axis=-1)  # [..., 8]
    np.savez(other / "params.npz", **params)
    caplog.set_level(logging.INFO)
    first = evaluate(str(model), dataset=str(photos), split="test")
    assert "matched by name" not in caplog.text
    second = evaluate(str(other), dataset=str(photos), split="test")
    assert "6 of 7 labels have another index in the model, which has 1 more" in caplog.text
    assert "Preprocessing: decode|resize(16)" in caplog.text
    assert f"Data: {photos} test, 27 images of 16x16x3, 7 classes: a, b, c, d and 3" in caplog.text
    for key in ("accuracy", "accuracy_top5", "loss", "calibration_error"):
        assert first[key] == pytest.approx(second[key], rel=1e-5)
    ignored = evaluate(str(other), dataset=str(photos), split="test", ignore_class_names=True)
    assert abs(ignored["loss"] - second["loss"]) > 0.01


def test_classes_by_wordnet_id() -> None:
    names, ids = class_names("imagenet2012"), wordnet_ids("imagenet2012")
    np.testing.assert_array_equal(match_classes(ids, names, 1000), np.arange(1000))
    some = (ids[7], ids[3], ids[999])
    np.testing.assert_array_equal(match_classes(some, names, 1000), [7, 3, 999])
    with_synonyms = [f"{name}, or so" for name in names]
    np.testing.assert_array_equal(match_classes(some, with_synonyms, 1000), [7, 3, 999])
    with pytest.raises(UserError, match="3 of the dataset's 3 classes are not among"):
        match_classes(some, with_synonyms[::-1], 1000)
    # A file with 1,000 outputs and no names: ImageNet's, if the data are.
    np.testing.assert_array_equal(match_classes(some, (), 1000), [7, 3, 999])
    of_21k = wordnet_ids("imagenet21k").index(ids[7])
    assert match_classes(some[:1], class_names("imagenet21k"), 21843)[0] == of_21k


@pytest.mark.parametrize(
    ("dataset_names", "model_names", "num_outputs", "message"),
    [
        ("abcd", "abc", 3, "has 4 classes, but the model only 3 outputs"),
        ("abxy", "abcd", 4, r"2 of .* 4 classes are not among .* 4: 'x', 'y' \(the model's: 'a'"),
        ("ab", "abb", 3, "1 of .*: 'b'"),  # which b?
        ("abc", "", 4, "4 outputs with unknown names, the dataset 3 classes; --ignore_class_names"),
    ],
)
def test_classes_that_do_not_match(dataset_names, model_names, num_outputs, message):
    with pytest.raises(UserError, match=message):
        match_classes(dataset_names, model_names, num_outputs)


def test_unknown_and_ignored_names_are_taken_in_order() -> None:
    np.testing.assert_array_equal(match_classes("abc", "", 3), [0, 1, 2])
    np.testing.assert_array_equal(match_classes("xy", "abc", 3, ignore_names=True), [0, 1])
    for names in (("003", "10", "997"), ("3", "0010", "997.0")):
        for known in ((), [f"name {i}" for i in range(1000)]):
            found = match_classes(names, known, 1000, ignore_names=True)
            np.testing.assert_array_equal(found, [3, 10, 997])
    np.testing.assert_array_equal(match_classes(["00", "02"], ["2", "1", "0"], 3), [2, 0])
    with pytest.raises(UserError, match="1 of the dataset's 2 classes are not among .*: '7'"):
        match_classes(["01", "7"], ["2", "1", "0"], 3)
    with pytest.raises(UserError, match="only 1 outputs"):
        match_classes("xy", "a", 1, ignore_names=True)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": "decode|resize(24)"}, r"\(24, 24, 3\), but the model takes \(16,"),
        ({"preprocess": "decode|quux"}, "unknown op 'quux'"),
        ({"loss": "hinge"}, "objective.loss='hinge' is unknown"),
        ({"batch_size": 0}, "--batch_size=0 must be at least 1"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_mistakes(model: Path, photos: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(str(model), **{"dataset": str(photos), "split": "test", **options})


def test_infinite_outputs_are_an_error(photos: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", class_names=CLASSES, scale=1e20)
    with pytest.raises(UserError, match="the loss of 27 of 27 examples is not finite"):
        evaluate(str(model), dataset=str(photos), split="test")
