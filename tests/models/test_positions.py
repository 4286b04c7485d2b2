"""The position embeddings of appendix D.4, each by its own equation."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import positions as recipe
from tests import golden
from tests.golden import VIT
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.positions import POSITION_EMBEDDINGS, RELATIVE, relative_scores
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.pretrained.fit.resize import interpolate_offsets
from vit_jax.pretrained.infer import infer_model
from vit_jax.trees import flatten_names, unflatten_names

SMALL: dict[str, Any] = {**weights.SMALL, "num_classes": 5}
IMAGES = golden.images(2, 16, 24)  # 2x3 tokens, and the class token
LEARNED = [kind for kind in POSITION_EMBEDDINGS if kind not in ("sincos2d", "none")]


def model_of(kind: str, **overrides: Any) -> Any:
    return create_model(**{**SMALL, "position_embedding": kind, **overrides})


def flat_params(kind: str, shape: tuple[int, ...] = IMAGES.shape[1:]) -> dict[str, np.ndarray]:
    return weights.seeded(model_of(kind), shape)


def logits_of(model: Any, params: dict[str, np.ndarray]) -> np.ndarray:
    return weights.logits(model, unflatten_names(params), IMAGES)


@pytest.mark.parametrize("kind", LEARNED)
def test_the_shapes_of_a_file_tell_the_kind(kind: str) -> None:
    assert infer_model(flat_params(kind), "vit", {})["position_embedding"] == kind


def test_2d_is_1d_with_a_table_of_columns_and_rows() -> None:
    """At each place; the class token gets zero."""
    for place, stem in (("", "input"), ("_shared", "shared"), ("_layers", "input")):
        params = flat_params(f"learned2d{place}")
        table = dict(params)
        for x_name in [name for name in params if name.endswith("x_embedding")]:
            x, y = table.pop(x_name), table.pop(x_name.replace("x_emb", "y_emb"))
            rows = [np.zeros(24)] + [np.concatenate([x[i], y[j]]) for j in (0, 1) for i in range(3)]
            assert f"posembed_{stem}" in x_name
            table[x_name.replace("x_emb", "pos_emb")] = np.float32(rows)[None]
        logits = logits_of(model_of(f"learned2d{place}"), params)
        np.testing.assert_array_equal(logits, logits_of(model_of(f"learned{place}"), table))


def test_layers_with_equal_tables_are_shared_ones_and_the_stem_is_the_first_layer() -> None:
    shared = flat_params("learned_shared")
    table = shared.pop("Transformer/posembed_shared/pos_embedding")
    layers = shared | {
        f"Transformer/encoderblock_{i}/posembed_input/pos_embedding": table for i in range(2)
    }
    once = shared | {"Transformer/posembed_input/pos_embedding": table}
    expected = logits_of(model_of("learned_layers"), layers)
    every = {**shared, "Transformer/posembed_shared/pos_embedding": table}
    np.testing.assert_array_equal(logits_of(model_of("learned_shared"), every), expected)
    layers["Transformer/encoderblock_1/posembed_input/pos_embedding"] = 0 * table
    first = logits_of(model_of("learned_layers"), layers)
    np.testing.assert_allclose(logits_of(model_of("learned"), once), first, rtol=0, atol=1e-6)
    assert np.abs(first - expected).max() > 1e-2


def test_relative_scores_by_their_equation() -> None:
    """In float64, pair by pair, the class token among them."""
    rng = np.random.default_rng(0)
    query, embedding = rng.normal(size=(2, 7, 3, 4)), rng.normal(size=(13, 4))
    expected = np.zeros((2, 3, 7, 7))
    for q, k in np.ndindex(7, 7):
        expected[:, :, q, k] = query[:, q] @ embedding[q - k + 6] / 2  # sqrt(4)
    scores = relative_scores(jnp.asarray(query, jnp.float32), jnp.asarray(embedding, jnp.float32))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)  # four products of about 1


def test_relative_attention_in_both_implementations_and_in_training() -> None:
    params = flat_params("relative")
    auto = logits_of(model_of("relative"), params)
    reference = logits_of(model_of("relative", attention="reference"), params)
    np.testing.assert_allclose(auto, reference, rtol=0, atol=5e-6)  # sums in another order
    zero = {name: 0 * x if RELATIVE in name else x for name, x in params.items()}
    none = logits_of(model_of("none", attention="reference"), zero | {})
    np.testing.assert_array_equal(
        logits_of(model_of("relative", attention="reference"), zero), none
    )
    assert np.abs(none - reference).max() > 1e-2
    with pytest.raises(UserError, match=r"attention='chunked' does not support .*'relative'"):
        model_of("relative", attention="chunked")
    with pytest.raises(UserError, match=r"hidden_size=21 must be even for .*'learned2d'"):
        model_of("learned2d", hidden_size=21)


@pytest.mark.parametrize("kind", ["learned2d_layers", "relative"])
def test_scan_and_remat_give_the_same_gradients(kind: str) -> None:
    plain = model_of(kind)
    params = unflatten_names(flat_params(kind))

    def gradients(model: Any, params: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.sum(model.apply({"params": p}, IMAGES, train=True) ** 2)

        return flatten_names(jax.jit(jax.grad(loss))(params))

    expected = flatten_names(VIT.stack(unflatten_names(gradients(plain, params))))
    scanned = gradients(plain.clone(scan=True, remat="full"), VIT.stack(params))
    for name, array in expected.items():
        scale = np.abs(array).max() + 1.0
        np.testing.assert_allclose(scanned[name], array, rtol=0, atol=1e-5 * scale, err_msg=name)
        assert np.any(array), name


def test_offsets_are_interpolated_by_location() -> None:
    """A field linear in rows and columns stays so where an offset has one meaning: few columns."""
    source, target = (3, 5), (6, 10)

    def field(grid: tuple[int, int], columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return rows / (grid[0] - 1) + 10 * columns / (grid[1] - 1)

    def offsets(grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        offset = np.arange(1 - np.prod(grid), np.prod(grid))
        rows = np.rint(offset / grid[1])
        return offset - rows * grid[1], rows

    # Between the class token and the last patch: kept.
    before = np.concatenate([[-7.0], field(source, *offsets(source)), [7.0]])[:, None]
    first, *cells, last = interpolate_offsets(before, target, source, "bilinear")[:, 0]
    assert (first, last) == (-7.0, 7.0)
    after = np.array(cells)
    columns, rows = offsets(target)
    near = (np.abs(columns) <= 4) & (np.abs(rows) < 5)  # within two columns of the source
    np.testing.assert_allclose(after[near], field(target, columns, rows)[near], atol=1e-12)
    np.testing.assert_array_equal(interpolate_offsets(before, source, source, "bilinear"), before)


@pytest.mark.parametrize("kind", LEARNED)
def test_every_kind_is_interpolated_to_another_grid(kind: str) -> None:
    before, image = flat_params(kind), (32, 40, 3)
    like = flat_params(kind, image)
    params, report = adapt_params(
        before, like, kinds=("vit", "vit"), grid=(4, 5), source_grid=(2, 3), reset_head=False
    )
    changed = [name for name in before if "pos" in name]
    assert set(report["adapted"]) == set(changed)
    hows = " ".join(report["adapted"].values())
    assert ("2 -> 4" in hows) if "2d" in kind else ("bilinear 2x3 -> 4x5" in hows)
    assert {name: x.shape for name, x in params.items()} == {n: x.shape for n, x in like.items()}


def test_relative_positions_of_a_class_token_added_and_dropped_again() -> None:
    token, gap = (
        weights.seeded(model_of("relative", classifier=classifier), IMAGES.shape[1:])
        for classifier in ("token", "gap")
    )
    more, report = adapt_params(
        gap, token, kinds=("vit", "vit"), grid=(2, 3), source_grid=(2, 3), class_token="add"
    )
    name = f"Transformer/encoderblock_1/{RELATIVE}/embedding"
    assert report["adapted"][name] == "zero offsets of the class token added"
    np.testing.assert_array_equal(more[name], np.pad(gap[name], ((1, 1), (0, 0))))
    less, report = adapt_params(
        more, gap, kinds=("vit", "vit"), grid=(2, 3), source_grid=(2, 3), class_token="drop"
    )
    assert report["adapted"][name] == "offsets of the class token dropped"
    np.testing.assert_array_equal(less[name], gap[name])


def test_a_file_without_a_description_and_formats_of_others(tmp_path: Path) -> None:
    model, params, image = model_of("relative"), flat_params("relative"), IMAGES.shape[1:]
    path = weights.write(tmp_path / "relative.npz", "npz", model, params, image)
    loaded = load_model(path, image_size=image[:2])
    assert loaded.module == model
    weights.assert_same(flatten_names(loaded.params), params)
    for format in ("timm", "huggingface", "big_vision", "npz_published"):
        match = "cannot store model.position_embedding='relative'.*use --format=npz or orbax"
        with pytest.raises(UserError, match=match):
            weights.write(tmp_path / "x", format, model, {}, image)


def test_the_recipe_has_the_rows_of_table_8() -> None:
    kinds = {row: recipe.get_config(row).model.position_embedding for row in recipe.TABLE_8}
    assert set(kinds.values()) == {*POSITION_EMBEDDINGS} - {"sincos2d"}
    config = recipe.get_config("2d_layers")
    assert config.sweep.published == "64.046 on ImageNet, 5 images per class (2010.11929, table 8)"
    assert (config.dataset.name, config.duration.epochs) == ("jft", 7.0)
    assert config.evaluators.imagenet.shots == (5,)
    assert recipe.get_config("relative,imagenet2012").sweep.published == ""
    with pytest.raises(UserError, match="rows: none, 1d, 1d_layers"):
        recipe.get_config("3d")
