"""From pixels to tokens: number and layout of an image's tokens; does not import JAX."""

import numpy as np

from vit_jax.errors import UserError


def patch_shape(patch_size: int | tuple[int, ...]) -> tuple[int, int]:
    """(height, width) from an int, a 1-tuple or a pair of positive ints, else UserError."""
    sides = tuple(patch_size) if isinstance(patch_size, tuple | list) else (patch_size,)
    if len(sides) not in (1, 2) or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(
            f"model.patch_size={patch_size!r} must be a positive int or a pair (height, width)."
        )
    return sides[0], sides[-1]


def pixels_per_token(
    patch_size: int | tuple[int, int] | None, resnet_layers: tuple[int, ...] | None
) -> tuple[int, int]:
    """Height and width of a token, or of a cell of a ResNet's last feature map, in pixels."""
    height, width = (1, 1) if patch_size is None else patch_shape(patch_size)
    # A factor of 4 for the stem, and 2 for each stage after the first.
    factor = 1 if resnet_layers is None else 4 * 2 ** max(len(resnet_layers) - 1, 0)
    return height * factor, width * factor


def token_grid(
    image_size: tuple[int, int],
    patch_size: int | tuple[int, int] | None,
    resnet_layers: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Rows and columns of tokens for images of (height, width) pixels; any, without patches.

    UserError, with the nearest sizes that fit, if the patch does not divide the image (for a
    hybrid: its feature map).
    """
    strides = pixels_per_token(patch_size, resnet_layers)
    if patch_size is None:  # every convolution rounds up
        return -(-image_size[0] // strides[0]), -(-image_size[1] // strides[1])
    for pixels, stride in zip(image_size, strides, strict=True):
        if pixels % stride or not pixels:
            below = pixels // stride * stride
            fitting = f"{below} or {below + stride}" if below else f"{stride}"
            factor, _ = pixels_per_token(None, resnet_layers)
            resnet = f" (after the ResNet's {factor})" if factor > 1 else ""
            raise UserError(
                f"model.patch_size={patch_size}{resnet} does not divide images of {image_size[0]}x"
                f"{image_size[1]} pixels; resize them in preprocessing: {pixels} becomes {fitting}."
            )
    return image_size[0] // strides[0], image_size[1] // strides[1]


def sincos2d(grid: tuple[int, int], hidden_size: int) -> np.ndarray:
    """Fixed position embeddings of "Better plain ViT baselines" (2205.01580): [1, h*w, D] float32.

    For cell (x, y) of the grid: sin(x w), cos(x w), sin(y w), cos(y w), D/4 values each, with
    w_k = 10,000^(-k / (D/4 - 1)). UserError: D is not a multiple of 4, or is 4.
    """
    quarter, rest = divmod(hidden_size, 4)
    if rest or quarter < 2:
        text = f"model.hidden_size={hidden_size} must be a multiple of 4, and at least 8"
        raise UserError(f"{text}, for model.position_embedding='sincos2d'.")
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter - 1)
    return sincos(grid, np.float32(1.0) / np.float32(10_000.0) ** exponents)[None]


def sincos(grid: tuple[int, int], omega: np.ndarray) -> np.ndarray:
    """sin(x w), cos(x w), sin(y w) and cos(y w) of each cell (x, y): [D/4] -> [h*w, D]."""
    y, x = np.mgrid[: grid[0], : grid[1]].astype(omega.dtype).reshape(2, -1, 1)  # [h*w, 1] each
    parts = [np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)]
    return np.concatenate(parts, axis=1)
