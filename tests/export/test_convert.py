"""Any format to any other, and what stands beside the result."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import golden, tiny
from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.errors import UserError
from vit_jax.export.card import write_card
from vit_jax.export.convert import FORMAT_NAMES, convert_checkpoint, input_settings
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.create import create_model, get_variant
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.arrays import read_arrays
from vit_jax.pretrained.formats import google, timm_write
from vit_jax.pretrained.zoo.entries import entries
from vit_jax.trees import flatten_names

IMAGES = golden.images(2, 32, 32)
FOLDERS = ("timm", "huggingface", "orbax")


def seeded_file(folder: Path, image_shape: tuple[int, ...] = (32, 32, 3), **sizes: Any) -> Path:
    module = create_model(**weights.SMALL, num_classes=7, **sizes)
    return write_arrays(folder / "a.npz", weights.seeded(module, image_shape))


def test_every_format_is_read_and_written(tmp_path: Path) -> None:
    """Each to the next one: what is read knows no format, so any goes to any other."""
    params = weights.seeded(create_model(**weights.SMALL, num_classes=7), (32, 32, 3))
    params[POSITIONS][:, 0] = 0  # else big_vision folds it into the class token
    write_arrays(tmp_path / "first.npz", google.to_published(params))
    source, source_format = str(tmp_path / "first.npz"), "npz_published"
    for name in (*FORMAT_NAMES, "npz"):
        target = str(tmp_path / (f"{name}_of_{source_format}" + ".npz" * (name not in FOLDERS)))
        report = convert_checkpoint(source, target, format=name, num_heads=3)
        assert report["source_format"] == source_format
        assert report["parameters_identical"]
        assert report["max_difference"] == 0.0
        assert all(Path(file).is_file() for file in report["files"])
        json.dumps(report)
        loaded = load_model(target)
        assert loaded.format == name
        assert loaded.description == load_model(source, num_heads=3).description
        weights.assert_same(flatten_names(loaded.params), params)
        source, source_format = target, name


def test_without_head(tmp_path: Path) -> None:
    source = str(seeded_file(tmp_path, representation_size=20))
    target = tmp_path / "timm"
    with pytest.raises(UserError, match="--drop_head"):
        convert_checkpoint(source, str(target), format="timm")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]  # nothing is left behind
    report = convert_checkpoint(source, str(target), format="timm", drop_head=True)
    assert {"head/kernel", "pre_logits/bias"} <= report["arrays"]["dropped"].keys()
    loaded = load_model(target)
    assert loaded.description.model["num_classes"] == 0
    assert weights.logits(loaded.module, loaded.params, IMAGES).shape == (2, 24)


@pytest.mark.parametrize("name", ["npz", "timm", "orbax"])
def test_rectangles(name: str, tmp_path: Path) -> None:
    """What we write beside the weights tells their grid, also where the positions do not."""
    source = str(seeded_file(tmp_path, (32, 48, 3)))
    target = tmp_path / (name if name in FOLDERS else f"{name}.npz")
    convert_checkpoint(source, str(target), format=name, grid=(4, 6))
    assert load_model(target).description.grid == (4, 6)
    again = tmp_path / "again.npz"
    report = convert_checkpoint(str(target), str(again), format="npz", image_size=(48, 64))
    method = {"timm": "bicubic", "huggingface": "transformers"}.get(name, "bilinear")
    assert report["arrays"]["adapted"][POSITIONS].endswith(f"{method} 4x6 -> 6x8")
    description = load_model(again).description
    assert (description.image_shape, description.grid) == ((48, 64, 3), (6, 8))


@pytest.mark.parametrize("name", ["npz_published", "timm", "huggingface"])
def test_the_norm_before_a_head_becomes_part_of_it(name: str, tmp_path: Path) -> None:
    module = create_model(**weights.SMALL, num_classes=7, head_norm=True)
    params = weights.seeded(module, (32, 32, 3))
    params["head_norm/var"] = np.square(params["head_norm/var"]) + 0.5
    source = write_arrays(tmp_path / "a.npz", params)
    target = tmp_path / (name if name in FOLDERS else f"{name}.npz")
    report = convert_checkpoint(str(source), str(target), format=name)
    assert report["max_difference"] <= report["tolerance"]
    model = load_model(target)
    assert not model.description.model["head_norm"]
    assert flatten_names(model.params).keys() == params.keys() - {"head_norm/mean", "head_norm/var"}


@pytest.mark.parametrize("name", ["npz_published", "big_vision", "timm", "huggingface"])
def test_batch_norms_of_a_hybrid_are_refused(name: str, tmp_path: Path) -> None:
    sizes = {"resnet_layers": (1,), "resnet_batch_norm": True, "patch_size": 2}
    module = create_model(**{**weights.SMALL, **sizes}, num_classes=7)
    source = write_arrays(tmp_path / "a.npz", weights.seeded(module, (32, 32, 3)))
    target = tmp_path / (name if name in FOLDERS else f"{name}.npz")
    with pytest.raises(UserError, match=r"cannot store model\.resnet_.*use --format=npz or orbax"):
        convert_checkpoint(str(source), str(target), format=name)
    assert not target.exists()


def test_frozen_norms_do_not_matter_to_files(tmp_path: Path) -> None:
    sizes = {"stage_layers": (1,), "stage_widths": (8,), "group_width": 4}
    written = []
    for frozen in (False, True):
        module = create_model("regnet", num_classes=3, frozen_norms=frozen, **sizes)
        source = write_arrays(tmp_path / f"{frozen}.npz", weights.seeded(module, (32, 32, 3)))
        description = load_model(source, image_size=32).description
        model = {**description.model, "frozen_norms": frozen}
        described = dataclasses.replace(description, model=model)
        write_json(tmp_path / f"{frozen}.json", described.to_json())
        convert_checkpoint(str(source), str(tmp_path / f"{frozen}-b.npz"), format="npz")
        written.append(read_arrays(tmp_path / f"{frozen}-b.npz"))
    np.testing.assert_equal(*written)


def test_fixed_positions_are_written_as_learned_ones(tmp_path: Path) -> None:
    model = create_model(
        **weights.SMALL, classifier="gap", position_embedding="sincos2d", num_classes=7
    )
    params = weights.seeded(model, (32, 32, 3))
    source = write_arrays(tmp_path / "a.npz", google.to_big_vision(params))
    target, size = str(tmp_path / "timm"), (32, 32)
    report = convert_checkpoint(str(source), target, format="timm", image_size=size)
    assert any("Fixed positions" in note for note in report["notes"])
    assert report["max_difference"] <= 1e-5
    assert load_model(tmp_path / "timm").description.model["position_embedding"] == "learned"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("official_eval(32)", {"crop_pct": 1.0, "crop_mode": "squash", "mean": [0.5] * 3}),
        ("decode|resize(40)|central_crop(32)", {"crop_pct": 0.8, "crop_mode": "squash"}),
        ("decode|resize_small(37)|central_crop(32)", {"crop_mode": "center"}),
        ("decode|resize(32)|value_range(0, 1)", {"mean": [0.0] * 3, "std": [1.0] * 3}),
        ("deit_eval(32)", {"mean": [0.485, 0.456, 0.406], "interpolation": "bicubic"}),
    ],
)
def test_preprocessing_in_timms_words(spec: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """What timm is told comes back as the same sizes and scaling."""
    source = seeded_file(tmp_path)
    description = load_model(source).description
    described = dataclasses.replace(description, eval_preprocess=spec)
    write_json(tmp_path / "a.json", described.to_json())
    convert_checkpoint(str(source), str(tmp_path / "timm"), format="timm")
    told = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
    for key, value in expected.items():
        assert told[key] == (pytest.approx(value) if key != "crop_mode" else value)
    (tmp_path / "timm" / "model.json").unlink()
    stated, _ = input_settings(load_model(tmp_path / "timm").description)
    meant, _ = input_settings(described)
    assert (stated.resize, stated.method) == (meant.resize, meant.method)
    assert stated.crop in (meant.crop, None)
    assert (*stated.mean, *stated.std) == pytest.approx((*meant.mean, *meant.std))


def test_what_a_format_cannot_say_is_said(tmp_path: Path) -> None:
    convert_checkpoint(str(seeded_file(tmp_path)), str(tmp_path / "hf"), format="huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["hidden_act"], config["layer_norm_eps"]) == ("gelu_pytorch_tanh", 1e-6)
    config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "model.json").unlink()
    report = convert_checkpoint(str(tmp_path / "hf"), str(tmp_path / "b.npz"), format="npz")
    assert len(report["notes"]) == 2
    again = load_model(tmp_path / "b.npz").description.model  # ours reads it beside the file
    assert (again["gelu"], again["layer_norm_epsilon"]) == ("exact", 1e-12)


def test_destinations_that_do_not_go(tmp_path: Path) -> None:
    source = str(seeded_file(tmp_path))
    (tmp_path / "there.npz").write_text("mine")
    (tmp_path / "there.x.json").write_text("mine")
    for name, format, message in (
        ("there.npz", "npz", "exists"),
        ("new.npz", "timm", "writes a folder"),
        ("there.x.npz", "npz", "there.x.json exists"),
        ("new", "tensorflow", r"--format='tensorflow'.*Known: npz"),
    ):
        with pytest.raises(UserError, match=message):
            convert_checkpoint(source, str(tmp_path / name), format=format)
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_the_command(tmp_path: Path, script: tiny.Script) -> None:
    source = seeded_file(tmp_path)
    command = ["convert_checkpoint.py", "--format=timm", "--json"]
    result = script(*command, str(source), str(tmp_path / "t"))
    assert json.loads(result.stdout)["format"] == "timm"  # stdout holds nothing else
    broken = tmp_path / "broken.npz"
    broken.write_bytes(source.read_bytes()[:1000])
    result = script(*command, str(broken), str(tmp_path / "u"))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "u").exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_model(tmp_path / "photos", class_names=("ant", "bee | wasp", "cat"))


def card(target: Path, model: Model, format: str = "npz", **kwargs: Any) -> str:
    write_card(target, model, format, {"tolerance": 1e-5, "unit": "in the logits"}, **kwargs)
    path = target / "README.md" if target.is_dir() else target.with_suffix(".md")
    return path.read_text(encoding="utf-8")


def front(text: str) -> Any:
    return yaml.safe_load(text.split("---\n")[1])


def run_lines(text: str) -> Any:
    """The logits that the lines of a card compute."""
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["logits"]


def test_beside_a_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(saved)
    (saved / "params.npz").rename(tmp_path / "mine.npz")
    (saved / "model.json").rename(tmp_path / "mine.json")
    text = card(tmp_path / "mine.npz", model)
    assert str(tmp_path) not in text
    assert text.split("---\n")[2].startswith("# mine\n")
    monkeypatch.chdir(tmp_path)
    black = np.zeros((1, 16, 16, 3), np.float32)
    expected = model.module.apply({"params": model.params}, black, train=False)
    np.testing.assert_array_equal(run_lines(text), expected)


def test_in_a_folder(saved: Path) -> None:
    spec = "decode|normalize(0.5, 0.25)"
    model = load_model(saved)
    description = dataclasses.replace(model.description, eval_preprocess=spec)
    report = {"reset": [], "loaded": ["cls", "head"], "adapted": {}, "dropped": {"b": "a buffer"}}
    changed = dataclasses.replace(model, description=description, report=report)
    text = card(saved, changed, format="timm", facts={"Computes in": "float32"})
    assert front(text) == {
        "license": "unknown",
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["vit_jax"],
    }
    num_parameters = sum(x.size for x in np.load(saved / "params.npz").values())
    pixels = "black is -2, -2, -2, white is 2, 2, 2"
    for line in (
        f"- Input: float32 [batch, 16, 16, 3] (height, width, channels), {pixels}",
        f"- Preprocessing: `{spec}`",
        "- Classes: 3, with 3 names in the JSON file",
        f"- Parameters: {num_parameters:,}",
        "- `gelu`: `tanh`",
        "- Computes in: float32",
        "- Checked: read back, it differed from vit_jax by at most 1e-05 in the logits",
        "- Made from: `photos`",
        "- loaded: 2 arrays unchanged",
        "- dropped: b (a buffer)",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(("format", "classes"), [("timm", 3), ("timm", 0), ("huggingface", 3)])
def test_lines_for_other_libraries(format, classes, tmp_path, monkeypatch):
    import_timm()
    import_transformers()
    model = load_model(save_model(tmp_path / "a", num_classes=classes, image_size=32, scale=0.2))
    convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), format=format)
    expected = weights.logits(model.module, model.params, np.zeros((1, 32, 32, 3), np.float32))
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "b" / "README.md").read_text()
    assert "vit_jax" not in text.split("```")[1]
    np.testing.assert_allclose(run_lines(text).detach().numpy(), expected, atol=1e-5)


def test_what_is_not_known_is_said_to_be_unknown(saved: Path, tmp_path: Path) -> None:
    text = card(tmp_path, load_model(save_model(tmp_path / "a")))
    assert front(text)["pipeline_tag"] == "image-feature-extraction"
    assert "\n- Classes: none: no head\n" in text
    assert "\n- Published as: not known\n- Published accuracy: not known\n" in text
    entry = next(row for row in entries().values() if row.accuracy)
    text = card(saved, dataclasses.replace(load_model(saved), source=entry.name))
    assert f"\n- Published as: `{entry.name}` at {entry.url}" in text
    assert f"\n- Published accuracy: {entry.accuracy[0]}" in text


def test_timms_name_of_the_closest_model() -> None:
    """It is read by people; `model_args` have all sizes."""
    for variant, name in (("Ti/16", "tiny_patch16"), ("H/14", "huge_patch14")):
        assert timm_write._architecture(get_variant(variant)) == f"vit_{name}_224"
    unusual = {**get_variant("S/16"), "num_layers": 3}
    assert timm_write._architecture(unusual) == "vit_base_patch16_224"
