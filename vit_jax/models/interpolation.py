"""Matrices [out, in] that interpolate along one axis: positions, or the pixels of a patch."""

from typing import Any

import numpy as np

# Weights of the cells at these distances, in numpy or JAX.


def triangle(x: Any) -> Any:
    """1 at 0, linear down to 0 at 1."""
    return (1.0 - x).clip(0.0)


def keys_cubic(x: Any) -> Any:
    """Keys' cubic with a = -1/2, up to 2."""
    near, far = x.clip(0.0, 1.0), x.clip(1.0, 2.0)  # each is 0 where the other is not
    return (1.5 * near - 2.5) * near**2 + 1.0 + ((-0.5 * far + 2.5) * far - 4.0) * far + 2.0


# How positions are interpolated in a call: by these weights, antialiased or not, and whether to the
# smallest square around the grid, so that both axes have one scale (timm's `ar_preserving`).
POSITION_RESIZES: dict[str, tuple[Any, bool, bool]] = {
    "bilinear": (triangle, True, False),  # SigLIP 2
    "bicubic": (keys_cubic, True, False),  # timm's NaFlexViT
    "bicubic_square": (keys_cubic, True, True),
    "linear": (triangle, False, False),
    "linear_square": (triangle, False, True),
}


def weights_at(kind: str | None, index: Any, size: Any, square: Any, size_in: int) -> Any:
    """Weights of `size_in` cells for cell `index` of `size`: [B, N], [B, 1] -> [B, N, size_in].

    `square`: the longer side of the grid, [B, 1]; `kind` of `POSITION_RESIZES`, or None: the first.
    """
    kernel, antialias, is_square = POSITION_RESIZES[kind or "bilinear"]
    ratio = size_in / (square if is_square else size)  # [B, 1]
    centres = ((index + 0.5) * ratio)[..., None]
    distances = abs(np.arange(size_in, dtype=np.float32)[None, None] + 0.5 - centres)
    weights = kernel(distances / ratio.clip(1.0)[..., None] if antialias else distances)
    return weights / weights.sum(-1, keepdims=True)


def corner_aligned_linear(size_in: int, size_out: int) -> np.ndarray:
    """Linear, corner-aligned: output i is at i * (size_in - 1) / (size_out - 1). [out, in]."""
    positions = np.arange(size_out) * ((size_in - 1) / max(size_out - 1, 1))
    return _linear(np.arange(size_in), positions)


def half_pixel_linear(size_in: int, size_out: int, antialias: bool = False) -> np.ndarray:
    """`jax.image.resize(..., "bilinear", antialias=antialias)` along one axis, [out, in]."""
    width = max(size_in / size_out, 1.0) if antialias else 1.0
    return _normalised(triangle(_half_pixel_distances(size_in, size_out) / width))


def patch_resize(size_in: int, size_out: int) -> np.ndarray:
    """For the kernel of a patch ("FlexiViT", 2212.08013, section 3.3), [out, in].

    With B the matrix of the bilinear resize of a patch (pixel centres, not antialiased), the new
    kernel is w' = pinv(B^T) w: the token <B x, w'> of the resized patch is closest to <x, w> in
    mean square over white-noise patches x, and equal for larger patches. Below half the size B
    skips pixels: a poor start unless trained this way.
    """
    return np.linalg.pinv(half_pixel_linear(size_in, size_out).T)


def antialiased_cubic(size_in: int, size_out: int) -> np.ndarray:
    """Keys' cubic with a = -1/2, widened by in / out when downscaling, [out, in].

    Same as PyTorch's `mode="bicubic", antialias=True, align_corners=False`, and PIL.
    """
    x = _half_pixel_distances(size_in, size_out) / max(size_in / size_out, 1.0)
    return _normalised(keys_cubic(x))


def repeating_cubic(size_in: int, size_out: int, offset: float = 0.0) -> np.ndarray:
    """Keys' cubic with a = -3/4, not antialiased, of a border that is repeated, [out, in].

    PyTorch's `mode="bicubic", align_corners=False`, with a `scale_factor` of (out + offset) / in.
    """
    centres = (np.arange(size_out) + 0.5) * size_in / (size_out + offset) - 0.5
    first, rows = np.floor(centres).astype(int), np.arange(size_out)
    matrix = np.zeros((size_out, size_in))
    for k in (-1, 0, 1, 2):
        x = np.abs(centres - first - k)
        near = (1.25 * x - 2.25) * x**2 + 1.0
        far = -0.75 * (((x - 5.0) * x + 8.0) * x - 4.0)
        weights = np.where(x <= 1.0, near, far)
        np.add.at(matrix, (rows, np.clip(first + k, 0, size_in - 1)), weights)
    return matrix


def geometric_linear(size_in: int, size_out: int) -> np.ndarray:
    """BEiT's way for tables of offsets as timm computes it, for odd sizes, [out, in].

    The old offsets lie at the sums of 1, q, q^2, ... at both sides of 0, where q is chosen such
    that they reach as far as the new ones; between them it is linear.
    """
    count, reach = size_in // 2, size_out // 2
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        low, high = (low, q) if (1 - q**count) / (1 - q) > reach else (q, high)
    places = np.cumsum(q ** np.arange(count))
    places = np.concatenate([-places[::-1], [0.0], places])
    return _linear(places, np.arange(-reach, reach + 1))


def _linear(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Linear between the old places [in], at the new ones [out]; [out, in]."""
    return np.stack([np.interp(new, old, unit) for unit in np.eye(len(old))], axis=1)


def _half_pixel_distances(size_in: int, size_out: int) -> np.ndarray:
    """Distances, in input pixels, between all output and input pixel centres, [out, in]."""
    centres = (np.arange(size_out) + 0.5) * (size_in / size_out)
    return np.abs((np.arange(size_in) + 0.5)[None, :] - centres[:, None])


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=1, keepdims=True)
