from __future__ import annotations

import jax
import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.variants import VARIANTS
from vit_jax.pretrained.adapt import POSEMB, adapt_params, interpolate_posembed
from vit_jax.tree import flatten_names, unflatten_names

KEYS = sorted({key.rpartition("_")[0] for key in golden.arrays("posembed")})


@pytest.mark.parametrize("key", KEYS)
def test_interpolation_of_the_official_code(key: str) -> None:
    kind, _, new = key.split("_")
    before = golden.arrays("posembed")[f"{key}_in"]
    after = golden.arrays("posembed")[f"{key}_out"]
    prefix = int(kind == "tok")
    result = interpolate_posembed(before, grid=(int(new), int(new)), num_prefix_tokens=prefix)
    np.testing.assert_allclose(result, after, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(result[:, :prefix], before[:, :prefix])  # class token untouched


@pytest.mark.parametrize("num_tokens", [49, 50, 196, 197, 576, 577])
def test_squares_with_and_without_class_token(num_tokens: int) -> None:
    prefix = num_tokens % 2 if num_tokens != 49 else 0
    if num_tokens in (50, 197, 577):
        prefix = 1
    posemb = np.random.default_rng(0).normal(size=(1, num_tokens, 3)).astype(np.float32)
    side = round((num_tokens - prefix) ** 0.5)
    same = interpolate_posembed(posemb, grid=(side, side), num_prefix_tokens=prefix)
    np.testing.assert_array_equal(same, posemb)
    larger = interpolate_posembed(posemb, grid=(side + 1, side), num_prefix_tokens=prefix)
    assert larger.shape == (1, prefix + (side + 1) * side, 3)
    wrong = 1 - prefix
    with pytest.raises(UserError, match="no square"):
        interpolate_posembed(posemb, grid=(side, side), num_prefix_tokens=wrong)


@pytest.mark.parametrize("source", [(3, 5), (5, 3), (1, 7), (4, 4), (2, 9)])
@pytest.mark.parametrize("target", [(6, 10), (10, 6), (1, 1), (4, 7), (3, 5)])
def test_rectangles_keep_corners_and_are_linear_along_each_axis(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    """A field linear in row and column is reproduced exactly, so no axis is swapped."""

    def field(grid: tuple[int, int]) -> np.ndarray:
        rows = np.linspace(0, 1, grid[0]) if grid[0] > 1 else np.zeros(1)
        columns = np.linspace(0, 1, grid[1]) if grid[1] > 1 else np.zeros(1)
        values = 2.0 * rows[:, None] + 5.0 * columns[None, :]
        return values.reshape(1, -1, 1).astype(np.float32)

    result = interpolate_posembed(
        field(source), grid=target, num_prefix_tokens=0, source_grid=source
    )
    expected = field(target)
    if source[0] == 1:
        expected = expected - 2.0 * np.repeat(
            np.linspace(0, 1, target[0]) if target[0] > 1 else np.zeros(1), target[1]
        ).reshape(1, -1, 1)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_as_many_tokens_as_wanted_stay_as_they_are() -> None:
    """A rectangle of our own, whose grid a bare .npz does not tell."""
    posemb = np.random.default_rng(0).normal(size=(1, 13, 4)).astype(np.float32)
    same = interpolate_posembed(posemb, grid=(2, 6), num_prefix_tokens=1)
    np.testing.assert_array_equal(same, posemb)


def test_a_grid_of_another_size_than_the_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"pretrained.grid=\(3, 5\) asks for 15"):
        interpolate_posembed(np.zeros((1, 17, 2)), grid=(2, 2), source_grid=(3, 5))


LOADS = {
    "ViT-Ti_16,drop_head": ("Ti/16", {}, {"representation_size": 192}, (384, 384)),
    "ViT-Ti_16,keep_pre_logits": (
        "Ti/16",
        {"representation_size": 192},
        {"representation_size": 192},
        (384, 384),
    ),
}


@pytest.mark.parametrize("key", list(LOADS))
def test_fine_tuning_start_of_the_official_code(key: str) -> None:
    """A 21-class file at 224 pixels, loaded into a 10-class model at 384: logits agree."""
    name, kwargs, file_kwargs, size = LOADS[key]
    file_model = create_model(**VARIANTS[name], num_classes=21, **file_kwargs)
    flat = flatten_names(golden.abstract_params(file_model))
    loaded = {n: golden.fill(n, leaf.shape, "fanin") for n, leaf in flat.items()}
    model = create_model(**VARIANTS[name], num_classes=10, **kwargs)
    like = {
        n: golden.fill(n, leaf.shape, "r02")
        for n, leaf in flatten_names(golden.abstract_params(model, (1, *size, 3))).items()
    }
    params, report = adapt_params(loaded, like, grid=(size[0] // 16, size[1] // 16))
    images = golden.images(2, *size)
    logits = jax.jit(lambda p, x: model.apply({"params": p}, x, train=False))(
        unflatten_names(params), images
    )
    np.testing.assert_allclose(logits, golden.arrays("load_pretrained")[key], rtol=0, atol=1e-5)
    assert report.adapted == (POSEMB,)
    assert set(report.reset) == {"head/kernel", "head/bias"}
    assert bool(report.dropped) == (key == "ViT-Ti_16,drop_head")
    accounted = report.loaded + report.adapted + report.reset
    assert sorted(accounted) == sorted(like)
    if key == "ViT-Ti_16,drop_head":
        stats = golden.arrays("load_pretrained")[f"{key},pos_embedding_stats"]
        np.testing.assert_allclose(
            [params[POSEMB].mean(), params[POSEMB].std()], stats, rtol=0, atol=1e-6
        )


def small(**kwargs: object) -> dict[str, np.ndarray]:
    row = {**VARIANTS["mu/16"], "num_classes": 3, **kwargs}
    flat = flatten_names(golden.abstract_params(create_model(**row), (1, 32, 32, 3)))
    return {name: np.zeros(leaf.shape, np.float32) for name, leaf in flat.items()}


def test_every_problem_is_named_at_once() -> None:
    loaded = small()
    del loaded["embedding/bias"]
    loaded["extra/kernel"] = np.zeros(2)
    loaded["embedding/kernel"] = np.zeros((8, 8, 3, 32))
    with pytest.raises(UserError) as error:
        adapt_params(loaded, small(), grid=(2, 2))
    for text in ("missing embedding/bias", "unexpected extra/kernel", "(8, 8, 3, 32)"):
        assert text in str(error.value)


def test_a_kept_head_must_fit() -> None:
    loaded, like = small(), small(num_classes=4)
    with pytest.raises(UserError, match="head/kernel"):
        adapt_params(loaded, like, grid=(2, 2), reset_head=False)
    same = {name: np.ones_like(array) for name, array in small().items()}
    params, report = adapt_params(same, small(), grid=(2, 2), reset_head=False)
    assert not report.reset
    assert params["head/kernel"].all()


@pytest.mark.parametrize("direction", ["to gap", "to token"])
def test_a_class_token_that_does_not_fit_names_the_classifier(direction: str) -> None:
    token, gap = small(), small(classifier="gap")
    loaded, like = (token, gap) if direction == "to gap" else (gap, token)
    with pytest.raises(UserError, match=r"model.classifier"):
        adapt_params(loaded, like, grid=(2, 2))
