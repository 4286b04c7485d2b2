"""What `import vit_jax` gives."""

import pickle
import subprocess
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests import tiny
from tests.data.test_memory import Series
from tests.saved_models import save_model
from vit_jax import config, wording
from vit_jax.errors import UserError


class Tensor:
    """An array of another library, of which only the number of axes and `[i]` are known."""

    def __init__(self, pixels: np.ndarray):
        self._pixels, self.ndim = pixels, pixels.ndim

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> "Tensor":
        return Tensor(self._pixels[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._pixels, dtype)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("face")
    save_model(folder / "run", class_names=tuple("0123456789"))
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def model(workdir: Path) -> Any:
    return vit_jax.load_model(workdir / "run")


def test_nothing_is_imported_before_it_is_used() -> None:
    program = "import sys, vit_jax; dir(vit_jax); print({'jax', 'numpy'} & set(sys.modules))"
    output = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=tiny.ROOT)
    assert output.strip() == "set()"


def test_every_name_is_there() -> None:
    for name in vit_jax.__all__:
        assert callable(getattr(vit_jax, name))
    assert sorted(dir(vit_jax)) == sorted(vit_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        vit_jax.load_modle  # noqa: B018


def test_a_variant_is_a_model() -> None:
    row = vit_jax.get_variant("R50+B/16")
    expected = vit_jax.create_model(**{**row, "gelu": "exact"}, num_classes=10)
    assert vit_jax.create_model("R50+B/16", num_classes=10, gelu="exact") == expected
    assert vit_jax.create_model("R50x1", num_classes=10).name is None
    with pytest.raises(UserError, match=r"unknown model 'B/17'\. Did you mean"):
        vit_jax.create_model("B/17", num_classes=10)
    with pytest.raises(UserError, match="unknown model ''") as error:
        vit_jax.create_model("", num_classes=10)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("vit_base_patch16_224", "B/16"),
        ("google/vit-base-patch16-224", "B/16"),
        ("ViT-L_32", "L/32"),
        ("deit_small_distilled_patch16_224", "DeiT-distilled-S/16"),
        ("resnetv2_50x1_bit.goog_in21k", "R50x1"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, variant: str) -> None:
    with pytest.raises(UserError, match=rf"unknown model '{name}'\. Did you mean '{variant}'"):
        vit_jax.create_model(name)
    with pytest.raises(UserError, match="create_model needs num_classes"):
        vit_jax.create_model(variant)
    for known in {name, variant} - {"google/vit-base-patch16-224"}:
        with pytest.raises(UserError, match=f"--variant={variant}|Did you mean '.*{name}"):
            vit_jax.load_model(known)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("optimizer.lr", "Here it is schedule.learning_rate"),
        ("epochs", "Did you mean 'duration.epochs'"),
        ("image_size", "Here it is a number in dataset.preprocess"),
    ],
)
def test_keys_of_other_libraries_lead_to_ours(key: str, ours: str) -> None:
    with pytest.raises(UserError, match=ours):
        vit_jax.get_config("", f"{key}=1")


def short_traceback(error: BaseException) -> list[str]:
    """Files of the frames, after those of the test."""
    names = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return [name for name in names if name != Path(__file__).name]


def test_errors_come_from_the_callers_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        lambda: vit_jax.load_model("/nowhere"),
        lambda: vit_jax.get_config("configs/finetune.py:B16,cifar10"),
        lambda: vit_jax.train_and_evaluate(vit_jax.get_config(), ""),
        lambda: model.predict("/nowhere.jpg"),
    ]
    for call in calls:
        with pytest.raises(UserError) as error:
            call()
        assert short_traceback(error.value) == ["errors.py"]
        assert error.value.__cause__ is None
        assert error.value.__suppress_context__
    monkeypatch.setenv("VIT_LOG_LEVEL", "debug")
    with pytest.raises(UserError) as error:
        vit_jax.load_model("/nowhere")
    assert "resolve.py" in short_traceback(error.value)
    assert pickle.loads(pickle.dumps(vit_jax.load_model)) is vit_jax.load_model


RECIPE = """
from configs import finetune
from configs.mine import RATE

def get_config():
    config = finetune.get_config("Ti/16,cifar10")
    config.schedule.learning_rate = RATE
    return config
"""


@pytest.mark.parametrize("folder", ["configs", "recipes"])
def test_a_project_may_have_a_package_configs_of_its_own(folder, tmp_path, monkeypatch):
    theirs = ModuleType("configs")
    theirs.__path__ = [str(tmp_path / "configs")]
    theirs.__spec__ = ModuleSpec("configs", None, is_package=True)
    for file in ("configs/__init__.py", "configs/mine.py", f"{folder}/own.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(RECIPE if "own" in file else "RATE = 0.5\n")
    for name in [name for name in sys.modules if name.startswith("configs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "configs", theirs)
    monkeypatch.syspath_prepend(tmp_path)
    paths = list(sys.path)
    assert vit_jax.get_config("configs/photos.py:Ti/16,/x").dataset.name == "/x"
    # A recipe of the project imports ours and its own.
    config = vit_jax.get_config(str(tmp_path / folder / "own.py"))
    assert (config.dataset.name, config.schedule.learning_rate) == ("cifar10", 0.5)
    assert {name for name in sys.modules if name.startswith("configs")} == {"configs"}
    assert sys.modules["configs"] is theirs
    assert not hasattr(theirs, "finetune")
    assert sys.path == paths


def test_names_elsewhere_are_of_keys_that_exist() -> None:
    known = config.flatten(vit_jax.get_config())
    for key in wording.NAMES_ELSEWHERE:
        assert key in known or " " in key


def test_a_model_says_what_it_is(model: Any) -> None:
    text = repr(model)
    count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert text.startswith("Model(")
    assert f"{count:,} parameters, images 16x16x3, tokens 2x2, 10 outputs" in text
    assert len(text) < 300
    first, second, third = str(model).splitlines()
    assert first.startswith("Vision Transformer from ")
    assert second.endswith("10 outputs: 0, 1, 2 and 7 more")
    assert third == f"  preprocessing: {model.description.eval_preprocess}"


def test_names_of_models() -> None:
    every = vit_jax.list_models()
    assert len(every) > 50
    some = vit_jax.list_models("*vit-l_16*")
    assert 0 < len(some) < len(every)
    assert all("ViT-L_16" in name for name in some)


def test_the_same_image_in_every_form(workdir: Path, model: Any) -> None:
    path = workdir / "a.png"
    pixels = np.array(Image.open(path))
    expected = model.logits(str(path))
    assert expected.shape == (1, 10)
    for image in (
        path,
        path.read_bytes(),
        Image.open(path),
        pixels,
        [pixels],
        model.preprocess(path),
    ):
        np.testing.assert_array_equal(model.logits(image), expected)
    grey = pixels[:, :, 0]
    np.testing.assert_array_equal(
        model.logits(grey), model.logits(np.repeat(grey[:, :, None], 3, axis=2))
    )


def test_the_best_classes(workdir: Path, model: Any) -> None:
    paths = [workdir / f"{name}.png" for name in ("a", "b", "c")]
    predictions = model.predict(paths, top=3)
    probabilities = np.asarray(jax.nn.softmax(model.logits(paths)))
    for rows, row in zip(predictions, probabilities, strict=True):
        best = np.argsort(-row)[:3]
        assert [name for name, _ in rows] == [model.class_names[i] for i in best]
        np.testing.assert_allclose([p for _, p in rows], row[best], rtol=1e-5)
    assert model.predict(str(paths[0]), top=3) == predictions[0]
    assert {name for name, _ in model.predict(paths[0], top=10)} == set(model.class_names)


def test_attention_and_features_in_batches(workdir: Path, model: Any) -> None:
    paths = [workdir / f"{name}.png" for name in ("a", "b", "c")]
    attention = model.attention(paths, batch_size=2)
    assert attention.shape == (1, 3, 2, 5, 5)  # layers, images, heads
    np.testing.assert_allclose(attention.sum(axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(model.attention(paths[2]), attention[:, 2:], rtol=1e-5)
    inside = model.look(paths, ["query", "tokens"])
    assert {name: array.shape for name, array in inside.items()} == {
        "query": (1, 3, 5, 2, 8),
        "tokens": (1, 3, 5, 16),
    }
    tokens = model.features(paths, "block_0_tokens", batch_size=2)
    np.testing.assert_allclose(tokens, inside["tokens"][0], rtol=1e-5, atol=1e-6)
    assert model.features(paths, "cls").shape == (3, 16)


def test_a_batch_is_one_array(model: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), np.uint8)
    expected = model.predict(list(pixels))
    assert model.predict(pixels) == expected
    assert model.predict(model.preprocess(pixels)) == expected
    assert model.predict(pixels[:1]) == expected[:1]


def test_images_are_predicted_by_place(workdir: Path, model: Any) -> None:
    paths = [str(workdir / f"{name}.png") for name in ("a", "b", "c")]
    expected = model.predict(paths)
    rows = Series(paths, [2, 0, 1])  # as a table that was shuffled
    assert model.predict(rows) == model.predict(np.array(paths)) == expected
    np.testing.assert_array_equal(model.features(rows), model.features(paths))
    np.testing.assert_array_equal(model.preprocess(rows), model.preprocess(paths))
    batch = np.zeros((2, 8, 8, 3), np.uint8)
    assert model.predict(Tensor(batch)) == model.predict(batch)
    for images in (dict(enumerate(paths)), set(paths), iter(paths)):
        with pytest.raises(UserError, match="is no sequence; pass a list"):
            model.predict(images)


def test_a_photograph_of_pillow_is_turned_upright_as_its_file_is(tmp_path, model):
    path, exif = tmp_path / "photo.jpg", Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    expected = model.preprocess(path)
    np.testing.assert_array_equal(model.preprocess(Image.open(path)), expected)
    stored = np.asarray(Image.open(path))
    assert (model.preprocess(stored) != expected).any()


def test_what_is_no_image_is_one_line(workdir: Path, model: Any) -> None:
    with pytest.raises(UserError, match="run: "):
        model.predict(workdir / "run")
    with pytest.raises(UserError, match=r"image 1: an image must be uint8 .*float64"):
        model.predict([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3))])
    with pytest.raises(UserError, match=r"image 0: a Pillow image of mode I;16 .*; pass its path"):
        model.predict(Image.fromarray(np.zeros((4, 4), np.uint16)))
    with pytest.raises(UserError, match=r"\[B, 16, 16, 3\], -1 to 1, not \[16, 16, 3\]"):
        model.predict(np.zeros((16, 16, 3)))
    for value in (255.0, np.nan):
        with pytest.raises(UserError, match=r"-1 to 1, not \[1, 16, 16, 3\], .*uint8 pixels"):
            model.predict(np.full((1, 16, 16, 3), value))
    with pytest.raises(UserError, match="no images given"):
        model.predict([])
    with pytest.raises(UserError, match="this model has no 'blok_0'"):
        model.features(workdir / "a.png", "blok_0")


ODD = [None, {"a": 1}, [None], 2.5, b"x", object(), ["\x1b[31m"], np.zeros(3), True]


@pytest.mark.parametrize(
    "call",
    [
        lambda _, x: vit_jax.load_model(x),
        lambda _, x: vit_jax.load_model("missing.npz", image_size="none" if x is None else x),
        lambda _, x: vit_jax.get_config("configs/digits.py", x),
        lambda _, x: vit_jax.create_model(x, num_classes=3),
        lambda _, x: vit_jax.create_model("Ti/16", num_classes=3, dropout_rate=x),
        lambda _, x: vit_jax.list_models(x),
        lambda _, x: vit_jax.train_and_evaluate(x, "never"),
        lambda _, x: vit_jax.train_and_evaluate(
            vit_jax.get_config(), "never", dataset={"train": x}
        ),
        lambda _, x: vit_jax.visualize("missing.npz", x),
        lambda _, x: vit_jax.look(x, {}, np.zeros((1, 8, 8, 3))),
        lambda _, x: vit_jax.load_pretrained(x, like={}, kind="vit"),
        lambda model, x: model.predict(x),
        lambda model, x: model.answers(x),
        lambda model, x: model.look([], what=x),
        lambda model, x: model.open_dataset(name=x, split="train"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(model: Any, call: Any) -> None:
    for odd in ODD:
        with pytest.raises(UserError) as caught:
            call(model, odd)
        assert str(caught.value).isprintable()


def test_kinds_that_mean_the_same_are_taken(workdir: Path) -> None:
    for size in (np.int64(8), [8, 8], np.array([8, 8])):
        model = vit_jax.load_model(workdir / "run", image_size=size)
        assert model.description.image_shape == (8, 8, 3)
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        model = vit_jax.load_model(workdir / "run", dtype=dtype)
        assert model.module.dtype == vit_jax.create_model("Ti/16", num_classes=1, dtype=dtype).dtype
    recipe = vit_jax.get_config(tiny.ROOT / "configs/quickstart.py", "duration.steps=3")
    assert recipe.duration.steps == 3
    table = workdir / "photos.csv"
    table.write_text("path,label\na.png,0\nb.png,1\nc.png,1\n")
    assert model.open_dataset(name=table, split="train+test").num_examples == 3
    assert vit_jax.visualize(workdir / "run", [workdir / "a.png"], output=workdir / "pictures")
    width = model.without_head().features(workdir / "a.png").shape[-1]
    no_scale = SimpleNamespace(similarity=None)
    texts = SimpleNamespace(features=lambda t, _: np.eye(len(t), width), description=no_scale)
    assert model.without_head().with_classes(np.array(["a", "b"]), ("{}",), texts).num_outputs == 2
    with pytest.raises(TypeError, match="convert_checkpoint.. missing"):
        vit_jax.convert_checkpoint("a", "b")  # Python's own message is clear
