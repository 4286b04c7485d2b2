"""Reads PyTorch's `.pth`, `.pt` and `.bin` files without PyTorch and without running pickles."""

from __future__ import annotations

import collections
import io
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError
from vit_jax.wording import list_names

# Every file of the stream format starts with a pickle of this number.
STREAM_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Entries that hold the parameters, in order of preference: like timm, averaged weights first. The
# teacher is DINO's, which is evaluated.
_ENTRIES = ("state_dict_ema", "model_ema", "model", "state_dict", "teacher")


class Storage(NamedTuple):
    """A contiguous range of numbers in the file."""

    key: str
    dtype: np.dtype
    num_elements: int


class Tensor(NamedTuple):
    """A view of a storage; `offset` and `strides` count elements. Unchecked: files can lie."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_zip(archive: zipfile.ZipFile, entry: str = "") -> dict[str, np.ndarray]:
    """Reads the tensors of a file of torch >= 1.6, see `_read_tensors`."""
    (pickled,) = (n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1)
    folder = pickled.removesuffix("/data.pkl")
    order = f"{folder}/byteorder"
    is_big_endian = order in archive.namelist() and archive.read(order) == b"big"

    def load(storage: Storage) -> np.ndarray:
        dtype = storage.dtype.newbyteorder(">" if is_big_endian else "<")
        return np.frombuffer(bytearray(archive.read(f"{folder}/data/{storage.key}")), dtype)

    return _read_tensors(_Unpickler(io.BytesIO(archive.read(pickled))).load(), load, entry)


def read_stream(file: BinaryIO, entry: str = "") -> dict[str, np.ndarray]:
    """Reads the tensors of a file of torch < 1.6, still used by timm; see `_read_tensors`.

    Five pickles: a magic number, a version, sizes of types, the object, the storage keys;
    then for each storage its number of elements (8 bytes) and the elements.
    """
    unpickler = _Unpickler(file)
    _, _, system, root, keys = (unpickler.load() for _ in range(5))
    starts, position = {}, file.tell()
    for key in keys:
        _, dtype, num_elements = unpickler.storages[key]
        starts[key] = position + 8
        position = starts[key] + num_elements * dtype.itemsize
    if position != os.fstat(file.fileno()).st_size:
        raise UserError(f"its storages end at byte {position}, but the file does not")

    def load(storage: Storage) -> np.ndarray:
        file.seek(starts[storage.key])
        dtype = storage.dtype.newbyteorder("<" if system["little_endian"] else ">")
        return np.fromfile(file, np.uint8, storage.num_elements * dtype.itemsize).view(dtype)

    return _read_tensors(root, load, entry)


def _read_tensors(
    root: Any, load: Callable[[Storage], np.ndarray], entry: str
) -> dict[str, np.ndarray]:
    """Reads with `load` the tensors of the state dict, or `entry`, in the saved object `root`."""
    if entry:
        level = root if isinstance(root, dict) else {}
        entries = [str(key) for key, value in level.items() if _find_state_dict(value) is not None]
        if entry not in entries:
            raise UserError(f"it has no state dict {entry!r}, only {list_names(entries) or 'one'}")
        root = root[entry]
    state_dict = _find_state_dict(root)
    if state_dict is None:
        text = "it has no state dict, i.e. no dict of tensors (code in pickles is never run)"
        raise UserError(f"{text}; torch.save(model.state_dict(), PATH) writes one")
    arrays = {}
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        storage, offset, shape, strides = value
        numbers = load(storage)
        # Not left to numpy, where the sum may overflow.
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if min((offset, *shape, *strides)) < 0 or (0 not in shape and last >= len(numbers)):
            raise UserError(f"tensor {name!r:.80} does not fit the data it points to")
        steps = [step * numbers.itemsize for step in strides]
        start = offset * numbers.itemsize
        arrays[name] = np.ndarray(shape, numbers.dtype, numbers.view(np.uint8), start, steps)
    return arrays


def _find_state_dict(level: Any) -> dict[Any, Any] | None:
    """The dict of tensors at `level`, in an entry of `_ENTRIES`, or in the only entry with any."""
    if not isinstance(level, dict) or _has_tensors(level):
        return level if isinstance(level, dict) else None
    entries = {key: _find_state_dict(level.get(key)) for key in _ENTRIES}
    known = {key: value for key, value in entries.items() if value is not None}
    state_dicts = known or {key: value for key, value in level.items() if _has_tensors(value)}
    if len(state_dicts) > 1:
        names, last = list_names(map(repr, state_dicts)), list(state_dicts)[-1]
        if not known:
            raise UserError(f"it holds several state dicts ({names}); choose one, as FILE#{last}")
        text = f"The file holds {names}: {next(iter(known))!r} is used, as in timm"
        logging.warning(f"{text}; #{last} after its name selects the other.")
    return next(iter(state_dicts.values()), None)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(x, Tensor) for x in value.values())


class _Placeholder:
    """Any irrelevant object; accepts and ignores all state."""

    def __init__(self, *arguments: Any) -> None: ...

    __setstate__ = append = extend = __setitem__ = __init__


_DTYPES = {
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "DoubleStorage": np.float64,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
# Functions without side effects.
_GLOBALS: dict[str, Any] = {f"torch.{name}": np.dtype(x) for name, x in _DTYPES.items()} | {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": lambda sizes: sizes,
    "torch._utils._rebuild_tensor": Tensor,
    "torch._utils._rebuild_tensor_v2": lambda *arguments: Tensor(*arguments[:4]),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
}


# In Python: on a few damaged bytes the C version allocates gigabytes for its memo.
class _Unpickler(pickle._Unpickler):
    """Builds dicts, lists, tuples, strings, numbers and `Tensor`."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, Storage] = {}  # referenced by the pickle

    def find_class(self, module: str, name: str) -> Any:
        """Imports nothing: what training scripts save beside the parameters becomes inert."""
        symbol = f"{module}.{name}"
        if symbol not in _GLOBALS and symbol.startswith("torch.") and "rebuild" in name:
            raise UserError(f"its pickle has tensors of {symbol!r:.80}, which are not supported")
        return _GLOBALS.get(symbol, _Placeholder)

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's data, which PyTorch stores outside the pickle."""
        if pid[0] != "storage":
            return _Placeholder  # a class with its source code
        _, dtype, key, _location, num_elements, *view = pid
        if not isinstance(key, str) or not isinstance(dtype, np.dtype) or any(view):
            raise UserError("its pickle has tensors of an unsupported type")
        self.storages[key] = Storage(key, dtype, num_elements)
        return self.storages[key]
