"""What the shapes of parameters tell of the model they belong to."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.models.create import TOKENS
from vit_jax.models.tokens import pixels_per_token
from vit_jax.models.vit import POSITIONS

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


def axis_of(params: Mapping[str, Any], name: str, ndim: int, axis: int) -> int | None:
    """Length of an axis; None where there is no such array or it has other axes."""
    shape = params[name].shape if name in params else ()
    return shape[axis] if len(shape) == ndim else None


def grid_of_images(
    params: Mapping[str, Any], image_size: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns of tokens of images [height, width]; None where either is not known."""
    height, width = (axis_of(params, PATCH_KERNEL, 4, axis) for axis in (0, 1))
    if not image_size or not height or not width:
        return None
    pixels = pixels_per_token((height, width), model_sizes(params)["resnet_layers"])
    return image_size[0] // pixels[0], image_size[1] // pixels[1]


def model_sizes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the model by flat names and shapes, loop form; None: cannot be told.

    Of `resnet_layers` and `representation_size` None is a value: there are none.
    """
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
        # What is missing of a layer is found later.
        "representation_size": axis_of(params, "pre_logits/kernel", 2, 1)
        or axis_of(params, "pre_logits/bias", 1, 0),
    }
