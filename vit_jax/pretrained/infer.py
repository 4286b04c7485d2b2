"""From parameters to the model they belong to: every size shows in a shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.models.create import TOKENS
from vit_jax.models.description import Description
from vit_jax.models.tokens import pixels_per_token, token_grid
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.fit.resize import find_source_grid
from vit_jax.pretrained.formats.stored import Stored, check_description

Params = Mapping[str, Any]  # flat names to arrays or shapes, loop form

POSEMB = POSITIONS
PATCH_KERNEL = "embedding/kernel"
STEM_KERNEL = "conv_root/kernel"  # of a hybrid
BIT_STEM_KERNEL = f"root_block/{STEM_KERNEL}"

_STEM_WIDTH = 64  # of a ResNet's stem, at width factor 1
_BLOCK = "Transformer/encoderblock_0"


def image_kernel(names: Collection[str]) -> str:
    """Name of the convolution that reads the image."""
    return next((n for n in (BIT_STEM_KERNEL, STEM_KERNEL) if n in names), PATCH_KERNEL)


def num_prefix_tokens(names: Collection[str]) -> int:
    """Number of tokens before those of the image: class and distillation token."""
    return sum(token in names for token in TOKENS)


def axis_of(params: Params, name: str, ndim: int, axis: int) -> int | None:
    """Length of an axis; None where there is no such array or it has other axes."""
    shape = params[name].shape if name in params else ()
    return shape[axis] if len(shape) == ndim else None


def layer_width(params: Params, layer: str) -> int | None:
    """Outputs of a dense layer, of which the kernel or the bias may be missing."""
    return axis_of(params, f"{layer}/kernel", 2, 1) or axis_of(params, f"{layer}/bias", 1, 0)


def patch_sides(params: Params) -> tuple[Any, Any]:
    """Height and width of a patch, None where they cannot be told."""
    return axis_of(params, PATCH_KERNEL, 4, 0), axis_of(params, PATCH_KERNEL, 4, 1)


def grid_of_images(params: Params, image_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of tokens of images [height, width]; None where either is not known."""
    height, width = patch_sides(params)
    if not image_size or not height or not width:
        return None
    pixels = pixels_per_token((height, width), model_sizes(params)["resnet_layers"])
    return image_size[0] // pixels[0], image_size[1] // pixels[1]


def known_grid(stored: Stored) -> tuple[int, int] | None:
    """Rows and columns of tokens, where something beside the arrays tells them."""
    if stored.description is not None:
        return stored.description.grid
    grid, posemb = grid_of_images(stored.params, stored.image_size), stored.params.get(POSEMB)
    if grid is None or posemb is None or posemb.ndim != 3:
        return None  # not told, or damaged: named as a mismatch
    num_tokens = posemb.shape[1] - num_prefix_tokens(stored.params)
    return grid if num_tokens == grid[0] * grid[1] else None


def model_sizes(params: Params) -> dict[str, Any]:
    """Keyword arguments of the model by names and shapes; None: not told, or there is none."""
    blocks = [0]  # how many there must be; a damaged name may hold any number
    units: dict[int, int] = {}
    for name in params:
        if match := re.match(r"Transformer/encoderblock_(\d+)/", name):
            blocks.append(int(match[1]) + 1)
        elif match := re.match(r"block(\d+)/unit(\d+)/", name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = min(max(units.get(stage, 0), unit), len(params))
    stem = image_kernel(params)
    has_resnet = stem != PATCH_KERNEL
    width = axis_of(params, stem, 4, 3) if has_resnet else None
    attention = f"{_BLOCK}/MultiHeadDotProductAttention_0"
    return {
        "hidden_size": axis_of(params, PATCH_KERNEL, 4, 3),
        "num_layers": min(max(blocks), len(params)) or None,
        "mlp_dim": axis_of(params, f"{_BLOCK}/MlpBlock_0/Dense_0/kernel", 2, 1),
        "num_heads": axis_of(params, f"{attention}/query/kernel", 3, 1),
        "resnet_layers": tuple(units[stage] for stage in sorted(units)) if has_resnet else None,
        "resnet_width_factor": (width or _STEM_WIDTH) // _STEM_WIDTH,
        "representation_size": layer_width(params, "pre_logits"),
    }


def infer_model(params: Params, conventions: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `create_model`, of which `conventions` do not show in a shape.

    UserError: an array without which no Vision Transformer is, is missing or damaged.
    """
    sizes = model_sizes(params)
    num_classes = layer_width(params, "head") or 0
    if BIT_STEM_KERNEL in params:
        resnet = {key: sizes[key] for key in ("resnet_layers", "resnet_width_factor")}
        return {"name": "bit", **resnet, "num_classes": num_classes}
    height, width = patch_sides(params)
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
    """What the arrays of `stored`, which has no description, and the files beside it show.

    `grid`, rows and columns of tokens, is for files that are no square, `image_size` for those
    without positions. UserError: sizes cannot be told, or contradict each other.
    """
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
    # Without that array, or with other axes, the file will not fit.
    num_channels = axis_of(stored.params, image_kernel(stored.params), 4, 2) or 3
    size_text = f"{height}" if height == width else f"({height}, {width})"
    description = Description(
        model=model,
        image_shape=(height, width, num_channels),
        grid=grid,
        class_names=stored.class_names if model["num_classes"] else (),
        eval_preprocess=stored.eval_preprocess or f"official_eval({size_text})",
        probabilities_by=stored.probabilities_by,
    )
    return check_description(description, "label_names, id2label")
