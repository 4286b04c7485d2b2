"""Any format to any other, and the tour through all of them and the peers' own loaders."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import golden, tiny
from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.export.convert import FORMAT_NAMES, convert_checkpoint, input_settings
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.arrays import read_arrays
from vit_jax.pretrained.formats import google
from vit_jax.pretrained.formats.timm_config import crop_pct
from vit_jax.trees import flatten_names, unflatten_names

IMAGES = golden.images(2, 32, 32)
FOLDERS = ("timm", "huggingface", "orbax")


def seeded_file(folder: Path, image_shape: tuple[int, ...] = (32, 32, 3), **sizes: Any) -> Path:
    module = create_model(**weights.SMALL, num_classes=7, **sizes)
    return write_arrays(folder / "a.npz", weights.seeded(module, image_shape))


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    module = create_model(**weights.SMALL, num_classes=7)
    params = weights.seeded(module, (32, 32, 3))
    params[POSITIONS][:, 0] = 0  # else big_vision folds it into the class token
    return params


@pytest.fixture(scope="module")
def sources(
    params: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same parameters in every format."""
    folder = tmp_path_factory.mktemp("sources")
    first = write_arrays(folder / "first.npz", google.to_published(params))
    found = {}
    for name in FORMAT_NAMES:
        found[name] = folder / (name if name in FOLDERS else f"{name}.npz")
        convert_checkpoint(str(first), str(found[name]), format=name)
    return found


@pytest.mark.parametrize("source", FORMAT_NAMES)
def test_every_format_is_read_and_written(
    source: str, sources: dict[str, Path], params: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Each to the next one: what is read knows no format, so any goes to any other."""
    name = FORMAT_NAMES[FORMAT_NAMES.index(source) - 1]
    target = tmp_path / (name if name in FOLDERS else f"{name}.npz")
    report = convert_checkpoint(str(sources[source]), str(target), format=name)
    assert report["source_format"] == source
    assert report["parameters_identical"]
    assert report["max_difference"] == 0.0
    assert all(Path(file).is_file() for file in report["files"])
    json.dumps(report)
    found = load_model(target)
    assert found.format == name
    assert found.description == load_model(sources[source]).description
    flat = flatten_names(found.params)
    assert flat.keys() == params.keys()
    assert all((flat[each] == array).all() for each, array in params.items())


def test_the_tour(tmp_path: Path) -> None:
    """npz -> ours -> timm -> ours -> Hugging Face -> ours -> npz, through the peers' own code.

    timm and Hugging Face load what we wrote, compute, and save it again; we read what they saved.
    Parameters stay bit-identical, and logits within 1e-5 (the noise between JAX and PyTorch).
    """
    timm, transformers = import_timm(), import_transformers()
    module = weights.module_of("Ti/16", num_layers=2)
    start = weights.seeded(module, (64, 64, 3))
    images = golden.images(2, 64, 64)
    expected = weights.logits(module, unflatten_names(start), images)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())

    def check(logits: Any) -> None:
        np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=1e-5)

    first = write_arrays(tmp_path / "first.npz", google.to_published(start))
    convert_checkpoint(str(first), str(tmp_path / "ours.npz"), format="npz", num_heads=3)
    convert_checkpoint(str(tmp_path / "ours.npz"), str(tmp_path / "timm"), format="timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        check(model(pixels))
    torch.save(model.state_dict(), tmp_path / "timm" / "saved.pth")
    shutil.move(tmp_path / "timm" / "saved.pth", tmp_path / "saved.pth")

    # A bare state dict does not say which GELU: timm's default is the exact one.
    loaded = load_model(tmp_path / "saved.pth", num_heads=3)
    assert loaded.description.model["gelu"] == "exact"
    check(weights.logits(module, loaded.params, images))
    convert_checkpoint(str(tmp_path / "timm"), str(tmp_path / "hf"), format="huggingface")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        check(model(pixel_values=pixels).logits)
    model.save_pretrained(tmp_path / "hf_saved")
    loaded = load_model(tmp_path / "hf_saved")
    assert loaded.description.model["gelu"] == "tanh"  # its config.json says so
    check(weights.logits(loaded.module, loaded.params, images))
    last = tmp_path / "last.npz"
    convert_checkpoint(str(tmp_path / "hf_saved"), str(last), format="npz_published")
    end, begin = read_arrays(last), read_arrays(first)
    assert end.keys() == begin.keys()
    for name, array in begin.items():
        np.testing.assert_array_equal(end[name], array, err_msg=name, strict=True)


def test_the_class_tokens_position_moves_into_it(tmp_path: Path) -> None:
    source = str(seeded_file(tmp_path))
    report = convert_checkpoint(source, str(tmp_path / "b.npz"), format="big_vision")
    assert not report["parameters_identical"]
    assert report["max_difference"] <= 1e-5


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


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rectangles_in_every_format(name: str, tmp_path: Path) -> None:
    """What we write beside the weights tells their grid, also where the positions do not."""
    source = str(seeded_file(tmp_path, (32, 48, 3)))
    target = tmp_path / (name if name in FOLDERS else f"{name}.npz")
    convert_checkpoint(source, str(target), format=name, grid=(4, 6))
    assert load_model(target).description.grid == (4, 6)
    again = tmp_path / "again.npz"
    report = convert_checkpoint(str(target), str(again), format="npz", image_size=(48, 64))
    assert report["arrays"]["adapted"][POSITIONS].endswith("bilinear 4x6 -> 6x8")
    description = load_model(again).description
    assert (description.image_shape, description.grid) == ((48, 64, 3), (6, 8))


@pytest.mark.parametrize("name", ["npz", "timm", "huggingface"])
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
    sizes = {**weights.SMALL, "classifier": "gap", "position_embedding": "sincos2d"}
    params = weights.seeded(create_model(**sizes, num_classes=7), (32, 32, 3))
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
    found, _ = input_settings(load_model(tmp_path / "timm").description)
    meant, _ = input_settings(described)
    assert (found.resize, found.method) == (meant.resize, meant.method)
    assert found.crop in (meant.crop, None)
    assert (*found.mean, *found.std) == pytest.approx((*meant.mean, *meant.std))


def test_every_size_of_a_crop_comes_back() -> None:
    for size, resized in ((224, 256), (384, 450), (384, 462), (384, 472), (384, 501), (240, 357)):
        assert math.floor(size / crop_pct(size, resized)) == resized


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


def test_destinations_that_do_not_go(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "there.npz").write_text("mine")
    (tmp_path / "there.x.json").write_text("mine")
    for name, format, message in (
        ("there.npz", "npz", "exists"),
        ("new.npz", "timm", "writes a folder"),
        ("there.x.npz", "npz", "there.x.json exists"),
        ("new", "tensorflow", r"--format='tensorflow'.*Known: npz"),
    ):
        with pytest.raises(UserError, match=message):
            convert_checkpoint(str(sources["npz"]), str(tmp_path / name), format=format)
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_the_command(sources: dict[str, Path], tmp_path: Path, script: tiny.Script) -> None:
    command = ["convert_checkpoint.py", "--format=timm", "--json"]
    result = script(*command, str(sources["npz"]), str(tmp_path / "t"))
    assert json.loads(result.stdout)["format"] == "timm"  # stdout holds nothing else
    broken = tmp_path / "broken.npz"
    broken.write_bytes(sources["npz"].read_bytes()[:1000])
    result = script(*command, str(broken), str(tmp_path / "u"))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "u").exists()
