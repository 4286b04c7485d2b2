"""What the shapes of parameters tell: the sizes of their model, and why they do not fit another."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.errors import list_names
from vit_jax.models.create import TOKENS, role_of
from vit_jax.models.tokens import pixels_per_token
from vit_jax.models.vit import POSITIONS

Params = Mapping[str, Any]  # flat names to arrays or shapes

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


def grid_of_images(params: Params, image_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of tokens of images [height, width]; None where either is not known."""
    height, width = (axis_of(params, PATCH_KERNEL, 4, axis) for axis in (0, 1))
    if not image_size or not height or not width:
        return None
    pixels = pixels_per_token((height, width), model_sizes(params)["resnet_layers"])
    return image_size[0] // pixels[0], image_size[1] // pixels[1]


def model_sizes(params: Params) -> dict[str, Any]:
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


def has_group(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def describe_mismatch(arrays: Params, like: Params, original: Params) -> str:
    """One line that names what does not fit, and the way out; "" where all fits.

    Args:
      arrays: after adapting, those that were left out or reset excluded.
      like: of the model, those that are reset excluded.
      original: before adapting, for the shapes as the file has them.
    """
    missing = [name for name in like if name not in arrays]
    unexpected = [name for name in arrays if name not in like]
    different = [
        f"{name} is {tuple(original[name].shape)} and must be {tuple(like[name].shape)}"
        for name in like
        if name in arrays and tuple(arrays[name].shape) != tuple(like[name].shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": different}
    parts = [f"{len(names)} {kind} ({list_names(names)})" for kind, names in kinds.items() if names]
    if not parts:
        return ""
    hints = _option_hints(arrays, like) + _size_hints(arrays, like)
    if not hints:
        hints = ["make sure that the file is whole and of this model (model.*)"]
    return (
        f"the pre-trained parameters do not fit the model: {', '.join(parts)}. "
        f"Way out: {'; '.join(hints)}."
    )


def _option_hints(arrays: Params, like: Params) -> list[str]:
    """For what `pretrained.*` can adapt."""
    hints = []
    before, after = (
        [axis_of(params, PATCH_KERNEL, 4, axis) for axis in (0, 1)] for params in (arrays, like)
    )
    if None not in before + after and before != after:
        size = before[0] if before[0] == before[1] else tuple(before)
        hints.append(f"pretrained.resize_patches=True or model.patch_size={size}")
    old, new = (axis_of(params, image_kernel(like), 4, 2) for params in (arrays, like))
    if None not in (old, new) and old != new:
        hints.append(
            f"pretrained.channels=sum, mean or tile, or images of {old} "
            f"{'channel' if old == 1 else 'channels'} (now {new})"
        )
    other = {"cls": ("model.classifier=token", "gap or map"), "dist": ("model.name=deit", "vit")}
    for token, (with_token, without) in other.items():
        if token in arrays and token not in like:
            hints.append(f"pretrained.class_token=drop or {with_token} (the file has {token!r})")
        elif token in like and token not in arrays:
            key = with_token.partition("=")[0]
            hints.append(
                f"pretrained.class_token=add or {key}={without} (the file has no {token!r})"
            )
    for name in like:
        if role_of(name) != "head" or not name.endswith("/kernel"):
            continue
        head = name.removesuffix("/kernel")
        old, new = (axis_of(params, name, 2, 1) for params in (arrays, like))
        if not has_group(arrays, f"{head}/"):
            hints.append(f"pretrained.reset_head=True (the file has no {head})")
        elif None not in (old, new) and old != new:
            hints.append(f"pretrained.reset_head=True ({head} has {old} classes, the model {new})")
    return hints


def _size_hints(arrays: Params, like: Params) -> list[str]:
    """For what only another model can resolve."""
    if (BIT_STEM_KERNEL in arrays) != (BIT_STEM_KERNEL in like):
        name = "bit" if BIT_STEM_KERNEL in arrays else "vit or deit"
        return [f"model.name={name}, which the file is of, and its sizes"]
    before, after = model_sizes(arrays), model_sizes(like)
    hints = [
        f"model.{key}={before[key]} (now {after[key]})"
        for key in before
        if before[key] != after[key]
        and (before[key] is not None or key in ("resnet_layers", "representation_size"))
    ]
    if has_group(arrays, "pre_logits/") and not has_group(like, "pre_logits/"):
        hints.append("pretrained.reset_head=True (the head kept stands on pre_logits)")
    has_map = has_group(arrays, "MAPHead_0/")
    if has_map != has_group(like, "MAPHead_0/"):
        hints.append(f"model.classifier={'map' if has_map else 'token or gap'}")
    has_blocks = before["num_layers"] is not None and after["num_layers"] is not None
    if has_blocks and (POSEMB in arrays) != (POSEMB in like):
        kind = "learned" if POSEMB in arrays else "sincos2d"
        hints.append(f"model.position_embedding={kind}")
    return hints
