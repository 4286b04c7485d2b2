"""From parameters to the model they belong to: every size shows in a shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.models.create import TOKENS
from vit_jax.models.tokens import pixels_per_token, token_grid
from vit_jax.pretrained.fit.mismatch import BIT_STEM_KERNEL, PATCH_KERNEL, image_kernel
from vit_jax.pretrained.fit.posemb import POSEMB, find_source_grid
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.workdir.description import Description

_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/")
_UNIT = re.compile(r"block(\d+)/unit(\d+)/")
_ATTENTION = "MultiHeadDotProductAttention_0"


def infer_model(params: Mapping[str, Any], conventions: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `create_model` for flat names to arrays (or shapes), loop form.

    Args:
      params: in our names; see `vit_jax.parameters.names`.
      conventions: what does not show in a shape: `gelu`, `layer_norm_epsilon`,
        `position_embedding`.

    Raises:
      UserError: an array without which no Vision Transformer is, is missing, or blocks or units
        are not numbered from the first on.
    """
    if BIT_STEM_KERNEL in params:
        return {
            "name": "bit",
            "resnet_layers": _resnet_layers(params),
            "resnet_width_factor": _resnet_width(params),
            "head_bias_init": 0.0,
            "num_classes": _width(params, "head") or 0,
        }
    embedding = _shape(params, "embedding/kernel", 4)
    blocks = {int(match[1]) for name in params if (match := _BLOCK.match(name))}
    _check_numbers("Transformer/encoderblock_", blocks, 0)
    if not blocks:
        raise UserError("there is no Transformer/encoderblock_0: no Transformer layer is stored.")
    block = "Transformer/encoderblock_0"
    _, num_heads, _ = _shape(params, f"{block}/{_ATTENTION}/query/kernel", 3)
    _, mlp_dim = _shape(params, f"{block}/MlpBlock_0/Dense_0/kernel", 2)
    patch = embedding[0] if embedding[0] == embedding[1] else embedding[:2]
    has_pooling = any(name.startswith("MAPHead_0/") for name in params)
    return {
        "name": "deit" if "dist" in params else "vit",
        "patch_size": patch,
        "hidden_size": embedding[-1],
        "num_layers": len(blocks),
        "mlp_dim": mlp_dim,
        "num_heads": num_heads,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "stochastic_depth_rate": 0.0,
        "representation_size": _width(params, "pre_logits"),
        "classifier": "token" if "cls" in params else "map" if has_pooling else "gap",
        "head_bias_init": 0.0,
        "position_embedding": "learned",
        "gelu": "tanh",
        "layer_norm_epsilon": 1e-6,
        "resnet_layers": _resnet_layers(params),
        "resnet_width_factor": _resnet_width(params),
        "num_classes": _width(params, "head") or 0,
        **conventions,
    }


def _shape(params: Mapping[str, Any], name: str, ndim: int) -> tuple[int, ...]:
    if name not in params:
        raise UserError(f"there is no {name}: this is not a whole Vision Transformer.")
    shape = tuple(params[name].shape)
    if len(shape) != ndim or not all(shape):
        raise UserError(f"{name} has shape {shape}, not {ndim} axes; the file is damaged.")
    return shape


def _width(params: Mapping[str, Any], layer: str) -> int | None:
    """Outputs of a dense layer, if anything of it is there: what is missing is found later."""
    for name, ndim in ((f"{layer}/kernel", 2), (f"{layer}/bias", 1)):
        if name in params:
            return _shape(params, name, ndim)[-1]
    return None


def _check_numbers(prefix: str, numbers: set[int], first: int) -> None:
    missing = next(number for number in itertools.count(first) if number not in numbers)
    if numbers and max(numbers) > missing:
        raise UserError(
            f"{prefix}{max(numbers)} is there, but not {prefix}{missing}; the file is not whole."
        )


def _resnet_layers(params: Mapping[str, Any]) -> tuple[int, ...] | None:
    if image_kernel(params) == PATCH_KERNEL:
        return None
    units: dict[int, set[int]] = {}
    for name in params:
        if match := _UNIT.match(name):
            units.setdefault(int(match[1]), set()).add(int(match[2]))
    _check_numbers("block", set(units), 1)
    for stage, numbers in units.items():
        _check_numbers(f"block{stage}/unit", numbers, 1)
    return tuple(len(units[stage]) for stage in sorted(units))


def _resnet_width(params: Mapping[str, Any]) -> int:
    stem = image_kernel(params)
    if stem == PATCH_KERNEL:
        return 1
    width, rest = divmod(_shape(params, stem, 4)[-1], 64)
    if rest or not width:
        raise UserError(f"{stem} does not have a multiple of 64 channels.")
    return width


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
    if "patch_size" not in model:
        height, width = _told_size(stored, image_size)
        grid = token_grid((height, width), None, model["resnet_layers"])
    else:
        pixels = pixels_per_token(model["patch_size"], model["resnet_layers"])
        if POSEMB in stored.params:
            tokens = sum(name in stored.params for name in TOKENS)
            shape = _shape(stored.params, POSEMB, 3)
            grid = find_source_grid(shape, (1, 1), tokens, grid or told_grid(stored))
        elif grid is None:
            size = _told_size(stored, image_size)
            grid = (size[0] // pixels[0], size[1] // pixels[1])
        height, width = grid[0] * pixels[0], grid[1] * pixels[1]
    num_channels = _shape(stored.params, image_kernel(stored.params), 4)[2]
    size_text = f"{height}" if height == width else f"({height}, {width})"
    names = stored.class_names if len(stored.class_names) == model["num_classes"] else ()
    return Description(
        model=model,
        image_shape=(height, width, num_channels),
        grid=grid,
        class_names=names,
        eval_preprocess=stored.eval_preprocess or f"official_eval({size_text})",
    )


def _told_size(stored: Stored, image_size: tuple[int, int] | None) -> tuple[int, int]:
    """[height, width] where no array tells it: positions are computed, or the model has none."""
    size = stored.image_size or image_size
    if size is None:
        raise UserError(
            "no position embeddings are stored, so the file does not tell the size of its images; "
            "give it (--image_size)."
        )
    return size


def told_grid(stored: Stored) -> tuple[int, int] | None:
    """Rows and columns of tokens, where something beside the arrays tells them."""
    if stored.description is not None:
        return stored.description.grid
    kernel = stored.params.get("embedding/kernel")
    if stored.image_size is None or kernel is None or kernel.ndim != 4:
        return None
    pixels = pixels_per_token(kernel.shape[:2], _resnet_layers(stored.params))
    grid = stored.image_size[0] // pixels[0], stored.image_size[1] // pixels[1]
    posemb = stored.params.get(POSEMB)
    tokens = sum(name in stored.params for name in TOKENS)
    if posemb is None or posemb.ndim != 3:
        return None
    return grid if posemb.shape[1] - tokens == grid[0] * grid[1] else None
