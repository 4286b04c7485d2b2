"""Exported models: what other programs read is what the model computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import onnx
import onnxruntime
import pytest

from tests import tiny
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.export import onnx as converter
from vit_jax.export import write
from vit_jax.export.settings import ExportSettings
from vit_jax.export.write import export_model
from vit_jax.inference.load import PretrainedModel, load_model
from vit_jax.workdir.description import Description

IMAGENET = "decode|resize(16)|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
CLASSES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PretrainedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(save_model(folder / "a", class_names=CLASSES, scale=0.3))


@pytest.fixture(scope="module", params=["stablehlo", "onnx"])
def exported(
    request: pytest.FixtureRequest,
    model: PretrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """The model as it is exported when nothing is asked for: (format, folder)."""
    folder = tmp_path_factory.mktemp("exported") / "x"
    export_model(model, folder, ExportSettings(request.param))
    return request.param, folder


def images(model: PretrainedModel, batch: int) -> np.ndarray:
    shape = (batch, *model.description.image_shape)
    return np.random.default_rng(5).uniform(-1, 1, shape).astype(np.float32)


def logits(model: PretrainedModel, images: np.ndarray) -> np.ndarray:
    apply = jax.jit(lambda p, x: model.module.apply({"params": p}, x, train=False))
    return np.asarray(apply(model.params, images))


def run_stablehlo(folder: Path, images: np.ndarray) -> np.ndarray:
    program = jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    return np.asarray(program.call(dict(np.load(folder / "params.npz")), images))


def run_onnx(folder: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return session.run(None, {"images": images})[0]


RUN = {"stablehlo": run_stablehlo, "onnx": run_onnx}


def snippet(folder: Path) -> str:
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def test_a_run_exported_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has ended, through the script and the lines of the model cards."""
    workdir = save_model(tmp_path / "run", class_names=CLASSES)
    model = load_model(workdir)
    expected = logits(model, np.zeros((2, *model.description.image_shape), np.float32))

    folder = tmp_path / "exported" / "onnx"
    arguments = [str(workdir), str(folder), "--format=onnx", "--json"]
    assert tiny.run_here(monkeypatch, "export.py", *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["files"]) == {path.name for path in folder.iterdir()}
    assert report["max_difference"] <= report["tolerance"]
    assert report["num_parameters"] == sum(x.size for x in jax.tree.leaves(model.params))
    assert Description.read(folder / "model.json") == model.description
    assert f'0 "{CLASSES[0]}"' in (folder / "README.md").read_text()

    settings = ExportSettings("stablehlo", batch=2)
    export_model(model, tmp_path / "exported" / "stablehlo", settings)
    for format in RUN:
        folder = tmp_path / "exported" / format
        # Only what the card's lines import is there.
        code = snippet(folder) + "import sys\nassert not {'flax', 'vit_jax'} & set(sys.modules)\n"
        code += "np.save('logits.npy', logits)\n"
        subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, check=True)
        np.testing.assert_allclose(np.load(folder / "logits.npy"), expected, atol=1e-6)


def test_any_number_of_images(exported: tuple[str, Path], model: PretrainedModel) -> None:
    format, folder = exported
    given = images(model, 5)
    expected = logits(model, given)
    assert np.std(expected) > 0.1
    for batch in (1, 5):
        found = RUN[format](folder, given[:batch])
        np.testing.assert_allclose(found, expected[:batch], atol=1e-5)


def test_the_same_model_gives_the_same_files(
    exported: tuple[str, Path], model: PretrainedModel, tmp_path: Path
) -> None:
    """And nothing in them names a folder of this machine."""
    format, folder = exported
    export_model(model, tmp_path / "x", ExportSettings(format))
    for file in folder.iterdir():
        content = file.read_bytes()
        assert content == (tmp_path / "x" / file.name).read_bytes(), file.name
        assert str(tiny.ROOT).encode() not in content
        assert str(Path(model.source).parent).encode() not in content


@pytest.mark.parametrize("format", ["stablehlo", "onnx"])
def test_pixels_in_and_probabilities_out(format: str, tmp_path: Path) -> None:
    """The scaling inside the file is the one that the model's preprocessing ends with."""
    source = save_model(tmp_path / "a", class_names=CLASSES, eval_preprocess=IMAGENET, scale=0.3)
    model = load_model(source)
    settings = ExportSettings(format, input="uint8", output="softmax", batch=2)
    export_model(model, tmp_path / "x", settings)
    pixels = np.random.default_rng(5).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    pixels[1] //= 4
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = jax.nn.softmax(logits(model, ((pixels / 255 - mean) / std).astype(np.float32)))
    found = RUN[format](tmp_path / "x", pixels)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.max(np.abs(found[0] - found[1])) > 1e-3
    assert "np.zeros((2, 16, 16, 3), np.uint8)" in snippet(tmp_path / "x")
    assert "probabilities" in snippet(tmp_path / "x")


def test_sigmoid(model: PretrainedModel, tmp_path: Path) -> None:
    export_model(model, tmp_path / "x", ExportSettings("onnx", output="sigmoid", batch=1))
    given = images(model, 1)
    expected = 1 / (1 + np.exp(-logits(model, given)))
    np.testing.assert_allclose(run_onnx(tmp_path / "x", given), expected, atol=1e-6)
    read = onnx.load(tmp_path / "x" / "model.onnx")
    described = json.loads(read.metadata_props[0].value)
    assert Description.from_json(described) == model.description


def test_bfloat16(model: PretrainedModel, tmp_path: Path) -> None:
    """StableHLO computes as the model does; ONNX is written in float32 only."""
    settings = ExportSettings("stablehlo", batch=2)
    half = load_model(model.source, dtype="bfloat16")
    export_model(half, tmp_path / "x", settings)
    given = images(model, 2)
    expected = logits(half, given)
    np.testing.assert_allclose(run_stablehlo(tmp_path / "x", given), expected, atol=0.02)
    assert np.max(np.abs(expected - logits(model, given))) > 1e-4  # it is another computation
    with pytest.raises(UserError, match="ONNX files compute in float32"):
        export_model(half, tmp_path / "y", ExportSettings("onnx"))


def test_another_resolution(model: PretrainedModel, tmp_path: Path) -> None:
    settings = ExportSettings("onnx", batch=2)
    larger = load_model(model.source, image_size=(32, 24))
    export_model(larger, tmp_path / "x", settings)
    given = images(larger, 2)
    assert given.shape == (2, 32, 24, 3)
    np.testing.assert_allclose(run_onnx(tmp_path / "x", given), logits(larger, given), atol=1e-5)


def test_a_file_that_computes_something_else_is_removed(
    model: PretrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrong(path: Path, arrays: dict[str, Any]) -> None:
        np.savez(path, **{name: array * 1.001 for name, array in arrays.items()})

    monkeypatch.setattr(write, "write_arrays", write_wrong)
    monkeypatch.setitem(converter.DIRECT, "tanh", "Erf")
    for format in ("stablehlo", "onnx"):
        with pytest.raises(UserError, match=f"the {format} file was written .* it was removed"):
            export_model(model, tmp_path / "x", ExportSettings(format, batch=1))
        assert not list(tmp_path.iterdir())


def test_a_taken_destination_is_left_alone(model: PretrainedModel, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="x exists; remove it"):
        export_model(model, tmp_path / "x", ExportSettings("onnx"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        export_model(model, tmp_path / "file" / "x", ExportSettings("onnx"))


def test_a_model_without_head_has_no_probabilities(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path / "a"))
    with pytest.raises(UserError, match="--output=softmax: .* has no head"):
        export_model(model, tmp_path / "x", ExportSettings("onnx", output="softmax"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "tflite"}, "--format='tflite' is unknown"),
        ({"format": "onnx", "input": "int8"}, "--input='int8' is unknown"),
        ({"format": "onnx", "output": "logit"}, "Did you mean 'logits'"),
        ({"format": "onnx", "batch": 0}, "--batch=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ExportSettings(**settings)


@pytest.mark.parametrize(
    ("package", "format"),
    [("flatbuffers", "stablehlo"), ("onnxruntime", "onnx"), ("onnx", "onnx")],
)
def test_missing_packages_are_named(
    package: str,
    format: str,
    model: PretrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"package {package}: .*'.\[export\]'"):
        export_model(model, tmp_path / "x", ExportSettings(format))
