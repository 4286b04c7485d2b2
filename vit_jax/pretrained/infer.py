"""From parameters to the model they belong to: every size shows in a shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.models.tokens import pixels_per_token, token_grid
from vit_jax.pretrained.fit.resize import find_source_grid
from vit_jax.pretrained.fit.sizes import (
    BIT_STEM_KERNEL,
    PATCH_KERNEL,
    POSEMB,
    axis_of,
    grid_of_images,
    image_kernel,
    model_sizes,
    num_prefix_tokens,
)
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.workdir.description import Description


def infer_model(params: Mapping[str, Any], conventions: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `create_model` for flat names to arrays (or shapes), loop form.

    Args:
      params: in our names; see `vit_jax.parameters.names`.
      conventions: what does not show in a shape: `gelu`, `layer_norm_epsilon`,
        `position_embedding`.

    Raises:
      UserError: an array without which no Vision Transformer is, is missing or damaged.
    """
    sizes = model_sizes(params)
    head = (axis_of(params, "head/kernel", 2, 1), axis_of(params, "head/bias", 1, 0))
    num_classes = head[0] or head[1] or 0  # what is missing is found later
    if BIT_STEM_KERNEL in params:
        resnet = {key: sizes[key] for key in ("resnet_layers", "resnet_width_factor")}
        return {"name": "bit", **resnet, "num_classes": num_classes}
    height, width = (axis_of(params, PATCH_KERNEL, 4, axis) for axis in (0, 1))
    sizes["patch_size"] = height if height == width else (height, width)
    for key in ("patch_size", "hidden_size", "num_layers", "mlp_dim", "num_heads"):
        if not sizes[key]:
            raise UserError(f"this is no whole Vision Transformer: nothing tells its {key}.")
    has_pooling = any(name.startswith("MAPHead_0/") for name in params)
    return {
        "name": "deit" if "dist" in params else "vit",
        "classifier": "token" if "cls" in params else "map" if has_pooling else "gap",
        "position_embedding": "learned",
        "num_classes": num_classes,
        **sizes,
        **conventions,
    }


def infer_description(
    stored: Stored,
    *,
    grid: tuple[int, int] | None = None,
    image_size: tuple[int, int] | None = None,
) -> Description:
    """What one has to know to use `stored`: its own description, or what the arrays show.

    Args:
      stored: a file's parameters.
      grid: rows and columns of its tokens, where they are no square and nothing tells them.
      image_size: [height, width], where no positions are stored and nothing tells it.

    Raises:
      UserError: sizes cannot be told, or contradict each other.
    """
    if stored.description is not None:
        return stored.description
    model = infer_model(stored.params, stored.conventions)
    patch, layers = model.get("patch_size"), model["resnet_layers"]
    size = stored.image_size or image_size
    if POSEMB in stored.params:
        tokens, shape = num_prefix_tokens(stored.params), stored.params[POSEMB].shape
        guess = grid_of_images(stored.params, size) or (1, 1)
        grid = find_source_grid(shape, guess, tokens, grid or known_grid(stored))
    elif grid is None or patch is None:
        if size is None:
            raise UserError(
                "no position embeddings are stored, so the file does not tell the size of its "
                "images; give it (--image_size)."
            )
        grid = token_grid(size, patch, layers)
    pixels = pixels_per_token(patch, layers)
    height, width = grid[0] * pixels[0], grid[1] * pixels[1]
    if patch is None and size is not None:  # of a ResNet alone, which rounds up
        height, width = size
    num_classes = model["num_classes"]
    _check_class_names(len(stored.class_names), num_classes, "label_names, id2label")
    # Without that array, or with other axes, the file will not fit.
    num_channels = axis_of(stored.params, image_kernel(stored.params), 4, 2) or 3
    size_text = f"{height}" if height == width else f"({height}, {width})"
    return Description(
        model=model,
        image_shape=(height, width, num_channels),
        grid=grid,
        class_names=stored.class_names if num_classes else (),
        eval_preprocess=stored.eval_preprocess or f"official_eval({size_text})",
        probabilities_by=stored.probabilities_by,
    )


def check_description(description: Description) -> Description:
    """Raises UserError where parts of a description contradict each other."""
    model, height_width = description.model, description.image_shape[:2]
    expected = token_grid(height_width, model.get("patch_size"), model.get("resnet_layers"))
    if description.grid != expected:
        raise UserError(
            f"it says grid={description.grid}, but images of {height_width} have {expected} tokens."
        )
    _check_class_names(len(description.class_names), model.get("num_classes"), "class_names")
    return description


def _check_class_names(num_names: int, num_classes: int | None, key: str) -> None:
    if num_names and num_classes and num_names != num_classes:
        raise UserError(f"{num_names} classes are named ({key}), the head has {num_classes}.")


def known_grid(stored: Stored) -> tuple[int, int] | None:
    """Rows and columns of tokens, where something beside the arrays tells them."""
    if stored.description is not None:
        return stored.description.grid
    grid, posemb = grid_of_images(stored.params, stored.image_size), stored.params.get(POSEMB)
    if grid is None or posemb is None or posemb.ndim != 3:
        return None  # not told, or damaged: named as a mismatch
    num_tokens = posemb.shape[1] - num_prefix_tokens(stored.params)
    return grid if num_tokens == grid[0] * grid[1] else None
