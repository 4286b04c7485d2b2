"""Positions, patches and channels for other images, as the official code, timm and torch do it."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.flat_params import adapt
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.models.resnet import weight_standardize
from vit_jax.pretrained.fit.resize import interpolate_posembed, mix_channels, resize_patch_kernel
from vit_jax.trees import flatten_names, unflatten_names

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


@pytest.mark.parametrize("source", [(3, 5), (4, 4), (9, 2)])
@pytest.mark.parametrize("target", [(6, 10), (10, 6), (1, 1), (4, 7)])
def test_rectangles_keep_corners_and_are_linear_along_each_axis(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    """A field linear in row and column is reproduced exactly, so no axis is swapped."""

    def field(grid: tuple[int, int]) -> np.ndarray:
        rows, columns = (np.linspace(0, 1, size) for size in grid)
        values = 2.0 * rows[:, None] + 5.0 * columns[None, :]
        return values.reshape(1, -1, 1).astype(np.float32)

    result = interpolate_posembed(
        field(source), grid=target, num_prefix_tokens=0, source_grid=source
    )
    expected = field(target)
    np.testing.assert_allclose(result, expected, atol=1e-6)


SOURCES = [(1, 5), (3, 2), (7, 7), (14, 14), (12, 20), (24, 24), (37, 37)]
TARGETS = [(1, 1), (3, 5), (7, 7), (14, 14), (24, 18), (32, 32), (9, 4), (13, 29), (64, 48)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("method", ["bicubic", "transformers", "dinov2"])
def test_bicubic_is_that_of_torch(method: str, source: tuple[int, int]) -> None:
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
                mode="bicubic",
                antialias=method == "bicubic",
                align_corners=False,
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


@pytest.mark.parametrize("method", ["bicubic", "transformers"])
def test_relative_positions_by_row_and_column(method: str) -> None:
    """BEiT's to another grid: those of rows and columns, not of tokens, see adapt.py."""
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/relative_bias/offsets"
    before = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
    like = {name: np.zeros((11, 13, 3), np.float32)}
    found, report = adapt({name: before}, like, grid=(6, 7), posemb=method)
    assert report["adapted"] == {name: f"{method} 4x3 -> 6x7"}
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(before).permute(2, 0, 1)[None],
        size=(11, 13),
        mode="bicubic",
        antialias=method == "bicubic",
    )
    expected = theirs[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5)


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
    with pytest.raises(UserError, match=r"pretrained.grid=\(-4, -4\)"):
        interpolate_posembed(posemb, grid=(2, 2), source_grid=(-4, -4))
    with pytest.raises(UserError, match="not a square; give .* rows and columns"):
        interpolate_posembed(posemb, grid=(2, 2), num_prefix_tokens=0)
    with pytest.raises(UserError, match=r"shape \[1, N, D\], not \(17, 2\)"):
        interpolate_posembed(posemb[0], grid=(2, 2))


Flat = dict[str, Any]


@functools.cache
def build(shape: tuple[int, int, int], **kwargs: Any) -> tuple[Any, Flat]:
    """A tiny model for images of `shape`, and parameters that make every part of it count."""
    model = create_model(**{**VARIANTS["mu/16"], "num_classes": 5, **kwargs})
    flat = flatten_names(golden.abstract_params(model, (1, *shape)))
    return model, {name: golden.fill(name, leaf.shape, "fanin") for name, leaf in flat.items()}


@functools.cache
def compiled(model: Any) -> Any:
    return jax.jit(lambda params, images: model.apply({"params": params}, images, train=False))


def logits(model: Any, flat: Flat, images: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(model)(unflatten_names(flat), images))


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def resize(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[..., h, w] -> [..., *size] by JAX: bilinear, pixel centres, not antialiased."""
    return np.asarray(jax.image.resize(x, (*x.shape[:-2], *size), "bilinear", antialias=False))


SIZES = [
    *(((4, 4), (7, 7)), ((8, 8), (16, 16)), ((3, 5), (8, 6)), ((1, 1), (2, 3))),  # larger
    *(((8, 8), (4, 4)), ((16, 16), (12, 15)), ((3, 2), (1, 1)), ((4, 6), (9, 3))),  # not larger
]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_pseudo_inverse_resize_is_the_least_squares_solution(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
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


@pytest.mark.parametrize(("old", "new"), [SIZES[0], SIZES[2]])
def test_larger_patches_keep_their_tokens(old: tuple[int, int], new: tuple[int, int]) -> None:
    """The same logits where every patch of the image was resized along with the kernel."""
    grid = (2, 3)
    model, flat = build((grid[0] * old[0], grid[1] * old[1], 3), patch_size=old)
    new_model, like = build((grid[0] * new[0], grid[1] * new[1], 3), patch_size=new)
    adapted, report = adapt(flat, like, grid=grid, reset_head=False, resize_patches=True)
    patches = random_images(2, *grid, 3, *old)

    def image(patches: np.ndarray) -> np.ndarray:
        b, rows, columns, c, h, w = patches.shape
        return patches.transpose(0, 1, 4, 2, 5, 3).reshape(b, rows * h, columns * w, c)

    before = logits(model, flat, image(patches))
    larger = image(resize(patches, new))
    np.testing.assert_allclose(logits(new_model, adapted, larger), before, rtol=0, atol=1e-5)
    text = f"pseudo-inverse resize {old[0]}x{old[1]} -> {new[0]}x{new[1]}"
    assert report["adapted"] == {"embedding/kernel": text}

    # Resizing the kernel as if it were an image would not do.
    kernel = flat["embedding/kernel"].transpose(2, 3, 0, 1)
    naive = {**adapted, "embedding/kernel": resize(kernel, new).transpose(2, 3, 0, 1)}
    assert np.abs(logits(new_model, naive, larger) - before).max() > 0.1


@pytest.mark.parametrize(
    ("old", "new", "gain"), [(16, 8, 1), (16, 32, 1), (16, 14, 1), (16, 4, 0.25)]
)
def test_token_of_a_constant_image(old: int, new: int, gain: float) -> None:
    """A flat kernel sees a constant image as it did, but where patches shrink to less than half."""
    kernel = np.ones((old, old, 1, 1), np.float32)
    result = resize_patch_kernel(kernel, (new, new)).sum() / kernel.sum()
    np.testing.assert_allclose(result, gain, rtol=1e-5)


CHANNELS = [(3, 1), (3, 4), (3, 6), (1, 3), (4, 3), (4, 6)]


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
@pytest.mark.parametrize(("old", "new"), CHANNELS)
def test_channels_keep_the_logits_they_promise(old: int, new: int, method: str) -> None:
    model, flat = build((32, 32, old))
    new_model, like = build((32, 32, new))
    adapted, report = adapt(flat, like, grid=(2, 2), reset_head=False, channels=method)
    images = random_images(2, 32, 32, new)
    expected = logits(model, flat, as_seen_before(images, old, method))
    np.testing.assert_allclose(logits(new_model, adapted, images), expected, rtol=0, atol=1e-5)
    assert list(report["adapted"]) == ["embedding/kernel"]
    mixing = mix_channels(np.eye(old)[None, None], new, method)[0, 0].T  # [C, C']
    np.testing.assert_allclose(images @ mixing.T, as_seen_before(images, old, method), atol=1e-6)


def hybrid(channels: int) -> tuple[Any, Flat]:
    return build((32, 32, channels), resnet_layers=(), patch_size=4)


def test_a_hybrid_keeps_its_logits_for_repeated_channels() -> None:
    """Standardisation undoes the scale, and the group norm what is left of it."""
    model, flat = hybrid(3)
    images = random_images(2, 32, 32, 3)
    new_model, like = hybrid(6)
    adapted, report = adapt(flat, like, grid=(2, 2), reset_head=False, channels="tile")
    assert list(report["adapted"]) == ["conv_root/kernel"]
    result = logits(new_model, adapted, np.concatenate([images, images], -1))
    # The epsilons of the two norms stand beside other scales now: 8e-6 was seen.
    np.testing.assert_allclose(result, logits(model, flat, images), rtol=0, atol=1e-4)


def test_a_hybrid_s_grey_features_are_right_up_to_a_factor_each() -> None:
    """What `sum` keeps where the kernel is standardised, and what it does not."""
    model, flat = hybrid(3)
    new_model, like = hybrid(1)
    adapted, _ = adapt(flat, like, grid=(2, 2), reset_head=False, channels="sum")
    old_kernel, kernel = (
        np.asarray(weight_standardize(f["conv_root/kernel"])) for f in (flat, adapted)
    )
    grey_kernel = old_kernel.sum(2, keepdims=True)  # what a grey image meets
    factors = (grey_kernel * kernel).sum((0, 1, 2)) / (kernel**2).sum((0, 1, 2))
    np.testing.assert_allclose(kernel * factors, grey_kernel, rtol=0, atol=1e-4)
    assert factors.min() > 0
    assert factors.max() > 1.2 * factors.min()  # one factor per output channel, not one for all

    images = random_images(2, 32, 32, 1)
    repeated = logits(model, flat, np.repeat(images, 3, axis=-1))
    assert np.abs(logits(new_model, adapted, images) - repeated).max() > 1e-2
    mean, _ = adapt(flat, like, grid=(2, 2), reset_head=False, channels="mean")
    np.testing.assert_allclose(
        logits(new_model, mean, images), logits(new_model, adapted, images), rtol=0, atol=1e-4
    )
