"""`load_pretrained`: from any source into the shape of a model, with every array accounted for."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays, write_json
from vit_jax.inference.load import load_model
from vit_jax.models import create
from vit_jax.models.create import create_model
from vit_jax.models.description import Description
from vit_jax.models.family import LAST, Family, Row
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained import load
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.pretrained.formats import google
from vit_jax.pretrained.formats.names import write_table
from vit_jax.pretrained.formats.timm import vit_table
from vit_jax.pretrained.load import load_pretrained, read_source
from vit_jax.pretrained.zoo import entries as zoo
from vit_jax.pretrained.zoo import resolve as sources
from vit_jax.trees import flatten_names, unflatten_names

GOLDEN = {
    "ViT-Ti_16,drop_head": ("Ti/16", {}),
    "ViT-Ti_16,keep_pre_logits": ("Ti/16", {"representation_size": 192}),
}


def small(**overrides: Any) -> Any:
    return create_model(**{**weights.SMALL, "num_classes": 7, **overrides})


def abstract(module: Any, height: int = 32, width: int = 32, channels: int = 3) -> Any:
    return golden.abstract_params(module, (1, height, width, channels))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A published file as ImageNet-21k's are: pre-logits, a head of its own, old names."""
    params = weights.seeded(small(num_classes=21, representation_size=24), (32, 32, 3))
    return write_arrays(tmp_path / "published.npz", google.to_published(params))


@pytest.mark.parametrize("key", list(GOLDEN))
def test_the_official_codes_logits_after_loading(key: str, tmp_path: Path) -> None:
    """A published file, at another resolution and with a new head (golden/load_pretrained)."""
    variant, sizes = GOLDEN[key]
    file_model = weights.module_of(variant, num_classes=21, representation_size=192)
    params = weights.seeded(file_model, (224, 224, 3))
    path = write_arrays(tmp_path / "file.npz", google.to_published(params))
    module = weights.module_of(variant, **sizes)
    like = unflatten_names(weights.seeded(module, (384, 384, 3), "r02"))
    loaded, report = load_pretrained(path, like=like, kind="vit")
    logits = weights.logits(module, loaded, golden.images(2, 384, 384))
    np.testing.assert_allclose(logits, golden.arrays("load_pretrained")[key], rtol=0, atol=1e-5)
    posemb = flatten_names(loaded)[POSITIONS]
    stats = golden.arrays("load_pretrained")["ViT-Ti_16,drop_head,pos_embedding_stats"]
    np.testing.assert_allclose([posemb.mean(), posemb.std()], stats, rtol=0, atol=1e-6)
    assert report["adapted"] == {POSITIONS: "bilinear 14x14 -> 24x24"}
    assert set(report["reset"]) == {"head/kernel", "head/bias"}
    pre_logits = {name for name in report["dropped"] if name.startswith("pre_logits/")}
    assert bool(pre_logits) == (key == "ViT-Ti_16,drop_head")
    assert set(report["dropped"]) - pre_logits == {"head/kernel", "head/bias"}


def test_every_name_is_accounted_for(published: Path) -> None:
    like = abstract(small(), 48, 64)
    loaded, report = load_pretrained(published, like=like, kind="vit", target_grid=(6, 8))
    names = set(flatten_names(like))
    assert {*report["loaded"], *report["adapted"], *report["reset"]} == names
    assert len(report["loaded"]) + len(report["adapted"]) + len(report["reset"]) == len(names)
    stored = read_source(published)
    assert set(stored.params) == {*report["loaded"], *report["adapted"], *report["dropped"]}
    assert jax.tree.map(lambda x: x.shape, loaded) == jax.tree.map(lambda x: x.shape, like)


def test_scan_form(published: Path) -> None:
    loop, _ = load_pretrained(published, like=abstract(small()), kind="vit")
    scan, _ = load_pretrained(published, like=abstract(small(scan=True)), kind="vit")
    stacked = scan["Transformer"]["encoderblock"]["LayerNorm_0"]["scale"]
    for i in range(2):
        expected = loop["Transformer"][f"encoderblock_{i}"]["LayerNorm_0"]["scale"]
        np.testing.assert_array_equal(stacked[i], expected)


def test_unread_arrays_are_an_error(published: Path, tmp_path: Path) -> None:
    with np.load(published) as file:
        arrays = dict(file)
    path = write_arrays(tmp_path / "more.npz", {**arrays, "extra_norm/scale": np.ones(3, "f")})
    with pytest.raises(UserError, match="extra_norm/scale"):
        load_pretrained(path, like=abstract(small()), kind="vit")
    prefixed = {f"params/{name}": array for name, array in arrays.items()}
    path = write_arrays(tmp_path / "alien.npz", {**prefixed, "alien": np.ones(3, "f")})
    for read in (
        lambda: load_pretrained(path, like=abstract(small()), kind="vit"),
        lambda: load_model(path),
    ):
        with pytest.raises(UserError, match="1 unexpected array: alien"):
            read()


def test_nan_is_damage(published: Path, tmp_path: Path) -> None:
    with np.load(published) as file:
        arrays = dict(file)
    arrays["cls"] = arrays["cls"] * np.nan
    path = write_arrays(tmp_path / "nan.npz", arrays)
    with pytest.raises(UserError, match="cls has NaN"):
        read_source(path)


def test_other_conventions_are_warned_of(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = abstract(small())
    sizes = {"gelu": "exact", "layer_norm_epsilon": 1e-6}
    with caplog.at_level(logging.WARNING):
        load_pretrained(published, like=like, kind="vit", model={**sizes, "gelu": "tanh"})
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load_pretrained(published, like=like, kind="vit", model=sizes)
    assert "--config.model.gelu=tanh" in caplog.text


def test_fixed_positions_are_for_a_model_that_computes_them(tmp_path: Path) -> None:
    """A file without positions is one with fixed ones, or a damaged one: the model has to say."""
    fixed = small(classifier="gap", position_embedding="sincos2d")
    params = weights.seeded(fixed, (32, 32, 3))
    path = write_arrays(tmp_path / "fixed.npz", google.to_big_vision(params))
    loaded, report = load_pretrained(
        path, like=abstract(fixed, 48, 48), kind="vit", reset_head=False
    )
    assert not report["adapted"]
    assert not report["reset"]
    with pytest.raises(UserError, match=r"missing .*model\.position_embedding=sincos2d"):
        load_pretrained(path, like=abstract(small(classifier="gap"), 48, 48), kind="vit")
    with pytest.raises(UserError, match="--image_size"):
        load_model(path)
    images = golden.images(2, 48, 48)
    model = load_model(path, image_size=48)
    assert model.description.eval_preprocess == "official_eval(48)"
    a = weights.logits(fixed, loaded, images)
    np.testing.assert_array_equal(a, weights.logits(model.module, model.params, images))


@pytest.mark.parametrize(
    ("remove", "inferred", "fitted"),
    [
        ("embedding/kernel", "match no supported Vision", "match no supported Vision"),
        ("Transformer/encoderblock_0/", "cannot infer its mlp_dim", "16 missing"),
        ("Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias", *["Block_0/Dense_0/bias"] * 2),
        ("Transformer/encoder_norm/scale", *["encoder_norm/scale"] * 2),
        ("head/kernel", "head/kernel", ""),
        ("pre_logits/kernel", *["pre_logits/kernel"] * 2),
    ],
)
def test_what_is_missing_is_named(
    remove: str, inferred: str, fitted: str, published: Path, tmp_path: Path
) -> None:
    """A file without block 0 was once loaded with block 1 in its place."""
    with np.load(published) as file:
        arrays = {name: a for name, a in file.items() if not name.startswith(remove)}
    path = write_arrays(tmp_path / "part.npz", arrays)
    with pytest.raises(UserError, match=inferred):
        load_model(path)
    if fitted:
        with pytest.raises(UserError, match=fitted) as error:
            load_pretrained(path, like=abstract(small(representation_size=24)), kind="vit")
        assert "mlp_dim=None" not in str(error.value)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        read_source(tmp_path)
    write_arrays(tmp_path / "a.npz", {"x": np.zeros(1, "f")})
    with pytest.raises(UserError, match=r"name one of its files: a\.npz"):
        read_source(tmp_path)


def test_the_number_of_heads_is_the_files_own(tmp_path: Path) -> None:
    """The same arrays with another number of heads are another function."""
    module = small()
    params = weights.seeded(module, (32, 32, 3))
    folder = tmp_path / "timm"
    weights.write(folder, "timm", module, params, (32, 32, 3))
    with pytest.raises(UserError, match=r"model\.num_heads=3 \(now 6\)"):
        load_pretrained(folder, like=abstract(small(num_heads=6)), kind="vit", reset_head=False)
    with pytest.raises(UserError, match=r"num_heads=6, but config\.json says 3"):
        load_model(folder, num_heads=6)
    (folder / "config.json").unlink()
    loaded, _ = load_pretrained(folder, like=abstract(module), kind="vit", reset_head=False)
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
    np.testing.assert_array_equal(flatten_names(loaded)[name], params[name])


def test_a_square_of_as_many_tokens_as_a_rectangle_is_interpolated(tmp_path: Path) -> None:
    params = weights.seeded(small(), (32, 32, 3))
    path = write_arrays(tmp_path / "square.npz", params)
    _, report = load_pretrained(
        path, like=abstract(small(), 16, 64), kind="vit", target_grid=(2, 8)
    )
    assert report["adapted"] == {POSITIONS: "bilinear 4x4 -> 2x8"}


def test_a_file_of_the_zoo_is_the_model_that_the_zoo_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    name = "big_vision/vit_s16_i1k_90ep"
    url = zoo.get_entry(name).url
    model = weights.module_of(
        "S/16",
        num_classes=1000,
        classifier="gap",
        representation_size=384,
        position_embedding="sincos2d",
    )
    params = google.to_big_vision(weights.seeded(model, (224, 224, 3)))
    sources.cache_path(url).parent.mkdir(parents=True)
    write_arrays(sources.cache_path(url), params)
    loaded = load_model(name)
    assert loaded.description.image_shape == (224, 224, 3)
    assert loaded.description.eval_preprocess == zoo.get_entry(name).preprocess
    assert loaded.description.class_names[0] == "tench"
    shorter = {key: array for key, array in params.items() if "encoderblock_11/" not in key}
    write_arrays(sources.cache_path(url), shorter)
    with pytest.raises(UserError, match=r"num_layers=11, expected num_layers=12"):
        load_model(name)


def test_the_zoo_knows_how_many_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of DINOv2's g/14, of which Facebook's file says nothing."""
    module = small(num_classes=0)
    params = write_table(vit_table(), weights.seeded(module, (16, 16, 3)), "timm")
    write_safetensors(tmp_path / "a.safetensors", params, {})
    with pytest.raises(UserError, match="cannot infer num_heads"):
        load_model(tmp_path / "a.safetensors")
    entry = zoo.get_entry("mae/mae_pretrain_vit_base")
    entry = dataclasses.replace(entry, variant="", attributes=weights.SMALL, resolution=16)
    monkeypatch.setattr(load, "describe_source", lambda _: entry)
    assert load_model(tmp_path / "a.safetensors").module.num_heads == module.num_heads


class Linear(nn.Module):
    """A kind of model that no weight format knows."""

    num_classes: int
    dtype: Any = None
    kind = "linear"
    prefix_tokens = ()
    logits_per_token = False
    pixels_per_token = (1, 1)

    @nn.nowrap
    def token_grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return image_size

    @nn.compact
    def __call__(self, images: Any, *, train: bool) -> Any:  # noqa: ARG002
        features = images.mean((1, 2))  # [B, C]
        return nn.Dense(self.num_classes, name="color")(features)


def test_our_own_files_are_what_their_description_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a kind of model that somebody adds: nothing is recognised, nothing inferred."""
    row = Row("color/(?:kernel|bias)", (None, "classes"), LAST, role="head")
    family = Family(module=Linear, title="a line", acronym="L", rows=(row,), infer=lambda _: {})
    monkeypatch.setitem(create.MODELS, "linear", family)
    params = {"color/kernel": np.ones((3, 2), "f"), "color/bias": np.zeros(2, "f")}
    write_arrays(tmp_path / "params.npz", params)
    model = {"name": "linear", "num_classes": 2}
    description = Description(model, (8, 8, 3), (8, 8), (), "decode|resize(8)")
    write_json(tmp_path / "model.json", description.to_json())
    loaded = load_model(tmp_path)
    weights.assert_same(flatten_names(loaded.params), params)
    images = np.ones((1, 8, 8, 3), np.float32)
    np.testing.assert_array_equal(
        loaded.module.apply({"params": loaded.params}, images, train=False), [[3.0, 3.0]]
    )
    write_arrays(tmp_path / "params.npz", {**params, "color/kernel": np.ones((3, 5), "f")})
    with pytest.raises(UserError, match=r"color/kernel is \(3, 5\) and must be \(3, 2\)"):
        load_model(tmp_path)
