"""Preprocessing as a string of ops: `decode|inception_crop(224)|flip_lr`.

`|` puts ops in a row; the grammar is Python's. An op is a row of OPS, with arguments by position or
by name. A name in PIPELINES stands for such a row and is expanded by `parse`. To add an op, write
the dataclass (see ops.py) and put it in OPS.

Images stay uint8: the train step scales them to [-1, 1] on the device, a quarter of the bytes to
ship. Photographs are turned upright by their EXIF orientation unless `exif=False`, which gives
exactly the pixels that published accuracies were measured on.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CentralCrop,
    Decode,
    Example,
    FlipLr,
    ImageOp,
    InceptionCrop,
    Normalize,
    Pad,
    RandomAffine,
    RandomCrop,
    Resize,
    ResizeSmall,
    Size,
    ValueRange,
    pair,
)
from vit_jax.data.randaug import RandAug
from vit_jax.data.random_erasing import RandomErasing
from vit_jax.errors import UserError, nearest

Channels = float | tuple[float, float, float]


def _official_train(size: Size, exif: bool = True) -> str:
    """The official code's training pipeline."""
    return f"decode(exif={exif})|inception_crop({size})|flip_lr"


def _official_eval(size: Size, exif: bool = True) -> str:
    """The official code's evaluation: the whole image scaled to `size`, no crop (its issue #39)."""
    height, width = pair(size)
    return f"decode(exif={exif})|resize({height}, {width})"


def _big_vision_eval(size: int, resize: int, exif: bool = True) -> str:
    """Short side to `resize` (256 for 224), then the central `size` x `size`."""
    return f"decode(exif={exif})|resize_small({resize})|central_crop({size})"


def _timm_eval(
    size: int,
    crop_pct: float = 0.9,
    method: str = "bicubic",
    mean: Channels = 0.5,
    std: Channels = 0.5,
    exif: bool = True,
) -> str:
    """timm's evaluation (torchvision's ops on Pillow images): crop_pct 0.9 at 224, 1.0 at 384."""
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct={crop_pct!r} must be in (0, 1]")
    return (
        f"decode(exif={exif})|resize_small({int(size / crop_pct)}, 'pillow_{method}', 'down')"
        f"|central_crop({size}, rounding='nearest'){_scaling(mean, std)}"
    )


def _deit_eval(size: int, crop_pct: float = 0.875, exif: bool = True) -> str:
    """DeiT's evaluation: short side to 256 for 224 (438 for 384); crop_pct is 1.0 for DeiT III."""
    return _timm_eval(size, crop_pct, "bicubic", IMAGENET_MEAN, IMAGENET_STD, exif)


def _huggingface_eval(
    size: Size,
    method: str = "bilinear",
    mean: Channels = 0.5,
    std: Channels = 0.5,
    exif: bool = True,
) -> str:
    """Hugging Face's ViT image processor: the whole image scaled to `size`, with antialiasing."""
    height, width = pair(size)
    return f"decode(exif={exif})|resize({height}, {width}, 'pillow_{method}'){_scaling(mean, std)}"


def _scaling(mean: Channels, std: Channels) -> str:
    """Nothing for the range [-1, 1], which the models give uint8 images by themselves."""
    half = (0.5, (0.5, 0.5, 0.5))
    return "" if mean in half and std in half else f"|normalize({mean}, {std})"


PIPELINES: dict[str, Callable[..., str]] = {
    "official_train": _official_train,
    "official_eval": _official_eval,
    "big_vision_eval": _big_vision_eval,
    "timm_eval": _timm_eval,
    "deit_eval": _deit_eval,
    "huggingface_eval": _huggingface_eval,
}


OPS: dict[str, Callable[..., Any]] = {
    "decode": Decode,
    "resize": Resize,
    "resize_small": ResizeSmall,
    "central_crop": CentralCrop,
    "random_crop": RandomCrop,
    "inception_crop": InceptionCrop,
    "flip_lr": FlipLr,
    "pad": Pad,
    "random_affine": RandomAffine,
    "randaug": RandAug,
    "random_erasing": RandomErasing,
    "value_range": ValueRange,
    "normalize": Normalize,
}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Ops in a row. Picklable; its repr shows every argument of every op."""

    ops: tuple[ImageOp, ...]

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        """Applies the ops; the image comes back contiguous.

        Raises:
          ValueError: an image that cannot be decoded, or is too small for a crop.
        """
        if isinstance(example["image"], bytes) and not isinstance(self.ops[0], Decode):
            raise UserError(
                f"images are encoded files, so preprocess must start with decode: {self}"
            )
        for op in self.ops:
            example = op(example, rng)
        return {**example, "image": np.ascontiguousarray(example["image"])}

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.ops))})"


def parse(spec: str) -> Chain:
    """Builds the ops that `spec` names.

    Raises:
      UserError: a syntax error, an unknown op, or an unknown, missing, ill-typed or impossible
        argument; the message names what is known.
    """
    return Chain(tuple(_build(spec)))


def _build(spec: str) -> list[ImageOp]:
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error) or "too long"
        raise UserError(
            f"preprocess {spec!r}: {reason}. Write ops with literal arguments, separated by '|', "
            "such as 'decode|resize(224)|flip_lr'."
        ) from None
    built: list[ImageOp] = []
    for node in _terms(tree):
        name, args, kwargs = _call(spec, node)
        known: dict[str, Callable[..., Any]] = {**OPS, **PIPELINES}
        if name not in known:
            raise UserError(
                f"preprocess {spec!r}: unknown op {name!r}.{nearest(name, known)} "
                f"Known ops: {', '.join(OPS)}; pipelines: {', '.join(PIPELINES)}."
            )
        try:
            made = known[name](**_bind(known[name], args, kwargs))
        except (TypeError, ValueError) as error:
            end = "" if str(error).endswith("?") else "."
            parameters = inspect.signature(known[name]).parameters.values()
            shown = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
            raise UserError(
                f"preprocess {spec!r}: {ast.unparse(node)}: {error}{end} "
                f"Arguments: {name}({shown})."
            ) from None
        if name in OPS:
            built.append(made)
            continue
        try:
            built += _build(made)
        except UserError as error:
            raise UserError(f"preprocess {spec!r}: {name} stands for {error}") from None
    return built


def _terms(node: ast.expr) -> list[ast.expr]:
    """The operands of `|`, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _call(spec: str, node: ast.expr) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, positional and keyword arguments of `op` or `op(...)`."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    text = ast.unparse(node)
    if not isinstance(call.func, ast.Name):
        raise UserError(
            f"preprocess {spec!r}: {text!r} is not an op; write a name, with or without arguments "
            "in parentheses."
        )
    kwargs = {}
    try:
        args = [ast.literal_eval(value) for value in call.args]
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError
            kwargs[keyword.arg] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"preprocess {spec!r}: arguments must be literals (numbers, strings in quotes, tuples, "
            f"True, False, None), not as in {text!r}."
        ) from None
    return call.func.id, args, kwargs


def _bind(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, converted to the annotated types; TypeError with a reason."""
    signature = inspect.signature(function)
    for name in kwargs:
        if name not in signature.parameters:
            hint = nearest(name, signature.parameters)
            raise TypeError(f"unknown argument {name!r}" + (f".{hint}" if hint else ""))
    bound = signature.bind(*args, **kwargs)
    hints = typing.get_type_hints(function)
    return {name: _cast(name, value, hints[name]) for name, value in bound.arguments.items()}


def _cast(name: str, value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`; lists count as tuples and ints as floats."""
    if isinstance(hint, types.UnionType):
        for member in typing.get_args(hint):
            try:
                return _cast(name, value, member)
            except TypeError:
                continue
    elif typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        if isinstance(value, list | tuple) and len(value) == len(members):
            return tuple(_cast(name, v, member) for v, member in zip(value, members, strict=True))
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # exactly: True is no number
        return value
    raise TypeError(f"{name}={value!r} is not {getattr(hint, '__name__', hint)}")
