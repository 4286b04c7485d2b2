"""Preprocessing as a string of ops: `decode|inception_crop(224)|flip_lr`.

The grammar is Python's: `|` puts ops in a row, each a row of OPS, or of PIPELINES for several.
Images stay uint8: the train step scales them to [-1, 1] on the device. Published accuracies were
measured without turning photographs upright, `exif=False`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data import ops
from vit_jax.data.augment import RandAug, RandomErasing
from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD, Example, Op, Size, pair
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError, nearest

Channels = float | tuple[float, float, float]


def official_train(size: Size, exif: bool = True) -> str:
    """The official code's training pipeline."""
    return f"decode(exif={exif})|inception_crop({size})|flip_lr"


def official_eval(size: Size, exif: bool = True) -> str:
    """The official code's evaluation: the whole image scaled to `size`, no crop (its issue #39)."""
    height, width = pair(size)
    return f"decode(exif={exif})|resize({height}, {width})"


def big_vision_eval(size: int, resize: int, exif: bool = True) -> str:
    """Short side to `resize` (256 for 224), then the central `size` x `size`."""
    return f"decode(exif={exif})|resize_small({resize})|central_crop({size})"


def timm_eval(
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
    small = f"decode(exif={exif})|resize_small({int(size / crop_pct)}, 'pillow_{method}', 'down')"
    return f"{small}|central_crop({size}, rounding='nearest'){_scaling(mean, std)}"


def deit_eval(size: int, crop_pct: float = 0.875, exif: bool = True) -> str:
    """DeiT's evaluation: short side to 256 for 224 (438 for 384); crop_pct is 1.0 for DeiT III."""
    return timm_eval(size, crop_pct, "bicubic", IMAGENET_MEAN, IMAGENET_STD, exif)


def huggingface_eval(
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


_PIPELINES = official_train, official_eval, big_vision_eval, timm_eval, deit_eval, huggingface_eval
PIPELINES: dict[str, Callable[..., str]] = {each.__name__: each for each in _PIPELINES}

OPS: dict[str, Callable[..., Any]] = {
    "decode": ops.Decode,
    "resize": ops.Resize,
    "resize_small": ops.ResizeSmall,
    "central_crop": ops.CentralCrop,
    "corner_crop": ops.CornerCrop,
    "random_crop": ops.RandomCrop,
    "inception_crop": ops.InceptionCrop,
    "flip_lr": ops.FlipLr,
    "random_affine": ops.RandomAffine,
    "randaug": RandAug,
    "random_erasing": RandomErasing,
    "value_range": ops.ValueRange,
    "normalize": ops.Normalize,
    "tokenize": Tokenize,
}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Ops in a row. Picklable; its repr shows every argument of every op."""

    ops: tuple[Op, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that the ops read of the data set."""
        return tuple(dict.fromkeys(column for op in self.ops for column in op.columns))

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        """Applies the ops; ValueError for an image that cannot be decoded, or is too small."""
        if isinstance(example["image"], bytes) and not isinstance(self.ops[0], ops.Decode):
            raise UserError(f"preprocess must start with decode, the images are files: {self}")
        for op in self.ops:
            example = op(example, rng)
        return {**example, "image": np.ascontiguousarray(example["image"])}


def parse(spec: str) -> Chain:
    """Builds the ops that `spec` names; UserError: see `evaluate_calls`."""
    chain: list[Op] = []
    for name, made in evaluate_calls("preprocess", spec, {**OPS, **PIPELINES}):
        try:
            chain += [made] if name in OPS else parse(made).ops
        except UserError as error:
            raise UserError(f"preprocess {spec!r}: {name} stands for {error}") from None
    return Chain(tuple(chain))


def encode_texts(spec: str, texts: Sequence[str]) -> np.ndarray:
    """What the op of `spec` that reads a column of texts makes of them: `text`, int32 [n, T].

    UserError: there is none, or more than one.
    """
    ops = [op for op in parse(spec).ops if op.columns]
    if len(ops) != 1 or len(ops[0].columns) != 1:
        raise UserError(f"preprocess {spec!r} must have one op that reads texts: tokenize(...).")
    [column], rng = ops[0].columns, np.random.default_rng(0)
    return np.stack([ops[0]({column: text}, rng)["text"] for text in texts])


def evaluate_calls(
    key: str, text: str, table: Mapping[str, Callable[..., Any]]
) -> list[tuple[str, Any]]:
    """Calls what the terms of `a|b(1, c=2)` name in `table`; gives (name, result) for each.

    UserError for bad syntax, an unknown name, or an unknown, missing or impossible argument.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise UserError(f"{key} {text!r}: {error.msg}; write it like 'a|b(224)|c(d=1)'.") from None
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        terms.append(node.right)
        node = node.left
    return [_evaluate(f"{key} {text!r}", each, table) for each in [node, *reversed(terms)]]


def _evaluate(
    where: str, node: ast.expr, table: Mapping[str, Callable[..., Any]]
) -> tuple[str, Any]:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    text = ast.unparse(node)
    if not isinstance(call.func, ast.Name):
        raise UserError(f"{where}: {text!r} is not a name, with or without (arguments).")
    name = call.func.id
    if name not in table:
        known = ", ".join(table)
        raise UserError(f"{where}: unknown op {name!r}.{nearest(name, table)} Known: {known}.")
    try:
        args = [ast.literal_eval(value) for value in call.args]
        kwargs = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except ValueError:
        raise UserError(f"{where}: {text!r}: arguments must be literals.") from None
    function = table[name]
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    try:
        for key in kwargs:
            if key not in signature.parameters:
                raise TypeError(f"unknown argument {key!r}.{nearest(key, signature.parameters)}")
        bound = signature.bind(*args, **kwargs).arguments
        typed = {key: _cast(key, value, hints[key]) for key, value in bound.items()}
        return name, function(**typed)
    except (TypeError, ValueError) as error:
        parameters = signature.parameters.values()
        shown = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
        raise UserError(f"{where}: {text}: {error} (arguments: {name}({shown})).") from None


def _cast(name: str, value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`; lists count as tuples and ints as floats."""
    members = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        for member in members:
            with contextlib.suppress(TypeError):
                return _cast(name, value, member)
    elif typing.get_origin(hint) is Literal:
        if value in members:
            return value
        raise TypeError(f"{name}={value!r} must be one of {', '.join(map(str, members))}")
    elif typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple) and len(value) == len(members):
            return tuple(_cast(name, v, member) for v, member in zip(value, members, strict=True))
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # exactly: True is no number
        return value
    raise TypeError(f"{name}={value!r} is not {getattr(hint, '__name__', hint)}")
