"""Positions, patches and channels for other images, as the official code, timm and torch do it."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden, peers
from tests.pretrained import weights
from tests.pretrained.test_adapt import adapt
from vit_jax.errors import UserError
from vit_jax.pretrained.fit.resize import (
    METHODS,
    interpolate_posembed,
    mix_channels,
    resize_patch_kernel,
)
from vit_jax.trees import unflatten_names

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


SOURCES = [(1, 5), (14, 14), (12, 20), (37, 37)]
TARGETS = [(1, 1), (3, 5), (14, 14), (24, 18), (13, 29), (64, 48)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("method", list(METHODS))
def test_interpolation_is_that_of_torch(method: str, source: tuple[int, int]) -> None:
    """Up, down, rectangles, one axis each way. Rounding alone differs: 1e-15 in float64.

    In float32 torch also rounds the positions; at a deviation of 0.1, larger than that of trained
    position embeddings, it was off by up to 1.7e-6 over these grids.
    """
    rng = np.random.default_rng(0)
    for target in TARGETS:
        posemb = rng.normal(size=(1, source[0] * source[1], 8))
        for dtype, scale, tolerance in ((np.float64, 1.0, 1e-12), (np.float32, 0.1, 1e-5)):
            before = (scale * posemb).astype(dtype)
            theirs = torch.nn.functional.interpolate(
                torch.from_numpy(before).reshape(1, *source, 8).permute(0, 3, 1, 2),
                mode="bilinear" if method in ("bilinear", "siglip2") else "bicubic",
                antialias=method in ("bicubic", "siglip2"),
                align_corners=method == "bilinear",
                **_size(method, source, target),
            )
            expected = theirs.permute(0, 2, 3, 1).reshape(1, -1, 8).numpy()
            if source == target and method == "dinov2":
                continue  # which does not interpolate then
            ours = interpolate_posembed(before, target, 0, source, method)
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance, err_msg=str(target))


def _size(method: str, source: tuple[int, int], target: tuple[int, int]) -> dict[str, Any]:
    """DINOv2's `interpolate_pos_encoding` has an offset of 0.1 in its ratio of the sizes."""
    if method != "dinov2":
        return {"size": target}
    return {"scale_factor": tuple((b + 0.1) / a for a, b in zip(source, target, strict=True))}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for timm
@pytest.mark.parametrize("method", ["bicubic", "transformers"])
def test_relative_positions_by_row_and_column(method: str) -> None:
    """BEiT's to another grid, as timm and transformers do it: by rows and columns of offsets."""
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/relative_bias/offsets"
    before = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
    like = {name: np.zeros((11, 13, 3), np.float32)}
    params, report = adapt({name: before}, like, grid=(6, 7), posemb=method)
    assert report["adapted"] == {name: f"{method} 4x3 -> 6x7"}
    table = torch.from_numpy(before).permute(2, 0, 1)  # [3, 7, 5]
    if method == "bicubic":
        timm = peers.import_timm()
        theirs = timm.layers.resize_rel_pos_bias_table(table, (6, 7), (3, 11, 13))
    else:
        theirs = torch.nn.functional.interpolate(table[None], (11, 13), mode="bilinear")[0]
    expected = theirs.permute(1, 2, 0).numpy()
    np.testing.assert_allclose(params[name], expected, rtol=0, atol=1e-5)


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
    with pytest.raises(UserError, match=r"pretrained.grid=\(3, 5\) needs 15"):
        interpolate_posembed(posemb, grid=(2, 2), source_grid=(3, 5))
    with pytest.raises(UserError, match="not a square; give .* rows and columns"):
        interpolate_posembed(posemb, grid=(2, 2), num_prefix_tokens=0)
    with pytest.raises(UserError, match=r"shape \[1, N, D\], not \(17, 2\)"):
        interpolate_posembed(posemb[0], grid=(2, 2))


def resize(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[..., h, w] -> [..., *size] by JAX: bilinear, pixel centres, not antialiased."""
    return np.asarray(jax.image.resize(x, (*x.shape[:-2], *size), "bilinear", antialias=False))


SIZES = [
    *(((4, 4), (7, 7)), ((3, 5), (8, 6)), ((1, 1), (2, 3))),  # larger
    *(((16, 16), (12, 15)), ((3, 2), (1, 1)), ((4, 6), (9, 3))),  # not larger
]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_pseudo_inverse_resize_is_the_least_squares_solution(old, new):
    """min |w - B^T w'|, smallest w' where many are best; B from jax.image.resize, as one matrix.

    Tolerance: JAX builds B in float32, and the condition of B multiplies its rounding (2.6e-5 was
    seen, for 16x16 -> 12x15).
    """
    kernel = np.random.default_rng(0).normal(size=(*old, 3, 4)).astype(np.float32)
    pixels = old[0] * old[1]
    basis = np.eye(pixels, dtype=np.float32).reshape(pixels, *old)
    resize_matrix = resize(basis, new).reshape(pixels, -1).T  # B [new pixels, old pixels]
    expected, *_ = np.linalg.lstsq(
        resize_matrix.T.astype(np.float64), kernel.reshape(pixels, -1), rcond=None
    )
    result = resize_patch_kernel(kernel, new)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected.reshape(*new, 3, 4), rtol=0, atol=1e-4)


def as_seen_before(images: np.ndarray, channels: int, method: str) -> np.ndarray:
    """The image with the old number of channels that the old model has to be shown."""
    new = images.shape[-1]
    if method == "sum":
        grey = images.mean(-1)
        return np.stack([grey] * channels, -1)
    if method == "mean":
        grey = images.sum(-1) / channels
        return np.stack([grey] * channels, -1)
    seen = np.zeros((*images.shape[:-1], channels), np.float32)
    for c in range(new):
        seen[..., c % channels] += images[..., c] * channels / new
    return seen


@pytest.mark.parametrize("method", ["sum", "mean", "tile"])
def test_channels_keep_the_logits_they_promise(method: str) -> None:
    for old, new in ((3, 1), (3, 4), (3, 6), (1, 3), (4, 3), (4, 6)):
        images = np.random.default_rng(1).uniform(-1, 1, (2, 32, 32, new)).astype(np.float32)
        seen = as_seen_before(images, old, method)
        mixing = mix_channels(np.eye(old)[None, None], new, method)[0, 0].T  # [C, C']
        np.testing.assert_allclose(images @ mixing.T, seen, atol=1e-6)
    model = weights.module_of("mu/16")
    flat, like = (weights.seeded(model, (32, 32, channels)) for channels in (4, 6))
    adapted, report = adapt(flat, like, grid=(2, 2), reset_head=False, channels=method)
    expected = weights.logits(model, unflatten_names(flat), seen)
    result = weights.logits(model, unflatten_names(adapted), images)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
    assert list(report["adapted"]) == ["embedding/kernel"]
