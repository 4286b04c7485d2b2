"""Model cards say what is known, and only that."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.peers import import_timm, import_transformers
from tests.saved_models import save_model
from vit_jax.export.card import CARD_FORMATS, write_card
from vit_jax.export.convert import FORMAT_NAMES, convert_checkpoint
from vit_jax.export.write import TOLERANCES
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.create import MODELS
from vit_jax.models.variants import VARIANTS, get_variant
from vit_jax.pretrained.zoo.entries import entries
from vit_jax.workdir.description import Description

CLASSES = ("ant", "bee | wasp", "cat")
UNCHANGED = {"loaded": ["cls"], "adapted": {}, "reset": [], "dropped": {}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_model(tmp_path / "photos", class_names=CLASSES)


def card(target: Path, model: Model, format: str = "npz", **kwargs: Any) -> str:
    return write_card(target, model, format, **kwargs).read_text(encoding="utf-8")


def bare(description: Description, source: str) -> Model:
    """A model without parameters."""
    return Model(None, {}, description, "npz", source, UNCHANGED)


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0].strip()


def test_beside_a_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(saved)
    (saved / "params.npz").rename(tmp_path / "mine.npz")
    (saved / "model.json").rename(tmp_path / "mine.json")
    text = card(tmp_path / "mine.npz", model)
    assert text == (tmp_path / "mine.md").read_text()
    assert str(tmp_path) not in text  # and no date either: the same card tomorrow
    assert text == card(tmp_path / "mine.npz", model)
    assert text.split("---\n")[2].startswith("# mine\n")
    # The lines that load it.
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", section(text, "Use"), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    black = np.zeros((1, 16, 16, 3), np.float32)
    expected = model.module.apply({"params": model.params}, black, train=False)
    np.testing.assert_array_equal(namespace["logits"], expected)


def test_in_a_folder(saved: Path) -> None:
    model = load_model(saved)
    text = card(saved, model, format="timm", facts={"Batch size": "free"})
    assert text == (saved / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "unknown"
    assert front["library_name"] == "timm"
    assert front["pipeline_tag"] == "image-classification"
    assert "vision-transformer" in front["tags"]
    num_parameters = sum(x.size for x in np.load(saved / "params.npz").values())
    assert f"| Parameters | {num_parameters:,} |" in text
    assert "| Image | 16 x 16 pixels (height x width), 3 channels |" in text
    assert "| `gelu` | `tanh` |" in text
    assert "| `layer_norm_epsilon` | `1e-06` |" in text
    assert "| Batch size | free |" in text
    assert section(text, "Classes") == '3, by index: 0 "ant", 1 "bee | wasp", 2 "cat".'


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_lines_for_other_libraries(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_timm()
    import_transformers()
    save_model(tmp_path / "a", num_classes=3, image_size=32, scale=0.2)
    convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), format=format)
    model = load_model(tmp_path / "a")
    expected = model.module.apply(
        {"params": model.params}, np.zeros((1, 32, 32, 3), np.float32), train=False
    )
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (tmp_path / "b/README.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert "vit_jax" not in code
    np.testing.assert_allclose(namespace["logits"].detach().numpy(), expected, atol=1e-5)


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path / "a", num_classes=4))
    text = card(tmp_path / "a", model)
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "unknown"
    assert section(text, "Classes") == "4; their names are unknown."
    headless = load_model(save_model(tmp_path / "b"))
    text = card(tmp_path / "b", headless)
    assert "pipeline_tag" not in yaml.safe_load(text.split("---\n")[1])
    assert section(text, "Classes") == "None: no head."


@pytest.mark.parametrize(
    ("ops", "then"),
    [
        (
            "decode(exif=False)|resize_small(20, method='bicubic')|central_crop(16)",
            ", then `pixels / 127.5 - 1`",
        ),
        ("decode|normalize(0.5, 0.25)", ""),
    ],
)
def test_preprocessing(tmp_path: Path, ops: str, then: str) -> None:
    model = load_model(save_model(tmp_path / "a", num_classes=4, eval_preprocess=ops))
    text = section(card(tmp_path / "a", model), "Input")
    assert text.endswith(f"\n\nPreprocessing: `{ops}`{then}.")


def test_published_results(tmp_path: Path) -> None:
    entry = next(row for row in entries().values() if row.accuracy and row.variant == "S/16")
    side = entry.resolution
    grid = (side // 16, side // 16)
    description = Description(entry.model, (side, side, 3), grid, (), entry.preprocess)
    origin = section(card(tmp_path, bare(description, entry.name)), "Origin")
    assert entry.url in origin
    assert f"accuracy at {side} pixels: {entry.accuracy[0]}." in origin


def test_what_became_of_the_arrays(saved: Path) -> None:
    report = {
        **UNCHANGED,
        "loaded": ["cls", "head"],
        "adapted": {"a": "bilinear 2x2 -> 3x3"},
        "dropped": {"b": "a buffer"},
    }
    text = section(card(saved, dataclasses.replace(load_model(saved), report=report)), "Origin")
    assert text.startswith("Made from `photos`.\n\n- loaded: 2 arrays as they are\n")
    assert "- adapted: a (bilinear 2x2 -> 3x3)\n- dropped: b (a buffer)\n" in text


def test_every_format_has_a_card(saved: Path) -> None:
    assert set(CARD_FORMATS) == {*FORMAT_NAMES, *TOLERANCES}
    model = load_model(saved)
    for format, (library, _) in CARD_FORMATS.items():
        text = card(saved, model, format)
        assert yaml.safe_load(text.split("---\n")[1])["library_name"] == library
    assert json.loads((saved / "model.json").read_text())  # nothing else was touched


def test_every_kind_of_model_has_a_card(tmp_path: Path) -> None:
    for variant, kind in {
        "Ti/16": "A Vision Transformer",
        "R+Ti/16": "A hybrid of ResNet and Vision Transformer",
        "DeiT-distilled-Ti/16": "A distilled Vision Transformer",
        "R50x1": "A pre-activation ResNet",
    }.items():
        sizes = {**get_variant(variant), "num_classes": 3}
        description = Description(sizes, (32, 32, 3), (2, 2), (), "")
        assert kind in card(tmp_path, bare(description, "mine"))
    assert {get_variant(name)["name"] for name in VARIANTS} == set(MODELS)


def test_the_hub_reads_the_card(saved: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(card(saved, load_model(saved), format="huggingface")).data
    assert (data.license, data.library_name) == ("unknown", "transformers")
    assert data.tags == ["image-classification", "vision-transformer", "vit_jax"]
