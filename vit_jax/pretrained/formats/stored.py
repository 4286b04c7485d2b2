"""What a weight file holds, in our names, and the checks of the JSON files beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.description import Description

# Of a folder; beside the weights there may be the JSON files that the format has.
WEIGHTS_FILE = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"


@dataclasses.dataclass
class Stored:
    """Parameters of a file, and what the files beside it say."""

    format: str  # a key of `table.FORMATS`, or `orbax`
    # Flat names of ours, loop form of the blocks, float32.
    params: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # Arrays of the file that are no parameters, and why they are left out.
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)  # that no rule speaks of
    # Our names that are not what the file holds bit for bit, and what was done.
    changed: dict[str, str] = dataclasses.field(default_factory=dict)
    # What parameters do not show, see `Family.conventions`.
    conventions: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Ours, where one lies beside the file; the rest is from another configuration.
    description: Description | None = None
    num_heads: int | None = None
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    eval_preprocess: str = ""
    probabilities_by: str = "softmax"

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds an array of the file as a parameter of ours, as float32; UserError: no floats."""
        dtype = array.dtype.name
        if dtype not in ("float16", "bfloat16", "float32", "float64"):
            raise UserError(f"{name} has type {dtype}; parameters are floats.")
        with np.errstate(over="ignore", invalid="ignore"):
            self.params[name] = array.astype(np.float32, copy=False)
        if dtype != "float32":
            self.changed[name] = f"{dtype} as float32"


def check_description(description: Description, names: str = "class_names") -> Description:
    """UserError where it contradicts itself; `names`, for the error, is the key of the classes."""
    model, size = description.model, description.image_shape[:2]
    module = create_model(**{"num_classes": 0, **model})
    expected = module.token_grid(size) if description.grid else None
    if description.grid != expected:
        raise UserError(
            f"it says grid={description.grid}, but images of {size} have {expected} tokens."
        )
    count, num_classes = len(description.class_names), model.get("num_classes")
    if count and num_classes and count != num_classes:
        raise UserError(f"{count} classes are named ({names}), the head has {num_classes}.")
    return description


class Holds(NamedTuple):
    """How a format writes models of one kind, and which of them it can hold."""

    # (params) -> arrays of an `.npz`; or for a folder (params, description, input settings) ->
    # arrays, and the JSON files beside them by name.
    convert: Callable[..., Any]
    values: Mapping[str, tuple[Any, ...]] = {}  # of attributes; its readers know no others
    assumed: Mapping[str, Any] = {}  # attributes that it does not store: what its readers take


def positive(value: Any) -> int:
    """A positive int, not a bool; else TypeError."""
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is no positive int")
    return value


def numbers_of(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of one number, of two, or of {"height": ..., "width": ...}."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    height, width = value if isinstance(value, list) else [value, value]
    return positive(height), positive(width)
