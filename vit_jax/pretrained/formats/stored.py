"""Contents of a weight file, in our names; what is known beside it; which models a format holds."""

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.ops import CentralCrop, Decode, Normalize, Patchify, Resize, ResizeSmall
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, create_model, recognise
from vit_jax.models.description import HALF, Description, InputSettings, Similarity
from vit_jax.models.flexible import whole_patches
from vit_jax.models.variants import SIZES

Arrays = dict[str, np.ndarray]
Grid = tuple[int, int]  # rows and columns
Written = tuple[Arrays, dict[str, Any]]  # arrays, and the JSON files beside them by name

WEIGHTS_FILE = "model.safetensors"  # of a folder that we write
# Read where there is none, nor PyTorch's, in this order: open_clip's, and transformers' for Flax.
OTHER_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "flax_model.msgpack")
# Of a folder, in order of preference; JSON files may be beside them.
_USUAL_FILES = (WEIGHTS_FILE, "pytorch_model.bin")
FOLDER_FILES = *(f"{n}{end}" for n in _USUAL_FILES for end in (".index.json", "")), *OTHER_FILES


# Parts of a file of two towers, and what these take.
TOWERS = {"img": "image", "txt": "text"}


@dataclasses.dataclass
class Stored:
    """Parameters of a file, and what the files beside it add."""

    format: str  # a key of `table.FORMATS`, or `orbax`
    # Flat names of ours, loop form of the blocks, float32.
    params: Arrays = dataclasses.field(default_factory=dict)
    # Arrays of the file that are not parameters, and why they are dropped.
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)  # not covered by any rule
    # Our names whose arrays are not bit for bit those of the file, and what was done.
    changed: dict[str, str] = dataclasses.field(default_factory=dict)
    # What parameters do not show, see `Family.conventions`.
    conventions: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Our own description, if there is one beside the file; the rest comes from other configs.
    description: Description | None = None
    num_heads: int | None = None
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    eval_preprocess: str = ""  # of the zoo
    ops: list[Any] | None = None  # from an image to the model's input, if the zoo does not say
    lacks: str = ""  # a settings file that would say more
    assumed: list[str] = dataclasses.field(default_factory=list)  # where settings say nothing
    posemb: str = ""  # how its library resizes positions, a key of `resize.METHODS`; "" is ours
    probabilities_by: str = "softmax"
    similarity: Similarity | None = None  # of two towers in the file

    @property
    def kind(self) -> str:
        """The model's name in `MODELS`: as described, else by the names of its parameters."""
        return self.description.model["name"] if self.description else recognise(self.params)

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds an array of the file as float32; UserError if it is not of floats."""
        dtype = array.dtype.name
        if dtype not in ("float16", "bfloat16", "float32", "float64"):
            raise UserError(f"{name} has type {dtype}; save floats, quantised ones are not read.")
        with np.errstate(over="ignore", invalid="ignore"):
            self.params[name] = array.astype(np.float32, copy=False)
        if dtype != "float32":
            self.changed[name] = f"{dtype} as float32"

    def rename(self, name: str, new: str) -> None:
        self.params[new] = self.params.pop(name)
        if name in self.changed:
            self.changed[new] = self.changed.pop(name)

    def drop(self, start: str, why: str) -> None:
        """Drops the parameters whose names begin so."""
        for name in [name for name in self.params if name.startswith(start)]:
            del self.params[name]
            self.dropped[name] = why


class Beside(NamedTuple):
    """What is known of a model beside its arrays."""

    settings: dict[str, Any]  # `config.json`
    preprocessor: dict[str, Any]  # `preprocessor_config.json`
    num_heads: int | None = None  # of the attention; None: see `heads_of`
    default_heads: int | None = None
    grid: Grid | None = None  # rows and columns of tokens; None: square
    part: str = ""  # one of several models in the file
    folder: Any = None  # a path, perhaps in a bucket

    def heads_of(self, arrays: Arrays, stated: int | None, default: int | None = None) -> int:
        """As given or `stated`, else of a known size, else the default; else UserError."""
        if self.num_heads and stated and self.num_heads != stated:
            raise UserError(f"num_heads={self.num_heads}, but config.json says {stated}.")
        if heads := self.num_heads or stated:
            return heads
        blocks = {match[1] for name in arrays if (match := _BLOCK.search(name))}
        shapes = {array.shape for array in arrays.values()}
        for name, (width, depth, mlp_dim, heads) in SIZES.items():
            if len(blocks) == depth and (mlp_dim, width) in shapes:
                logging.info("Assuming %d attention heads, as in %s.", heads, name)
                return heads
        if default := self.default_heads or default:
            return default
        raise UserError("cannot infer num_heads from the file; give it (num_heads, --num_heads).")


_BLOCK = re.compile(r"(?:blocks|layers?)\.(\d+)\.")
NUMBER = "a number"  # stands for all in `Holds.values`
# What a format holds whose positions are one table [1, N, D].
ONE_TABLE = {"position_embedding": ("learned", "sincos2d")}


class Holds(NamedTuple):
    """A class of models that a format holds."""

    kind: str  # a name in `MODELS`; "": any
    # (params) -> arrays of an `.npz`; or for a folder (params, description, input settings) ->
    # arrays, and the JSON files beside them by name.
    write: Callable[..., Any]
    values: Mapping[str, tuple[Any, ...]] = {}  # of attributes; its readers support no others
    assumed: Mapping[str, Any] = {}  # attributes it does not store: its readers' values
    name: str = ""  # theirs, where a format has several classes of a kind

    def wrong(self, model: Mapping[str, Any]) -> list[str]:
        """The attributes of a model whose values the class does not have."""
        if self.kind not in ("", model["name"]):
            return ["name"]
        return [
            key
            for key, values in self.values.items()
            if model[key] not in values and not (NUMBER in values and model[key])
        ]


# With the prefixes of wrappers and of Flax.
_SCALE_OR_BIAS = re.compile(r"(?:(?:_orig_mod|module|model|params)[./])*(logit_(?:scale|bias)|t|b)")


def similarity(arrays: Mapping[str, Any]) -> Similarity | None:
    """From `logit_scale` and `logit_bias` (CLIP, SigLIP), or `t` and `b` (big_vision, ours)."""
    found = {m[1]: x for name, x in arrays.items() if (m := _SCALE_OR_BIAS.fullmatch(name))}
    numbers = {name: float(array.item()) for name, array in found.items() if array.size == 1}
    scale = numbers.get("logit_scale", numbers.get("t"))
    bias = numbers.get("logit_bias", numbers.get("b"))
    return None if scale is None else Similarity(float(np.exp(scale)), bias)


def check_description(description: Description, names: str = "class_names") -> Description:
    """UserError if it is inconsistent, KeyError: no such model; `names`: the key of classes."""
    model: Any = description.model
    size: Any = description.image_shape[:2]
    if model["name"] not in MODELS:
        raise KeyError(model["name"])
    module = create_model(**{"num_classes": 0, **model})
    size = whole_patches(module, size) if description.patch_size else size
    expected = module.token_grid(size) if description.grid else None
    if (grid := description.grid) != expected:
        raise UserError(f"it has {grid=}, but images of {size} have {expected} tokens.")
    count, num_classes = len(description.class_names), model.get("num_classes")
    if count and num_classes and count != num_classes:
        raise UserError(f"{count} class names ({names}), but {num_classes} outputs.")
    return description


def positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is not a positive int")
    return value


def pillow_ops(inputs: InputSettings) -> list[Any]:
    """What torchvision and transformers do with an image on Pillow; one mean for all, or each."""
    resize, crop, covers = inputs.resize, inputs.crop, inputs.covers
    resample: Any = f"pillow_{inputs.method}"
    if isinstance(resize, tuple) and covers and len({*resize}) == 1:
        resize = resize[0]
    ops: list[Any] = [Decode()]
    if isinstance(resize, int):
        ops += [ResizeSmall(resize, resample, "down")]
    elif resize:
        ops += [ResizeSmall(resize, resample) if covers else Resize(*resize, resample)]
    if crop and (crop != resize or covers):
        ops += [CentralCrop(*crop, inputs.rounding)]
    scale: Any = (np.broadcast_to(x, max(3, np.size(x))) for x in (inputs.mean, inputs.std))
    mean, std = (tuple(x.tolist()) for x in scale)
    return ops if mean == std == HALF else [*ops, Normalize(mean, std)]


def native_ops(ops: Sequence[Any] | None, num_tokens: int, patch_size: int) -> list[Any]:
    """Ops for images of one size -> for images in shapes of their own, resized alike."""
    methods = [op.method for op in ops or () if isinstance(op, Resize | ResizeSmall)]
    patchify = Patchify(num_tokens, patch_size, *methods[:1])
    return [Decode(), patchify, *(op for op in ops or () if isinstance(op, Normalize))]


def pair(value: Any) -> tuple[int, int]:
    """(height, width) from one number, two, or {"height": ..., "width": ...}."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    height, width = value if isinstance(value, list) else [value, value]
    return positive(height), positive(width)
