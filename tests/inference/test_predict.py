"""Predictions for files: the right classes in the right order, and damaged files among them."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import fixtures_data, tiny
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.images import find_images
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.predict import as_text, predict, predict_images

CLASSES = ("red fox", "tench", "daisy", "mosque", "pier", "dam")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """11 readable images, at two depths; 2 damaged ones; other files."""
    root = tmp_path_factory.mktemp("photos")
    (root / "more").mkdir()
    for number in range(11):
        parent = root / "more" if number > 6 else root
        data = fixtures_data.encoded(fixtures_data.picture(number, size=(20 + number, 24)))
        (parent / f"{number:02d}.JPG").write_bytes(data)
    (root / "03b.png").write_bytes(b"<html>404</html>")
    (root / "more" / "08b.jpg").write_bytes(b"")
    (root / "notes.txt").write_text("no image")
    (root / ".hidden.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "m", class_names=CLASSES, seed=10)


@pytest.fixture(scope="module")
def model(source: Path) -> Model:
    return load_model(source)


def preprocessed(model: Model, spec: str) -> Model:
    """What `--preprocess` makes of the model."""
    description = dataclasses.replace(model.description, eval_preprocess=spec)
    return dataclasses.replace(model, description=description)


def logits(model: Model, path: str) -> np.ndarray:
    chain = parse(model.description.eval_preprocess)
    example = {"image": Path(path).read_bytes(), "label": 0}
    image = chain(example, np.random.default_rng(0))["image"] / np.float32(127.5) - 1
    return np.asarray(weights.logits(model.module, model.params, image[None]), np.float64)[0]


def column(row: dict[str, Any], key: str) -> list[Any]:
    return [prediction[key] for prediction in row["predictions"]]


def test_the_best_classes_of_every_readable_image(model: Model, folder: Path) -> None:
    paths = find_images([str(folder)])
    assert [Path(path).name for path in paths if "b." in path] == ["03b.png", "08b.jpg"]
    assert len(paths) == 13  # no hidden file, no text
    rows = list(predict_images(model, paths, top=3, batch_size=8))
    assert [row["image"] for row in rows] == paths
    answers = set()
    for row in rows:
        if "b." in row["image"]:
            assert "empty" in row["error"] or "cannot be decoded" in row["error"]
            assert "predictions" not in row
            continue
        assert "error" not in row
        values = logits(model, row["image"])
        probabilities = np.exp(values) / np.exp(values).sum()
        best = np.argsort(-probabilities)[:3]
        assert column(row, "output") == best.tolist()
        assert column(row, "class") == [CLASSES[i] for i in best]
        np.testing.assert_allclose(column(row, "probability"), probabilities[best], rtol=1e-4)
        answers.add(column(row, "class")[0])
    assert len(answers) > 1


def test_sigmoid_other_preprocessing_and_more_classes_than_there_are(model, folder):
    """Files are decoded whether the preprocessing says so or not."""
    path = str(folder / "00.JPG")
    rows = [
        next(predict_images(preprocessed(model, ops), [path], loss="sigmoid", top=99))
        for ops in ("decode|central_crop(16)", "central_crop(16)")
    ]
    assert rows[0] == rows[1]
    values = logits(preprocessed(model, "decode|central_crop(16)"), path)
    expected = np.sort(1 / (1 + np.exp(-values)))[::-1]
    np.testing.assert_allclose(column(rows[0], "probability"), expected, rtol=1e-4)
    assert sorted(column(rows[0], "class")) == sorted(CLASSES)


def test_images_that_the_preprocessing_refuses_are_named(model: Model, tmp_path: Path) -> None:
    for name, size in (("small.png", (9, 30)), ("large.png", (30, 30))):
        Image.fromarray(fixtures_data.picture(0, size=size)).save(tmp_path / name)
    cropping = preprocessed(model, "decode|central_crop(16)")
    large, small = predict_images(cropping, find_images([str(tmp_path)]))
    assert "error" not in large
    assert "9x30 is smaller than the crop 16x16" in small["error"]


def test_lines_json_and_picture(source, folder, tmp_path, capsys, monkeypatch):
    sheet = tmp_path / "sheet.png"
    arguments = [str(folder), str(tmp_path / "gone.jpg")]
    assert predict(str(source), arguments, top=2, picture=str(sheet)) == 3
    text = capsys.readouterr()
    errors = text.err.splitlines()
    assert [line.split(":")[0] for line in errors] == ["error"] * 3
    assert errors[2] == f"error: {tmp_path / 'gone.jpg'}: No such file or directory"
    lines = text.out.splitlines()
    assert lines[0] == str(folder / "00.JPG")
    assert lines[1].split("%")[1].strip() in CLASSES
    assert len(lines) == 11 * 3
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    assert pixels.shape[0] > 600  # 3 rows
    assert pixels.shape[1] > 1000  # 4 columns
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000  # photographs, no empty axes

    options = ["--top=2", "--json"]
    assert tiny.run_here(monkeypatch, "predict.py", str(source), *arguments, *options) == 1
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failed = [Path(row["image"]).name for row in objects if "error" in row]
    assert failed == ["03b.png", "08b.jpg", "gone.jpg"]
    assert len(objects) == 14
    first = objects[0]["predictions"]
    assert [set(prediction) for prediction in first] == [{"class", "output", "probability"}] * 2
    assert first[0]["class"] == CLASSES[first[0]["output"]]
    assert f"{100 * first[0]['probability']:9.2f} %  {first[0]['class']}" == lines[1]


def test_how_many_of_how_many_are_drawn_is_said(source, folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("vit_jax.inference.predict.MAX_PICTURES", 2)
    with caplog.at_level(logging.INFO):
        predict(str(source), [str(folder)], picture=str(tmp_path / "sheet.png"))
    assert caplog.messages[-1].endswith("sheet.png: the first 2 of 11 images.")


def test_unknown_classes_are_numbered_and_odd_names_printed(tmp_path: Path, folder: Path) -> None:
    model = load_model(save_model(tmp_path / "m", num_classes=3))
    (prediction,) = predict_images(model, [str(folder / "00.JPG")], top=1)
    (best,) = prediction["predictions"]
    assert best["class"] == f"class {best['output']}"
    row = {"class": "a", "output": 0, "probability": 1.0}
    odd = {"image": "\udce4.jpg", "predictions": [row]}
    assert as_text(odd).encode() == "100.00 %  a  \ufffd.jpg".encode()
    odd["predictions"] = [row, row]
    assert as_text(odd).splitlines() == ["\ufffd.jpg", *["   100.00 %  a"] * 2]


def test_mistakes(model: Model, source: Path, folder: Path, tmp_path: Path) -> None:
    image = [str(folder / "00.JPG")]

    with pytest.raises(UserError, match="--top=0 must be an integer, at least 1"):
        next(predict_images(model, image, top=0))
    with pytest.raises(UserError, match=r"gives images of \(8, 8, 3\), but the model takes \(16,"):
        predict(str(source), image, preprocess="decode|resize(8)")
    with pytest.raises(UserError, match="--loss='cosine' is unknown"):
        next(predict_images(model, image, loss="cosine"))
    with pytest.raises(UserError, match="the ending of --picture='.pgn' .* '.png'"):
        predict(str(source), image, picture="sheet.pgn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in this folder or below"):
        predict(str(source), [str(tmp_path / "empty")])
    headless = load_model(save_model(tmp_path / "headless"))
    with pytest.raises(UserError, match="the model has no head"):
        next(predict_images(headless, image))
    with pytest.raises(UserError, match="headless: the model has no head"):
        evaluate(headless.source, dataset="digits", split="test[:8]")


def test_transparent_images_are_composed_and_said_once(model, tmp_path, caplog):
    hidden = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    hidden[:, :, 3] = 0
    for name in ("a.png", "b.png"):
        Image.fromarray(hidden).save(tmp_path / name)
    white = np.full((16, 16, 3), 255, np.uint8)
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for images in (files, [hidden, Image.fromarray(hidden)]):
        caplog.clear()
        assert model.predict(images) == model.predict([white, white])
        [line] = [record.getMessage() for record in caplog.records]
        assert "transparent pixels, composed on white" in line
        assert line.endswith("others like it are not named.")
    kept = preprocessed(model, "decode(background=None)|resize(16)")
    np.testing.assert_array_equal(kept.logits(files[0]), model.logits(hidden[:, :, :3]))
