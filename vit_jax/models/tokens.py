"""From pixels to tokens: how many an image gives, without importing JAX."""

from __future__ import annotations

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
    """Sides (height, width) of a token in the image: a patch, times the ResNet's down-sampling.

    Without patches (None) it is a ResNet alone, and a token is a place of its last feature map.
    """
    height, width = (1, 1) if patch_size is None else patch_shape(patch_size)
    factor = _downsampling(resnet_layers)
    return height * factor, width * factor


def _downsampling(resnet_layers: tuple[int, ...] | None) -> int:
    """4 by the stem, and 2 by each stage after the first."""
    return 1 if resnet_layers is None else 4 * 2 ** max(len(resnet_layers) - 1, 0)


def token_grid(
    image_size: tuple[int, int],
    patch_size: int | tuple[int, int] | None,
    resnet_layers: tuple[int, ...] | None = None,
) -> tuple[int, int]:
    """Rows and columns of tokens that images of (height, width) pixels give.

    A ResNet alone (no `patch_size`) takes images of any size: the places of its last feature map.

    Raises:
      UserError: the patch does not divide the image (for a hybrid: its feature map), naming the
        nearest sizes that fit.
    """
    strides = pixels_per_token(patch_size, resnet_layers)
    if patch_size is None:  # every convolution rounds up
        return -(-image_size[0] // strides[0]), -(-image_size[1] // strides[1])
    for pixels, stride in zip(image_size, strides, strict=True):
        if pixels % stride or not pixels:
            below = pixels // stride * stride
            fitting = f"{below} or {below + stride}" if below else f"{stride}"
            factor = _downsampling(resnet_layers)
            resnet = f" (after the ResNet's {factor})" if factor > 1 else ""
            raise UserError(
                f"model.patch_size={patch_size}{resnet} does not divide images of "
                f"{image_size[0]}x{image_size[1]} pixels; resize them in "
                f"the preprocessing so that {pixels} becomes {fitting}."
            )
    return image_size[0] // strides[0], image_size[1] // strides[1]
