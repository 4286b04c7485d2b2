from __future__ import annotations

import numpy as np
import pytest

from tests import golden
from tests.peers import import_timm
from vit_jax.errors import UserError
from vit_jax.pretrained.fit.posemb import interpolate_posembed, replace_prefix

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
    prefix = int(num_tokens in (50, 197, 577))
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


SOURCES = [(1, 5), (3, 2), (7, 7), (14, 14), (12, 20), (24, 24), (37, 37)]
TARGETS = [(1, 1), (3, 5), (7, 7), (14, 14), (24, 18), (32, 32), (9, 4), (13, 29), (64, 48)]


@pytest.mark.parametrize("source", SOURCES)
def test_bicubic_is_that_of_torch(source: tuple[int, int]) -> None:
    """Up, down, rectangles, one axis each way. Rounding alone differs: 1e-15 in float64.

    In float32 torch also rounds the positions; at a deviation of 0.1, larger than that of trained
    position embeddings, it was off by up to 1.7e-6 over these grids.
    """
    import torch

    rng = np.random.default_rng(0)
    for target in TARGETS:
        posemb = rng.normal(size=(1, source[0] * source[1], 8))
        for dtype, scale, tolerance in ((np.float64, 1.0, 1e-12), (np.float32, 0.1, 1e-5)):
            before = (scale * posemb).astype(dtype)
            theirs = torch.nn.functional.interpolate(
                torch.from_numpy(before).reshape(1, *source, 8).permute(0, 3, 1, 2),
                size=target,
                mode="bicubic",
                antialias=True,
                align_corners=False,
            )
            expected = theirs.permute(0, 2, 3, 1).reshape(1, -1, 8).numpy()
            ours = interpolate_posembed(before, target, 0, source, "bicubic")
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance, err_msg=str(target))


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_bicubic_as_timm_resizes_at_load(prefix: int) -> None:
    timm = import_timm()
    import torch

    posemb = (0.1 * np.random.default_rng(0).normal(size=(1, prefix + 15, 6))).astype(np.float32)
    theirs = timm.layers.resample_abs_pos_embed(
        torch.from_numpy(posemb), new_size=[7, 4], old_size=[3, 5], num_prefix_tokens=prefix
    ).numpy()
    ours = interpolate_posembed(posemb, (7, 4), prefix, (3, 5), "bicubic")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours[:, :prefix], posemb[:, :prefix])
    bilinear = interpolate_posembed(posemb, (7, 4), prefix, (3, 5), "bilinear")
    assert np.abs(ours - bilinear).max() > 0.02  # the two methods are far apart


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
def test_an_unchanged_grid_gives_back_the_same_array(method: str) -> None:
    posemb = np.random.default_rng(0).normal(size=(1, 13, 4)).astype(np.float32)
    # Also a rectangle of our own, whose grid a bare .npz does not tell: as many as are wanted.
    assert interpolate_posembed(posemb, (2, 6), 1, method=method) is posemb
    assert interpolate_posembed(posemb, (2, 6), 1, (2, 6), method) is posemb
    transposed = interpolate_posembed(posemb, (2, 6), 1, (6, 2), method)
    assert np.abs(transposed - posemb).max() > 0.1  # as many, but known to be of another grid


def test_what_cannot_be_interpolated_is_refused() -> None:
    posemb = np.zeros((1, 17, 2), np.float32)
    with pytest.raises(UserError, match=r"pretrained.grid=\(3, 5\) asks for 15"):
        interpolate_posembed(posemb, grid=(2, 2), source_grid=(3, 5))
    with pytest.raises(UserError, match=r"pretrained.grid=\(-4, -4\)"):
        interpolate_posembed(posemb, grid=(2, 2), source_grid=(-4, -4))
    with pytest.raises(UserError, match=r"shape \[1, N, D\], not \(17, 2\)"):
        interpolate_posembed(posemb[0], grid=(2, 2))


def test_rows_before_the_grid() -> None:
    posemb = np.arange(1, 11, dtype=np.float32).reshape(1, 5, 2)
    cls, dist, grid = posemb[0, 0], posemb[0, 1], posemb[0, 2:]
    plain = replace_prefix(posemb, ("cls", "dist"), ())
    np.testing.assert_array_equal(plain[0], grid)
    one = replace_prefix(posemb, ("cls", "dist"), ("cls",))
    np.testing.assert_array_equal(one[0], [cls, *grid])
    np.testing.assert_array_equal(replace_prefix(one, ("cls",), ("cls", "dist"))[0, 1], [0, 0])
    np.testing.assert_array_equal(replace_prefix(one, ("cls",), ("cls", "dist"))[0, 2:], grid)
    np.testing.assert_array_equal(replace_prefix(one, ("cls",), ("dist",))[0, 1:], grid)
    np.testing.assert_array_equal(replace_prefix(posemb, ("cls", "dist"), ("dist",))[0, 0], dist)
