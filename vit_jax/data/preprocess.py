"""Preprocessing as a string of ops: `decode|inception_crop(224)|flip_lr`.

The syntax is Python's: `|` chains ops, each a row of OPS, or of PIPELINES for several at once, or
any Python function, see `PythonOp`. Images stay uint8: the step scales them to [-1, 1] on the
device. Published accuracies were measured without applying EXIF orientation, `exif=False`.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data import ops, torchvision_ops
from vit_jax.data.augment import RandAug, RandomErasing
from vit_jax.data.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Example,
    ImageOp,
    Op,
    Patchify,
    Rng,
    Size,
    pair,
)
from vit_jax.data.sources import describe
from vit_jax.data.text import Tokenize
from vit_jax.errors import UserError, one_line
from vit_jax.wording import nearest

Channels = float | tuple[float, float, float]


def official_train(size: Size, exif: bool = True, reduced: bool = False) -> str:
    """The official code's training pipeline."""
    return f"decode(exif={exif}, reduced={reduced})|inception_crop({size})|flip_lr"


def official_eval(size: Size, exif: bool = True) -> str:
    """The official code's evaluation: the whole image resized to `size`, no crop (issue #39)."""
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
    """Hugging Face's ViT image processor: the whole image resized to `size`, antialiased."""
    height, width = pair(size)
    return f"decode(exif={exif})|resize({height}, {width}, 'pillow_{method}'){_scaling(mean, std)}"


def _scaling(mean: Channels, std: Channels) -> str:
    """Nothing for the range [-1, 1], to which the models scale uint8 images themselves."""
    half = (0.5, (0.5, 0.5, 0.5))
    return "" if mean in half and std in half else f"|normalize({mean}, {std})"


_TRAIN = official_train, torchvision_ops.deit3_train, torchvision_ops.dino_train
_EVAL = official_eval, big_vision_eval, timm_eval, deit_eval, huggingface_eval
PIPELINES: dict[str, Callable[..., str]] = {row.__name__: row for row in (*_TRAIN, *_EVAL)}

OPS: dict[str, Callable[..., Any]] = {
    "decode": ops.Decode,
    "resize": ops.Resize,
    "resize_small": ops.ResizeSmall,
    "central_crop": ops.CentralCrop,
    "corner_crop": ops.CornerCrop,
    "random_crop": ops.RandomCrop,
    "inception_crop": ops.InceptionCrop,
    "random_area": ops.RandomArea,
    "random_resized_crop": torchvision_ops.RandomResizedCrop,
    "flip_lr": ops.FlipLr,
    "random_affine": ops.RandomAffine,
    "randaug": RandAug,
    "random_erasing": RandomErasing,
    "color_jitter": torchvision_ops.ColorJitter,
    "gaussian_blur": torchvision_ops.GaussianBlur,
    "grayscale": torchvision_ops.Grayscale,
    "solarize": torchvision_ops.Solarize,
    "three_augment": torchvision_ops.ThreeAugment,
    "dino_crops": torchvision_ops.DinoCrops,
    "block_masks": torchvision_ops.BlockMasks,
    "value_range": ops.ValueRange,
    "normalize": ops.Normalize,
    "patchify": Patchify,
    "tokenize": Tokenize,
}


@dataclasses.dataclass(frozen=True)
class PythonOp(ImageOp):
    """`my_package.my_op(3)`, which returns a function of (image uint8 [H, W, C], rng) -> image.

    The returned image is uint8 or float32 [H, W, C]; all its randomness must come from `rng`, a
    NumPy Generator. The module may be in the current folder. A model's files cannot use one, see
    `check_no_code`.
    """

    call: str

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        made = np.asarray(load_function(self.call)(image.copy(), rng))  # they may modify it
        if made.ndim != 3 or made.dtype not in (np.uint8, np.float32):
            gives = f"preprocess: {self.call} gives {describe(made)}"
            raise UserError(f"{gives}; it must be uint8 or float32 [H, W, C].")
        return made


@functools.cache  # once per process
def load_function(call: str) -> Callable[..., Any]:
    """The function of a PythonOp; UserError if it cannot be imported or built."""
    name, args, kwargs = _read_call("preprocess", ast.parse(call, mode="eval").body)
    module, _, attribute = name.rpartition(".")
    if (here := os.getcwd()) not in sys.path:  # as for `python -m`; scripts/ has its own folder
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module), attribute)(*args, **kwargs)
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        places = f"module {module!r} is searched in {here} and on PYTHONPATH"
        raise UserError(f"preprocess: {call} cannot be used ({reason}); {places}.") from error
    if not callable(function):
        raise UserError(f"preprocess: {call} gives no function (image, rng) -> image.")
    return function


def check_no_code(where: str, spec: str) -> None:
    """Raises a UserError if ops named in a file are Python functions: files are not trusted."""
    calls = []
    with contextlib.suppress(UserError):  # reported when images are read; texts have no ops
        calls = [op.call for op in parse(spec).ops if isinstance(op, PythonOp)]
    if calls:
        raise UserError(
            f"{where}: its preprocessing runs Python code, {calls[0]}, which is not safe; if you "
            f'trust it, pass it yourself: --preprocess="{spec}" (preprocess= in Python).'
        )


@dataclasses.dataclass(frozen=True)
class Chain:
    """A sequence of ops. Picklable; its repr shows every argument of every op."""

    ops: tuple[Op, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset that the ops read."""
        return tuple(dict.fromkeys(column for op in self.ops for column in op.columns))

    @property
    def patchify(self) -> Patchify | None:
        """The op that keeps the shapes of images, if there is one."""
        return next((op for op in self.ops if isinstance(op, Patchify)), None)

    def __call__(self, example: Example, rng: Rng) -> Example:
        """Applies the ops; ValueError if an image cannot be decoded, or is too small."""
        if isinstance(example["image"], bytes) and not isinstance(self.ops[0], ops.Decode):
            raise UserError(f"preprocess must start with decode, as images are files: {self}")
        match self.ops:
            case (ops.Decode() as decode, ops.RandomBox() as box, *rest) if not (
                ops.MAPS.keys() & example.keys()
            ):
                example = {**example, "image": box.decode(example["image"], decode, rng)}
            case rest:
                pass
        ops.check_maps(example)
        for op in rest:
            example = op(example, rng)
            ops.check_maps(example)
        return {**example, "image": np.ascontiguousarray(example["image"])}


def parse(spec: str) -> Chain:
    """Builds the ops named in `spec`; for UserErrors see `evaluate_calls`."""
    chain: list[Op] = []
    table = {**OPS, **PIPELINES}
    for made in evaluate_calls("preprocess", spec, table, dotted=PythonOp):
        try:
            chain += [made] if isinstance(made, Op) else parse(made).ops
        except UserError as error:
            raise UserError(f"preprocess {spec!r} expands to {error}") from None
    for op, following in itertools.zip_longest(chain, chain[1:]):
        if getattr(op, "reduced", False) and not isinstance(following, ops.RandomBox):
            raise UserError(f"preprocess {spec!r}: a random crop must follow decode(reduced=True).")
    after = itertools.dropwhile(lambda op: not isinstance(op, Patchify), chain)
    if any(getattr(op, "moves", False) is not False for op in [*after][1:]):
        raise UserError(f"preprocess {spec!r}: only scaling of values may follow patchify.")
    return Chain(tuple(chain))


def encode_texts(spec: str, texts: Sequence[str]) -> np.ndarray:
    """Encodes texts with the only text op of `spec`: int32 [n, T]; UserError: none, or several."""
    ops = [op for op in parse(spec).ops if op.columns]
    if len(ops) != 1 or len(ops[0].columns) != 1:
        raise UserError(f"preprocess {spec!r} must have exactly one text op: tokenize(...).")
    [column], rng = ops[0].columns, np.random.default_rng(0)
    return np.stack([ops[0]({column: text}, rng)["text"] for text in texts])


def evaluate_calls(
    key: str,
    text: str,
    table: Mapping[str, Callable[..., Any]],
    dotted: Callable[[str], Any] | None = None,
) -> list[Any]:
    """Calls the functions that the terms of `a|b(1, c=2)` name in `table`; returns their results.

    `dotted` is called with the text of terms such as `d.e(3)`. UserError for bad syntax, an
    unknown name, or an unknown, missing or invalid argument.
    """
    if len(text) > 4096:
        raise UserError(f"{key} {text[:80]!r}... has more than 4,096 characters.")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        ast.unparse(node)  # finds what is nested too deep
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", error)
        raise UserError(f"{key} {text!r}: {reason}; expected e.g. 'a|b(224)|c(d=1)'.") from None
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        terms.append(node.right)
        node = node.left
    where = f"{key} {text!r}"
    return [_evaluate(where, term, table, dotted) for term in [node, *reversed(terms)]]


def _read_call(where: str, node: ast.expr) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and arguments of `a.b(1, c=2)` or `a.b`."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name, text = ast.unparse(call.func), ast.unparse(node)
    if not all(map(str.isidentifier, name.split("."))):
        raise UserError(f"{where}: {text!r} is not a name or a call name(arguments).")
    try:
        args = [ast.literal_eval(value) for value in call.args]
        return name, args, {str(e.arg): ast.literal_eval(e.value) for e in call.keywords}
    except (ValueError, TypeError):
        raise UserError(f"{where}: {text!r}: arguments must be literals.") from None


def _evaluate(
    where: str,
    node: ast.expr,
    table: Mapping[str, Callable[..., Any]],
    dotted: Callable[[str], Any] | None,
) -> Any:
    name, args, kwargs = _read_call(where, node)
    text = ast.unparse(node)
    if dotted and "." in name:
        return dotted(text)
    if name not in table:
        known = ", ".join(table)
        raise UserError(f"{where}: unknown op {name!r}.{nearest(name, table)} Known: {known}.")
    function = table[name]
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    try:
        for key in kwargs:
            if key not in signature.parameters:
                raise TypeError(f"unknown argument {key!r}.{nearest(key, signature.parameters)}")
        bound = signature.bind(*args, **kwargs).arguments
        typed = {key: _cast(key, value, hints[key]) for key, value in bound.items()}
        return function(**typed)
    except (TypeError, ValueError, OverflowError) as error:
        parameters = signature.parameters.values()
        shown = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
        raise UserError(f"{where}: {text}: {error} (arguments: {name}({shown})).") from None


def _cast(name: str, value: Any, hint: Any) -> Any:
    """Converts `value` to the type `hint`; lists count as tuples and ints as floats."""
    members = typing.get_args(hint)
    if isinstance(value, int | float) and not abs(value) < 1 << 31:
        raise ValueError(f"{name}={value!r:.40} is not below 2^31")
    if isinstance(hint, types.UnionType):
        for member in members:
            with contextlib.suppress(TypeError):
                return _cast(name, value, member)
    elif typing.get_origin(hint) is Literal:
        if value in members:
            return value
        raise TypeError(f"{name}={value!r} must be one of {', '.join(map(str, members))}")
    elif typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple) and members[-1] is ...:
            members = members[:1] * len(value)
        if isinstance(value, list | tuple) and len(value) == len(members):
            return tuple(_cast(name, v, member) for v, member in zip(value, members, strict=True))
    elif hint is float and type(value) is int:
        return float(value)
    elif type(value) is hint:  # exactly: True is not a number
        return value
    raise TypeError(f"{name}={value!r} is not {getattr(hint, '__name__', hint)}")
