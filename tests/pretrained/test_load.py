"""`load_pretrained`: from any source into the shape of a model, with every array accounted for."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
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
    """In either form of the blocks."""
    like = abstract(small(), 48, 64)
    loop, report = load_pretrained(published, like=like, kind="vit", target_grid=(6, 8))
    names = [*report["loaded"], *report["adapted"], *report["reset"]]
    assert sorted(names) == sorted(flatten_names(like))
    stored = read_source(published)
    assert set(stored.params) == {*report["loaded"], *report["adapted"], *report["dropped"]}
    assert jax.tree.map(lambda x: x.shape, loop) == jax.tree.map(lambda x: x.shape, like)
    scan, _ = load_pretrained(published, like=abstract(small(scan=True)), kind="vit")
    stacked = scan["Transformer"]["encoderblock"]["LayerNorm_0"]["scale"]
    for i in range(2):
        expected = loop["Transformer"][f"encoderblock_{i}"]["LayerNorm_0"]["scale"]
        np.testing.assert_array_equal(stacked[i], expected)


def test_a_square_of_as_many_tokens_as_a_rectangle_is_interpolated(published: Path) -> None:
    like = abstract(small(), 16, 64)
    params, report = load_pretrained(published, like=like, kind="vit", target_grid=(2, 8))
    assert report["adapted"] == {POSITIONS: "bilinear 4x4 -> 2x8"}
    before = read_source(published).params[POSITIONS]
    assert np.abs(flatten_names(params)[POSITIONS] - before).max() > 1e-3


def test_what_is_too_much_or_damaged_is_an_error(published: Path, tmp_path: Path) -> None:
    with np.load(published) as file:
        arrays = dict(file)
    path = write_arrays(tmp_path / "more.npz", {**arrays, "extra_norm/scale": np.ones(3, "f")})
    with pytest.raises(UserError, match="extra_norm/scale"):
        load_pretrained(path, like=abstract(small()), kind="vit")
    prefixed = {f"params/{name}": array for name, array in arrays.items()}
    path = write_arrays(tmp_path / "alien.npz", {**prefixed, "alien": np.ones(3, "f")})
    with pytest.raises(UserError, match="1 unexpected array: alien"):
        load_model(path)
    path = write_arrays(tmp_path / "nan.npz", {**arrays, "cls": arrays["cls"] * np.nan})
    with pytest.raises(UserError, match="cls has NaN"):
        read_source(path)
    with pytest.raises(UserError, match="name one of its files: alien.npz, more.npz"):
        read_source(tmp_path)


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


def test_what_is_missing_is_named(published: Path, tmp_path: Path) -> None:
    """A file without block 0 was once loaded with block 1 in its place."""
    with np.load(published) as file:
        arrays = dict(file)
    for remove, inferred, fitted in (
        ("embedding/kernel", *["match no supported Vision"] * 2),
        ("Transformer/encoderblock_0/", "cannot infer its mlp_dim", "16 missing"),
        ("Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias", *["Block_0/Dense_0/bias"] * 2),
        ("pre_logits/kernel", *["pre_logits/kernel"] * 2),
    ):
        part = {name: array for name, array in arrays.items() if not name.startswith(remove)}
        path = write_arrays(tmp_path / "part.npz", part)
        with pytest.raises(UserError, match=inferred):
            load_model(path)
        with pytest.raises(UserError, match=fitted):
            load_pretrained(path, like=abstract(small(representation_size=24)), kind="vit")


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


def test_a_file_of_the_zoo_is_the_model_that_the_zoo_says(tmp_path, monkeypatch):
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


BIG_VISION = sorted(
    key
    for key in golden.arrays("bv_logits")
    if re.match(r"(mu|Ti)/16.*fanin", key)  # tests/models/test_golden.py has the other recipe
    # Without a head the model gives other things, and unpooled tokens are of no file.
    and not any(part in key for part in (",none,", ",0,", "num_classes=None"))
)


@pytest.mark.parametrize("key", BIG_VISION)
def test_logits_of_big_vision(key: str, tmp_path: Path) -> None:
    config, recipe = key.split("|")
    names = golden.table("bv_names")[config]
    shapes = names.get("params", names)
    params = {name: golden.fill(name, tuple(shape), recipe) for name, shape in shapes.items()}
    path = write_arrays(tmp_path / "file.npz", {f"params/{n}": a for n, a in params.items()})
    loaded = load_model(path, image_size=224)
    assert loaded.format == "big_vision"
    fixed = loaded.description.model["position_embedding"] == "sincos2d"
    assert fixed == ("sincos2d" in config)
    images = golden.images(2, 224, 224)
    logits = weights.logits(loaded.module, loaded.params, images)
    np.testing.assert_allclose(logits, golden.arrays("bv_logits")[key], rtol=0, atol=1e-5)
