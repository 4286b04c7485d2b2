"""A Python function as an op: what it is given, mistakes in it, and that no file makes it run."""

import json
import pickle
import sys

import numpy as np
import pytest

from tests.saved_models import save_model
from tests.tiny import config
from vit_jax.data.datasets import create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.inference.images import at_image_size
from vit_jax.inference.load import load_model
from vit_jax.pretrained.adopt import adopt

SOURCE = """
import pathlib
import numpy as np

pathlib.Path(__file__).with_name("imported").touch()

def noise(most, *, offset=0):
    def op(image, rng):
        image += np.uint8(offset)
        return image + rng.integers(0, most, image.shape, np.uint8)
    return op

def three():
    return 3

def late():
    return lambda image, rng: 1 / 0

def to_text():
    return lambda image, rng: "an image"

def to_doubles():
    return lambda image, rng: image / 255

def broken():
    raise RuntimeError("no weights\\nfound")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current folder, which is not on the path."""
    name = f"ops_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return name


def test_a_function_of_the_current_folder_is_an_op(module, tmp_path):
    spec = f"decode|{module}.noise(9, offset=2)|resize(6)"
    chain = parse(spec)
    assert not (tmp_path / "imported").exists()
    assert f"PythonOp(call='{module}.noise(9, offset=2)')" in repr(chain)
    image = np.zeros((8, 8, 3), np.uint8)
    one, other = (chain({"image": image}, np.random.default_rng(s))["image"] for s in (0, 1))
    assert one.shape == (6, 6, 3)
    assert one.min() >= 2
    assert image.max() == 0  # the function works on a copy
    assert not np.array_equal(one, other)
    again = pickle.loads(pickle.dumps(chain))  # after the function was made
    assert again == chain
    again_one = again({"image": image}, np.random.default_rng(0))["image"]
    np.testing.assert_array_equal(again_one, one)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("nowhere.op(3)", r"nowhere.op\(3\) cannot be used \(ModuleNotFoundError: No module named"),
        ("MODULE.typo", "cannot be used .*has no attribute 'typo'"),
        ("MODULE.noise()", "cannot be used .*missing 1 required positional argument: 'most'"),
        ("MODULE.broken()", r"cannot be used \(RuntimeError: no weights found\); .* PYTHONPATH"),
        ("MODULE.three()", r"MODULE.three\(\) gives no function \(image, rng\)"),
    ],
)
def test_what_cannot_be_made_is_said_before_the_data_are_opened(module, call, message):
    with pytest.raises(UserError, match=message.replace("MODULE", module)) as caught:
        create_dataset(
            name="/nowhere", split="train", preprocess=f"decode|{call.replace('MODULE', module)}"
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("to_text", r"to_text gives <U8 \[\]; it must be uint8"),
        ("to_doubles", r"to_doubles gives float64 \[8, 8, 3\]; it must be uint8 or float32"),
    ],
)
def test_what_is_no_image_is_said(module, function, message):
    data = create_dataset(name="digits", split="train", preprocess=f"decode|{module}.{function}")
    with pytest.raises(UserError, match=message):
        _ = data.element_spec


def test_no_description_makes_us_import(module, tmp_path):
    """Whoever wrote a model's files: loading, resizing and fine-tuning do not run their code."""
    spec = f"decode|resize(16)|{module}.noise(9)"
    source = save_model(tmp_path / "m", class_names=("a", "b"), eval_preprocess=spec)
    assert json.loads((source / "model.json").read_text())["eval_preprocess"] == spec
    with pytest.raises(UserError, match=r"m: its preprocessing runs .*noise\(9\).* --preprocess="):
        load_model(source)
    adopt(config(pretrained__source=str(source)), str(tmp_path / "w"))
    assert not (tmp_path / "imported").exists()

    model = load_model(source, preprocess=spec)
    assert at_image_size(model.description, (32, 32)).eval_preprocess.endswith("noise(9)")
    assert not (tmp_path / "imported").exists()
    assert model.logits(np.zeros((1, 16, 16, 3), np.uint8)).shape == (1, 2)
    assert (tmp_path / "imported").exists()
