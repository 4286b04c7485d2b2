"""A Vision Transformer with the same parameters at other patch sizes (FlexiViT, 2212.08013).

And which take images in shapes of their own (NaFlex, 2502.14786).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.create import family_of
from vit_jax.models.interpolation import half_pixel_linear, patch_resize
from vit_jax.models.views import resize_positions

_KERNEL = "embedding"  # [h, w, C, D]
_ALONG = functools.partial(half_pixel_linear, antialias=True)


def at_patch_size(
    module: Any, image_size: tuple[int, int], patch_size: int
) -> tuple[Any, Callable[[Any], Any]]:
    """The model for patches of `patch_size`, and what makes its parameters of those of `module`.

    The patch embedding is resized by the pseudo-inverse of section 3.3 and the positions
    bilinearly, antialiased, as big_vision does in every update. Linear and jittable, so gradients
    reach the parameters.

    Args:
      module: a Vision Transformer, in the loop or the scan form.
      image_size: height and width of its images, also those of the new model.
      patch_size: in pixels.

    UserError: another model, patches that do not divide the image, or positions of one grid.
    """
    family = family_of(module)
    is_other = family.input != "image" or not family.tokens or hasattr(module, "decoder_num_layers")
    if is_other or getattr(module, "resnet_layers", None) is not None:
        raise UserError(f"a {family.title} is of one patch size; use a Vision Transformer.")
    other, whole = module.clone(patch_size=patch_size), whole_patches(module, image_size)
    grid, new_grid = module.token_grid(whole), other.token_grid(image_size)
    init = functools.partial(module.init, train=False)
    image = jax.ShapeDtypeStruct((1, *whole, 3), jnp.float32)
    params = jax.eval_shape(init, jax.random.key(0), image)["params"]
    if "kernel" not in params.get(_KERNEL, {}):
        raise UserError(f"a {family.title} is of one patch size; use a Vision Transformer.")

    def fit(params: Any) -> Any:
        kernel = params[_KERNEL]["kernel"]
        rows, columns = (patch_resize(old, patch_size) for old in kernel.shape[:2])
        kernel = jnp.einsum(
            "Hh,Ww,hwcd->HWcd", rows, columns, kernel, precision=jax.lax.Precision.HIGHEST
        )
        params = {**params, _KERNEL: {**params[_KERNEL], "kernel": kernel}}
        if new_grid == grid:
            return params
        return resize_positions(module, params, grid, new_grid, _ALONG)

    jax.eval_shape(fit, params)  # raises its errors
    return other, fit


def check_any_shape(module: Any) -> None:
    """Raises UserError for a model that cannot take images in shapes of their own, as `Patches`."""
    family, reason = family_of(module), ""
    if not family.any_shape or getattr(module, "resnet_layers", None) is not None:
        reason = f"a {family.title} takes images of one shape; use a Vision Transformer"
    elif module.outputs_per != "image":
        reason = f"model.classifier={module.classifier!r} is for images of one shape; use 'gap'"
    elif module.position_embedding == "relative" or getattr(module, "relative_bias", False):
        reason = "relative positions are of one shape; use model.position_embedding='learned'"
    if reason:
        raise UserError(f"patchify: {reason}.")


def whole_patches(module: Any, image_size: tuple[int, int]) -> tuple[int, int]:
    """The part of an image that the model's own patches fill: 224 of 240 pixels for 32.

    UserError if not even one fits.
    """
    height, width = module.pixels_per_token
    whole = image_size[0] // height * height, image_size[1] // width * width
    if not min(whole):
        raise UserError(f"model.patch_size={module.patch_size} is larger than the images.")
    return whole
