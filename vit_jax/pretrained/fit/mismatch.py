"""Why parameters do not fit a model, and which config key would make them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.models.create import role_of
from vit_jax.pretrained.fit.posemb import POSEMB
from vit_jax.pretrained.fit.report import list_names

PATCH_KERNEL = "embedding/kernel"
STEM_KERNEL = "conv_root/kernel"  # of a hybrid
BIT_STEM_KERNEL = f"root_block/{STEM_KERNEL}"

_STEM_WIDTH = 64  # of a ResNet's stem, at width factor 1
_BLOCK = "Transformer/encoderblock_0/"
_BLOCK_INDEX = re.compile(r"^Transformer/encoderblock_(\d+)/")
_UNIT = re.compile(r"^block(\d+)/unit(\d+)/")


def image_kernel(like: Collection[str]) -> str:
    """Name of the convolution that reads the image."""
    stems = [name for name in (BIT_STEM_KERNEL, STEM_KERNEL) if name in like]
    return stems[0] if stems else PATCH_KERNEL


def has_group(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def describe_mismatch(
    arrays: Mapping[str, Any], like: Mapping[str, Any], original: Mapping[str, Any]
) -> str:
    """One line that names what does not fit, and the way out; "" where all fits.

    Args:
      arrays: flat names to arrays after adapting, those that were left out or reset excluded.
      like: flat names to arrays or shapes of the model, those that are reset excluded.
      original: flat names to arrays before adapting, for the shapes as the file has them.
    """
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    needed = {name: tuple(leaf.shape) for name, leaf in like.items()}
    missing = [name for name in needed if name not in shapes]
    unexpected = [name for name in shapes if name not in needed]
    different = [name for name in needed if name in shapes and shapes[name] != needed[name]]
    if not (missing or unexpected or different):
        return ""
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({list_names(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected ({list_names(unexpected)})")
    if different:
        described = [
            f"{name} is {tuple(original[name].shape)} and must be {needed[name]}"
            for name in different
        ]
        parts.append(f"{len(different)} of another shape ({list_names(described)})")
    ways_out = _ways_out_of_options(shapes, needed) + _ways_out_of_sizes(shapes, needed)
    if not ways_out:
        ways_out = ["make sure that the file is whole and of this model (model.*)"]
    return (
        f"the pre-trained parameters do not fit the model: {', '.join(parts)}. "
        f"Way out: {'; '.join(ways_out)}."
    )


Shapes = Mapping[str, tuple[int, ...]]


def _dimension(shapes: Shapes, name: str, ndim: int, axis: int) -> int | None:
    """Length of an axis; None where there is no such array or it has other axes."""
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) == ndim else None


def _ways_out_of_options(shapes: Shapes, needed: Shapes) -> list[str]:
    """For what `pretrained.*` can adapt."""
    ways = []
    before, after = shapes.get(PATCH_KERNEL, ()), needed.get(PATCH_KERNEL, ())
    if len(before) == len(after) == 4 and before[:2] != after[:2]:
        size = before[0] if before[0] == before[1] else before[:2]
        ways.append(f"pretrained.resize_patches=True or model.patch_size={size}")
    kernel = image_kernel(needed)
    channels = _dimension(shapes, kernel, 4, 2), _dimension(needed, kernel, 4, 2)
    if None not in channels and channels[0] != channels[1]:
        ways.append(
            f"pretrained.channels=sum, mean or tile, or images of {channels[0]} "
            f"{'channel' if channels[0] == 1 else 'channels'} (now {channels[1]})"
        )
    other = {"cls": ("model.classifier=token", "gap or map"), "dist": ("model.name=deit", "vit")}
    for token, (with_token, without) in other.items():
        if token in shapes and token not in needed:
            ways.append(f"pretrained.class_token=drop or {with_token} (the file has {token!r})")
        elif token in needed and token not in shapes:
            key = with_token.partition("=")[0]
            ways.append(
                f"pretrained.class_token=add or {key}={without} (the file has no {token!r})"
            )
    for name in needed:
        if role_of(name) != "head" or not name.endswith("/kernel"):
            continue
        head = name.removesuffix("/kernel")
        classes = _dimension(shapes, name, 2, 1), _dimension(needed, name, 2, 1)
        if not has_group(shapes, f"{head}/"):
            ways.append(f"pretrained.reset_head=True (the file has no {head})")
        elif None not in classes and classes[0] != classes[1]:
            ways.append(
                f"pretrained.reset_head=True ({head} has {classes[0]} classes, the model "
                f"{classes[1]})"
            )
    return ways


def _ways_out_of_sizes(shapes: Shapes, needed: Shapes) -> list[str]:
    """For what only another model can resolve."""
    if (BIT_STEM_KERNEL in shapes) != (BIT_STEM_KERNEL in needed):
        name = "bit" if BIT_STEM_KERNEL in shapes else "vit or deit"
        return [f"model.name={name}, which the file is of, and its sizes"]
    before, after = _sizes(shapes), _sizes(needed)
    ways = [
        f"model.{key}={before[key]} (now {after[key]})"
        for key in before
        # None is a value of those two, and of the others "it cannot be told".
        if before[key] != after[key]
        and (before[key] is not None or key in ("resnet_layers", "representation_size"))
    ]
    if has_group(shapes, "pre_logits/") and not has_group(needed, "pre_logits/"):
        ways.append("pretrained.reset_head=True (the head kept stands on pre_logits)")
    if has_group(shapes, "MAPHead_0/") != has_group(needed, "MAPHead_0/"):
        has_map = has_group(shapes, "MAPHead_0/")
        ways.append(f"model.classifier={'map' if has_map else 'token or gap'}")
    has_blocks = before["num_layers"] is not None and after["num_layers"] is not None
    if has_blocks and (POSEMB in shapes) != (POSEMB in needed):
        kind = "learned" if POSEMB in shapes else "sincos2d"
        ways.append(f"model.position_embedding={kind}")
    return ways


def _sizes(shapes: Shapes) -> dict[str, Any]:
    """Keyword arguments of the model that the shapes give away."""
    blocks = [int(match[1]) for name in shapes if (match := _BLOCK_INDEX.match(name))]
    units: dict[int, int] = {}
    for name in shapes:
        if match := _UNIT.match(name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = max(units.get(stage, 0), unit)
    stem = image_kernel(shapes)
    has_resnet = stem != PATCH_KERNEL
    width = _dimension(shapes, stem, 4, 3) if has_resnet else None
    return {
        "hidden_size": _dimension(shapes, PATCH_KERNEL, 4, 3),
        "num_layers": max(blocks) + 1 if blocks else None,
        "mlp_dim": _dimension(shapes, f"{_BLOCK}MlpBlock_0/Dense_0/kernel", 2, 1),
        "num_heads": _dimension(
            shapes, f"{_BLOCK}MultiHeadDotProductAttention_0/query/kernel", 3, 1
        ),
        "resnet_layers": tuple(units[stage] for stage in sorted(units)) if has_resnet else None,
        "resnet_width_factor": (width or _STEM_WIDTH) // _STEM_WIDTH,
        "representation_size": _dimension(shapes, "pre_logits/kernel", 2, 1),
    }
