"""Model cards say what is known, and only that."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from tests.saved_models import save_model
from vit_jax.export.card import write_card
from vit_jax.export.convert import convert_checkpoint
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.pretrained.zoo.entries import entries


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
    assert str(tmp_path) not in text  # and no date either: the same card tomorrow
    assert text == card(tmp_path / "mine.npz", model)
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


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_lines_for_other_libraries(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_timm()
    import_transformers()
    model = load_model(save_model(tmp_path / "a", num_classes=3, image_size=32, scale=0.2))
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
