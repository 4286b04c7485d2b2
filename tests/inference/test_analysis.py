"""Cases whose answer is known."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.inference.analysis import (
    cka_of_layers,
    class_token_attention,
    mean_distance,
    patch_similarity,
    position_similarity,
    principal_colors,
    principal_filters,
    rollout,
    uniform_distance,
)

GRID = (2, 3)  # rows, columns
RNG = np.random.default_rng(0)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    return float(cka_of_layers([x], [y])[0, 0])


def stacked(weights: np.ndarray, *, layers: int = 2, images: int = 3, heads: int = 4) -> np.ndarray:
    return np.broadcast_to(weights, (layers, images, heads, *weights.shape))


@pytest.mark.parametrize("others", [0, 1])
def test_the_distance_of_uniform_attention(others: int) -> None:
    """Between two places drawn at random on a grid of 2 x 3 tokens of 16 x 8 pixels."""
    weights = np.full((6 + others, 6 + others), 1 / (6 + others))
    places = [(16 * row, 8 * column) for row in range(2) for column in range(3)]
    expected = np.mean([np.hypot(a - c, b - d) for a, b in places for c, d in places])
    np.testing.assert_allclose(mean_distance(stacked(weights), GRID, (16, 8)), expected)
    assert uniform_distance(GRID, (16, 8)) == pytest.approx(expected)


def test_distances_of_heads_and_blocks_stay_apart() -> None:
    weights = np.stack([np.eye(6), np.eye(6)[[1, 0, 2, 3, 4, 5]]])  # one head swaps two places
    result = mean_distance(np.stack([weights, weights[::-1]])[:, None], GRID, (16, 8))
    np.testing.assert_allclose(result, [[0, 2 * 8 / 6], [2 * 8 / 6, 0]])


def test_rollout_follows_the_path() -> None:
    """The class token looks at place 5 in the last block, which looked at place 2 before."""
    first, last = np.eye(7), np.eye(7)
    first[1 + 5] = np.eye(7)[1 + 2]
    last[0] = np.eye(7)[1 + 5]
    result = rollout(np.stack([first, last])[:, None, None], GRID)[0]
    expected = np.zeros(6)
    expected[[5, 2]] = 0.25  # half stays in each of two blocks
    np.testing.assert_allclose(result, expected.reshape(GRID))
    swapped = rollout(np.stack([last, first])[:, None, None], GRID)[0]
    np.testing.assert_allclose(swapped.ravel()[[5, 2]], [0.5, 0])
    of_grid = rollout(stacked(np.eye(6)), GRID)  # without a class token the mean over all queries
    np.testing.assert_allclose(of_grid, np.full((3, 2, 3), 1 / 6))
    heads = np.stack([last, np.eye(7)])  # of which one looks at place 5
    np.testing.assert_allclose(rollout(heads[None, None], GRID).ravel()[5], 0.25)


def test_the_class_tokens_row_is_shown() -> None:
    weights = RNG.random((2, 3, 4, 8, 8))  # class and distillation token
    result = class_token_attention(weights, GRID)
    np.testing.assert_array_equal(result[1, 2], weights[-1, 1, 2, 0, 2:].reshape(GRID))
    without = class_token_attention(weights[..., 2:, 2:], GRID)
    np.testing.assert_allclose(without[1, 2].ravel(), weights[-1, 1, 2, 2:, 2:].mean(axis=0))


def test_planted_filters_are_found() -> None:
    planted = np.linalg.qr(RNG.normal(size=(4 * 5 * 3, 2)))[0].T  # two, orthonormal
    coefficients = RNG.normal(size=(64, 2)) * [3.0, 1.0]
    coefficients = coefficients - coefficients.mean(axis=0)
    coefficients = np.linalg.qr(coefficients)[0] * [3.0, 1.0]
    kernel = (coefficients @ planted + 0.7).T.reshape(4, 5, 3, 64)
    components, shares = principal_filters(kernel, 4)
    assert components.shape == (4, 4, 5, 3)
    np.testing.assert_allclose(shares, [0.9, 0.1, 0, 0], atol=1e-12)
    for component, expected in zip(components, planted, strict=False):
        assert abs(np.sum(component.ravel() * expected)) == pytest.approx(1.0)
        assert component.ravel()[np.abs(component).argmax()] > 0


def test_similar_positions() -> None:
    rows, columns = np.eye(2), np.eye(3)
    embeddings = np.array(
        [np.concatenate([rows[i], columns[j]]) for i in range(2) for j in range(3)]
    )
    with_class = np.concatenate([RNG.normal(size=(1, 5)), 7 * embeddings])
    result = position_similarity(with_class, GRID)
    assert result.shape == (2, 3, 2, 3)
    np.testing.assert_allclose(result[0, 1], [[0.5, 1, 0.5], [0, 0.5, 0]], atol=1e-12)


def test_cka_is_that_of_the_unbiased_estimator_and_needs_few_examples() -> None:
    def hsic(k: np.ndarray, other: np.ndarray) -> float:
        """2010.15327, equation 3."""
        n, ones = len(k), np.ones(len(k))
        k, other = (kernel - np.diag(np.diag(kernel)) for kernel in (k, other))
        sums = (ones @ k @ ones) * (ones @ other @ ones) / ((n - 1) * (n - 2))
        return float(np.trace(k @ other) + sums - 2 / (n - 2) * ones @ k @ other @ ones)

    x, y = normal(30, 5), normal(30, 8, seed=1) + normal(30, 1)
    a, b = x @ x.T, y @ y.T
    expected = hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b))
    assert linear_cka(x, y) == pytest.approx(expected)
    rotation, _ = np.linalg.qr(normal(5, 5, seed=2))
    for same in (x @ rotation, -3.5 * x, x + 100):
        assert linear_cka(x, same) == pytest.approx(1.0)
    assert linear_cka(x, np.ones((30, 3))) == 0.0
    wide = [(normal(30, 300, seed=i), normal(30, 300, seed=100 + i)) for i in range(20)]
    assert abs(np.mean([linear_cka(*pair) for pair in wide])) < 0.02


def test_cka_of_layers() -> None:
    layers = [normal(40, width, seed=width) for width in (3, 5, 7)]
    result = cka_of_layers(layers, layers[:2])
    assert result.shape == (3, 2)
    assert result[2, 1] == pytest.approx(linear_cka(layers[2], layers[1]))
    np.testing.assert_allclose(np.diag(result), 1.0)
    with pytest.raises(UserError, match=r"CKA of \[39, 40\] examples: give both models the same"):
        cka_of_layers(layers, [layers[0][:39]])
    with pytest.raises(UserError, match="at least 4"):
        cka_of_layers([x[:3] for x in layers], [layers[0][:3]])


def test_an_object_has_the_colours_and_the_middle_the_foreground() -> None:
    """Two kinds of patches in the middle of noise that is the background of both images."""
    rng = np.random.default_rng(0)
    patches = 0.1 * rng.normal(size=(2, 6, 8, 16))
    patches[:, 2:4, 2:6, 0] += 3.0
    patches[:, 2:4, 2:4, 1] += 1.0
    found = principal_colors(patches.reshape(2, 48, 16), [(6, 8)] * 2)
    colors, is_object = map(np.stack, found)
    expected = np.zeros((2, 6, 8), bool)
    expected[:, 2:4, 2:6] = True
    np.testing.assert_array_equal(is_object, expected)
    assert np.all(colors[~is_object] == 0)
    halves = colors[:, 2:4, 2:4, 0], colors[:, 2:4, 4:6, 0]
    assert abs(halves[0].mean() - halves[1].mean()) > 0.5
    assert max(half.std() for half in halves) < 0.2  # the same in both images


def test_a_patch_is_like_its_kind() -> None:
    patches = np.zeros((2, 6, 3))
    patches[:, :, 0] = 1.0
    patches[:, 4, 0], patches[:, 4, 1] = 0.0, 2.0
    cosines = patch_similarity(patches, [(2, 3)] * len(patches), (1, 1))
    np.testing.assert_array_equal(cosines, np.float64([[[0, 0, 0], [0, 1, 0]]] * 2))
