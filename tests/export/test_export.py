"""Exported models: what other programs read is what the model computes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import onnxruntime
import pytest

from tests import tiny
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.export import onnx as converter
from vit_jax.export import write
from vit_jax.export.write import export_model
from vit_jax.files.paths import read_json
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.description import Description
from vit_jax.models.kernels import devices

IMAGENET = "decode|resize(16)|normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
CLASSES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return load_model(save_model(folder / "a", class_names=CLASSES, scale=0.3))


def images(model: Model, batch: int) -> np.ndarray:
    shape = (batch, *model.description.image_shape)
    return np.random.default_rng(5).uniform(-1, 1, shape).astype(np.float32)


def logits(model: Model, images: np.ndarray) -> np.ndarray:
    return weights.logits(model.module, model.params, images)


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


def test_the_script_and_the_lines_of_the_cards(model, tmp_path, script):
    black = np.zeros((2, *model.description.image_shape), np.float32)
    expected = {"onnx": logits(model, black[:1]), "stablehlo": logits(model, black)}
    result = script("export.py", model.source, str(tmp_path / "onnx"), "--format=onnx", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["files"] == sorted(map(str, (tmp_path / "onnx").iterdir()))
    assert report["max_difference"] <= report["tolerance"]
    assert report["num_parameters"] == sum(x.size for x in jax.tree.leaves(model.params))
    assert Description.from_json(read_json(tmp_path / "onnx" / "model.json")) == model.description
    export_model(model.source, tmp_path / "stablehlo", format="stablehlo", batch=2)
    for format in RUN:
        # Only what the card's lines import is there.
        code = snippet(tmp_path / format)
        code += "import sys\nassert not {'flax', 'vit_jax'} & set(sys.modules)\n"
        code += "np.save('logits.npy', logits)\n"
        subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path / format, check=True)
        np.testing.assert_allclose(
            np.load(tmp_path / format / "logits.npy"), expected[format], atol=1e-6
        )


@pytest.mark.parametrize("format", RUN)
def test_any_number_of_images_and_the_same_files(format, model, tmp_path, monkeypatch):
    """On every machine; and nothing in the files names a folder of this one."""
    folder = tmp_path / "1" / "x"
    export_model(model.source, folder, format=format)
    usual = devices.device_of_program

    def with_a_gpu() -> tuple[str, str]:
        return usual() if jax.config.jax_default_device else ("gpu", "NVIDIA H100 80GB HBM3")

    with monkeypatch.context() as patch:
        patch.setattr(devices, "device_of_program", with_a_gpu)
        export_model(model.source, tmp_path / "2" / "x", format=format)
    five = images(model, 5)
    expected = logits(model, five)
    assert np.std(expected) > 0.1
    for batch in (1, 5):
        np.testing.assert_allclose(RUN[format](folder, five[:batch]), expected[:batch], atol=1e-5)
    for file in folder.iterdir():
        content = file.read_bytes()
        assert content == (tmp_path / "2" / "x" / file.name).read_bytes(), file.name
        assert str(tiny.ROOT).encode() not in content
        assert str(Path(model.source).parent).encode() not in content


@pytest.mark.parametrize("format", RUN)
def test_pixels_in_and_probabilities_out(format: str, tmp_path: Path) -> None:
    """The scaling inside the file is the one that the model's preprocessing ends with."""
    source = save_model(tmp_path / "a", class_names=CLASSES, eval_preprocess=IMAGENET, scale=0.3)
    settings: dict[str, Any] = {"input": "uint8", "output": "softmax", "batch": 2}
    export_model(source, tmp_path / "x", format=format, **settings)
    pixels = np.random.default_rng(5).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    pixels[1] //= 4
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    scaled = ((pixels / 255 - mean) / std).astype(np.float32)
    expected = jax.nn.softmax(logits(load_model(source), scaled))
    probabilities = RUN[format](tmp_path / "x", pixels)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    assert np.max(np.abs(probabilities[0] - probabilities[1])) > 1e-3
    assert "np.zeros((2, 16, 16, 3), np.uint8)" in snippet(tmp_path / "x")
    assert "probabilities" in snippet(tmp_path / "x")


def test_sigmoid_and_another_resolution(model: Model, tmp_path: Path) -> None:
    settings = {"format": "onnx", "batch": 1, "image_size": (32, 24)}
    export_model(model.source, tmp_path / "x", output="sigmoid", **settings)
    larger = load_model(model.source, image_size=(32, 24))
    one = images(larger, 1)
    expected = 1 / (1 + np.exp(-logits(larger, one)))
    np.testing.assert_allclose(run_onnx(tmp_path / "x", one), expected, atol=1e-6)
    assert Description.from_json(read_json(tmp_path / "x" / "model.json")) == larger.description


def test_bfloat16(model: Model, tmp_path: Path) -> None:
    """StableHLO computes as the model does; ONNX is written in float32 only."""
    export_model(model.source, tmp_path / "x", format="stablehlo", dtype="bfloat16", batch=2)
    two = images(model, 2)
    expected = logits(load_model(model.source, dtype="bfloat16"), two)
    np.testing.assert_allclose(run_stablehlo(tmp_path / "x", two), expected, atol=0.02)
    assert np.max(np.abs(expected - logits(model, two))) > 1e-4  # it is another computation


def test_a_file_that_computes_something_else_is_removed(model, tmp_path, monkeypatch):
    def write_wrong(path: Path, arrays: dict[str, Any]) -> None:
        np.savez(path, **{name: array * 1.001 for name, array in arrays.items()})

    monkeypatch.setattr(write, "write_arrays", write_wrong)
    monkeypatch.setitem(converter.DIRECT, "tanh", "Erf")
    for format in RUN:
        with pytest.raises(UserError, match=f"the {format} file was written .* it was removed"):
            export_model(model.source, tmp_path / "x", format=format, batch=1)
        assert not list(tmp_path.iterdir())


MISTAKES: dict[str, dict[str, Any]] = {
    "ONNX files compute in float32": {"dtype": "bfloat16"},
    "--format='tflite' is unknown": {"format": "tflite"},
    "Did you mean 'logits'": {"output": "logit"},
    "--batch=0 must be at least 1": {"batch": 0},
    "taken exists; delete it": {"destination": "taken"},
    "--output=softmax: headless has no head": {"source": "headless", "output": "softmax"},
}


def test_mistakes(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    save_model(tmp_path / "headless")
    usual = {"source": model.source, "destination": "x", "format": "onnx"}
    for message, settings in MISTAKES.items():
        with pytest.raises(UserError, match=re.escape(message)):
            export_model(**{**usual, **settings})
    assert not (tmp_path / "x").exists()
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]


def test_missing_packages_are_named(model: Model, tmp_path: Path) -> None:
    packages = {"flatbuffers": "stablehlo", "onnxruntime": "onnx", "onnx": "onnx"}
    for package, format in packages.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(UserError, match=rf"package {package}: .*'.\[export\]'"):
                export_model(model.source, tmp_path / "x", format=format)
