"""Features: each one recomputed from another by the model's own equations, and the file."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import fixtures_data
from tests.saved_models import save_model
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.inference.features import _write_rows, extract_features
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.models.features import available_features, check_features, feature_function
from vit_jax.models.vit import BlockConfig, Encoder1DBlock, MAPHead
from vit_jax.objectives.objective import scale_images

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)

MODELS: dict[str, dict[str, Any]] = {
    "pre-trained": {"representation_size": 12},
    "gap": {"classifier": "gap", "position_embedding": "sincos2d"},
    "map": {"classifier": "map", "gelu": "exact"},
    "deit": {"name": "deit", "gelu": "exact"},
}


def features_of(model: Model, names: list[str]) -> dict[str, np.ndarray]:
    function = jax.jit(feature_function(model.module, names))
    values = function(model.params, scale_images(IMAGES))
    assert set(values) == set(names)
    assert all(value.dtype == jnp.float32 for value in values.values())
    return jax.device_get(values)


def apply(module: nn.Module, params: Any, x: Any, **options: Any) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(module.apply, **options))({"params": params}, x))


def close(actual: Any, expected: Any) -> None:
    """Float32, sums of some ten products; XLA may fuse the two computations differently."""
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_feature_from_the_one_before(name: str, tmp_path: Path) -> None:
    model = load_model(
        save_model(tmp_path / "m", class_names=("a", "b"), num_layers=2, **MODELS[name])
    )
    module, params = model.module, model.params
    names = available_features(module)
    features = features_of(model, names)

    block = Encoder1DBlock(BlockConfig.of(module))
    encoder = params["Transformer"]
    after = apply(block, encoder["encoderblock_1"], features["block_0_tokens"], train=False)
    close(features["block_1_tokens"], after)
    norm = nn.LayerNorm(epsilon=1e-6)
    close(features["tokens"], apply(norm, encoder["encoder_norm"], after))

    prefix = len(module.prefix_tokens)
    assert features["tokens"].shape == (2, 4 + prefix, 16)
    close(features["gap"], features["tokens"][:, prefix:].mean(axis=1))
    for position, token in enumerate(module.prefix_tokens):
        close(features[token], features["tokens"][:, position])
    for number in (0, 1):
        tokens = features[f"block_{number}_tokens"]
        close(features[f"block_{number}"], tokens[:, 0] if prefix else tokens.mean(axis=1))

    def head(x: np.ndarray, name: str = "head") -> np.ndarray:
        return x @ params[name]["kernel"] + params[name]["bias"]

    if name == "deit":
        assert "pre_logits" not in names
        close(features["logits"], (head(features["cls"]) + head(features["dist"], "head_dist")) / 2)
        return
    close(features["logits"], head(features["pre_logits"]))
    if name == "map":
        pool = MAPHead(BlockConfig.of(module))
        pooled = apply(pool, params["MAPHead_0"], features["tokens"], train=False)
    else:
        pooled = features["gap" if name == "gap" else "cls"]
    if name == "pre-trained":
        layer = params["pre_logits"]
        pooled = np.tanh(pooled @ layer["kernel"] + layer["bias"])
    close(features["pre_logits"], pooled)


def test_a_scan_is_looked_into_with_the_parameters_of_the_loop(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path / "m", class_names=("a", "b", "c"), num_layers=3))
    images = IMAGES.astype(np.float32) / 127.5 - 1
    expected = features_of(model, ["logits", "block_1_tokens"])
    close(expected["logits"], apply(model.module, model.params, images, train=False))
    scanned = feature_function(model.module.clone(scan=True, remat="full"), ["block_1_tokens"])
    close(jax.jit(scanned)(model.params, images)["block_1_tokens"], expected["block_1_tokens"])


def test_unknown_features_are_answered_with_the_list(tmp_path: Path) -> None:
    module = load_model(save_model(tmp_path / "m", class_names=("a", "b"), num_layers=3)).module
    assert check_features(module, ["cls", " gap", "", "cls"]) == ["cls", "gap"]
    with pytest.raises(UserError) as caught:
        check_features(module, ["cls", "blok_1"])
    assert str(caught.value) == (
        "--features: this model has no 'blok_1'. Did you mean 'block_1'? It has logits, "
        "pre_logits, cls, gap, tokens, patches, block_0 to block_2, block_0_tokens to "
        "block_2_tokens, block_0_gap to block_2_gap, block_0_normed to block_2_normed."
    )
    assert "logits" not in available_features(module.clone(num_classes=0))
    with pytest.raises(UserError, match="--features is empty; this model has logits"):
        check_features(module, [""])


# The file.


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = {"train": {"a": 6, "b": 5}}
    return fixtures_data.write_folder(tmp_path_factory.mktemp("photos"), counts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "m", class_names=("a", "b"))


def test_a_dataset_becomes_a_file(saved: Path, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "features.npz"
    names = ["cls", "block_0_tokens", "logits"]
    shapes = extract_features(
        str(saved), [str(photos)], split="train", features=names, output=str(output), batch_size=8
    )
    assert shapes == {"cls": (11, 16), "block_0_tokens": (11, 5, 16), "logits": (11, 2)}
    assert [path.name for path in output.parent.iterdir()] == ["features.npz"]  # nothing else stays
    model = load_model(saved)
    data = create_dataset(name=str(photos), split="train", preprocess="decode|resize(16)")
    with np.load(output, allow_pickle=False) as file:
        assert file["class_names"].tolist() == ["a", "b"]
        assert file["labels"].dtype == np.int32
        function = jax.jit(feature_function(model.module, names))
        for index in range(11):
            example = data.example(index, np.random.default_rng(0))
            expected = function(model.params, scale_images(example["image"][None]))
            for name in names:
                close(file[name][index], expected[name][0])
            assert file["labels"][index] == example["label"]
            assert file["names"][index] == data.source.describe(index)


def test_images_become_a_file(saved: Path, photos: Path, tmp_path: Path) -> None:
    output = tmp_path / "f.npz"
    output.write_text("an older file")
    paths = [str(photos / "train" / "b"), str(photos / "train" / "a" / "003.jpg")]
    shapes = extract_features(str(saved), paths, features=["gap"], output=str(output))
    assert shapes == {"gap": (6, 16)}
    with np.load(output) as file:
        assert set(file) == {"gap", "names"}
        assert file["names"][-1] == paths[1]


def test_damaged_images_are_found_before_the_work(saved, photos, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    options: dict[str, Any] = {"features": ["gap"], "output": str(tmp_path / "f.npz")}
    images = [str(tmp_path), str(photos / "train" / "b")]
    with pytest.raises(UserError, match=r"1 of 6 images cannot be read: .*bad.jpg"):
        extract_features(str(saved), images, **options)
    assert not (tmp_path / "f.npz").exists()
    shapes = extract_features(str(saved), images, on_bad_image="skip", **options)
    assert shapes == {"gap": (5, 16)}
    # As the run did.
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    (run / "config.json").write_text('{"dataset": {"on_bad_image": "skip"}}')
    assert extract_features(str(run), images, **options) == {"gap": (5, 16)}
    for arguments, message in (
        ({"images": ["cifar10"]}, "cifar10: no such file or folder; a dataset needs a --split"),
        ({"images": ["a", "b"], "split": "train"}, "takes one dataset, not 2 names"),
        ({"images": images, "output": "f.txt"}, "must be a file name ending in .npz"),
        ({"images": images, "features": ["clss"]}, "Did you mean 'cls'"),
    ):
        with pytest.raises(UserError, match=message):
            extract_features(str(saved), **{**options, **arguments})


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    specs = {"x": jax.ShapeDtypeStruct((4, 3), np.float32)}
    parts = [{"x": rows[:3]}, {"x": rows[3:]}]
    _write_rows(path, specs, parts)
    with np.load(path) as stored:
        np.testing.assert_array_equal(stored["x"], rows)
    before = path.read_bytes()

    def interrupted() -> Iterator[dict[str, np.ndarray]]:
        yield parts[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _write_rows(path, specs, interrupted())
    assert [file.name for file in tmp_path.iterdir()] == ["f.npz"]
    assert path.read_bytes() == before


def test_a_full_disk_is_said_at_once(tmp_path: Path) -> None:
    specs = {"x": jax.ShapeDtypeStruct((10**12, 1000), np.float32)}
    with pytest.raises(UserError, match=r"needs 8000000.0 GB, but only .* GB are free"):
        _write_rows(tmp_path / "f.npz", specs, [])
