"""The globals that pickled state dicts name, and what stands for them here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vit_jax.pretrained.files.array_file import DTYPES, shorten

_MAX_KEY = 1 << 60  # Python's hash of larger integers repeats: a dict of them can be made slow
MAX_ARGUMENTS = 32


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of numbers in the file; `dtype` is None where it is bytes without a type."""

    key: str
    dtype: str | None
    num_elements: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage; `offset` and `strides` count elements of type `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Inert:
    """Stands for an object that is of no interest, whatever was put into it."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A global that a pickle names, and that is never looked up."""

    name: str


STORAGES: dict[str, str | None] = {
    f"{module}.{prefix}Storage": dtype
    for module in ("torch", "torch.cuda")
    for prefix, dtype in (
        ("Float", "float32"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Double", "float64"),
        ("Long", "int64"),
        ("Int", "int32"),
        ("Short", "int16"),
        ("Char", "int8"),
        ("Byte", "uint8"),
        ("Bool", "bool"),
    )
} | {"torch.storage.UntypedStorage": None, "torch.storage._UntypedStorage": None}

# What training scripts leave in a checkpoint beside the parameters: their arguments and counters.
INERT = {
    "_codecs.encode",
    "argparse.Namespace",
    "collections.Counter",
    "collections.defaultdict",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "torch.device",
}
_DTYPES = {f"torch.{name}": name for name in DTYPES}


def _integers(value: Any) -> tuple[int, ...]:
    # The length first: one huge tuple may stand in for the shape of very many tensors.
    if not isinstance(value, tuple) or len(value) > MAX_ARGUMENTS:
        raise ValueError("a shape that is no tuple of integers")
    if any(type(size) is not int for size in value):
        raise ValueError("a shape that is no tuple of integers")
    return value


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Tensor:
    if not isinstance(storage, Storage) or type(offset) is not int or storage.dtype is None:
        raise ValueError("a tensor without a storage")
    return Tensor(storage, storage.dtype, offset, _integers(shape), _integers(strides))


def _tensor_of_type(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if not isinstance(storage, Storage) or type(offset) is not int or storage.dtype is not None:
        raise ValueError("a tensor without a storage")
    name = _DTYPES.get(dtype.name) if isinstance(dtype, Symbol) else None
    if name is None:
        raise ValueError("a tensor without a type")
    return Tensor(storage, name, offset, _integers(shape), _integers(strides))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _ordered_dict() -> dict[Any, Any]:
    return {}  # the items follow


def check_key(key: Any) -> Any:
    """Keys whose hash is quick to compute, and hard to make repeat."""
    if isinstance(key, str | bytes | None) or (type(key) is int and abs(key) < _MAX_KEY):
        return key
    raise ValueError(f"{shorten(key)} as a key")


CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _integers,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
KNOWN = {*CALLS, *INERT, *STORAGES, *_DTYPES}
