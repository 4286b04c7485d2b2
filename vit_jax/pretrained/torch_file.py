"""Reads PyTorch's `.pth`, `.pt` and `.bin` files without PyTorch and without running pickles."""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError
from vit_jax.wording import list_names

# Every file of the stream format starts with a pickle of this number, in any protocol.
STREAM_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Entries that hold the parameters, in order of preference: like timm, averaged weights first. The
# teacher is DINO's, which is evaluated.
_ENTRIES = ("state_dict_ema", "model_ema", "model", "state_dict", "teacher")


class Tensor(NamedTuple):
    """A view of a storage; `offset` and `strides` count elements. May reach beyond it."""

    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_zip(archive: zipfile.ZipFile, most: int, entry: str) -> dict[str, np.ndarray]:
    """Reads the tensors of a file of torch >= 1.6, see `_read_tensors`."""
    (pickled,) = (n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1)
    folder = pickled.removesuffix("/data.pkl")
    order = f"{folder}/byteorder"
    is_big_endian = order in archive.namelist() and archive.read(order) == b"big"

    storages: dict[str, tuple[np.dtype, int]] = {}
    root = _Unpickler(io.BytesIO(archive.read(pickled)), storages).load()

    def load(key: str) -> np.ndarray:
        dtype, count = storages[key]
        dtype = dtype.newbyteorder(">" if is_big_endian else "<")
        return np.frombuffer(bytearray(archive.read(f"{folder}/data/{key}")), dtype, count)

    return _read_tensors(root, load, most, entry)


def read_stream(file: BinaryIO, most: int, entry: str) -> dict[str, np.ndarray]:
    """Reads the tensors of a file of torch < 1.6, still used by timm; see `_read_tensors`.

    Five pickles: a magic number, a version, sizes of types, the object, the storage keys;
    then for each storage its number of elements (8 bytes) and the elements.
    """
    storages: dict[str, tuple[np.dtype, int]] = {}
    _, _, system, root, keys = (_Unpickler(file, storages).load() for _ in range(5))
    starts, position = {}, file.tell()
    for key in filter(str.isascii, keys):  # TypeError for what is no string
        dtype, count = storages[key]
        starts[key] = position + 8
        position = starts[key] + count * dtype.itemsize
    if position != os.fstat(file.fileno()).st_size:
        raise UserError(f"its storages end at byte {position}, but the file does not")

    def load(key: str) -> np.ndarray:
        file.seek(starts[key])
        dtype, count = storages[key]
        return np.fromfile(file, dtype.newbyteorder("<" if system["little_endian"] else ">"), count)

    return _read_tensors(root, load, most, entry)


def _read_tensors(
    root: Any, load: Callable[[str], np.ndarray], most: int, entry: str
) -> dict[str, np.ndarray]:
    """Reads the tensors of the state dict, or `entry`, in `root`: at most `most` bytes."""
    if entry:
        level = root if isinstance(root, dict) else {}
        entries = [f"{k!s:.80}" for k, v in level.items() if getattr(v, "state_dict", None)]
        if entry not in entries:
            raise UserError(f"it has no state dict {entry!r}, only {list_names(entries) or 'one'}")
        root = root[entry]
    state_dict = getattr(root, "state_dict", None)  # of a `_Dict`
    if state_dict is None:
        text = "it has no state dict, i.e. no dict of tensors (code in pickles is never run)"
        raise UserError(f"{text}; torch.save(model.state_dict(), PATH) writes one")
    arrays, load = {}, functools.cache(load)  # tensors may share a storage
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        key, offset, shape, strides = value
        numbers = load(key)
        # Not left to numpy, where the sum may overflow.
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and last >= len(numbers):
            raise UserError(f"tensor {name!r:.80} does not fit the data it points to")
        steps = [step * numbers.itemsize for step in strides]
        start = offset * numbers.itemsize
        arrays[name] = np.ndarray(shape, numbers.dtype, numbers.view(np.uint8), start, steps)
        most -= arrays[name].nbytes  # an expanded tensor has more than are stored
        if most < 0:
            raise UserError("its tensors repeat their numbers more often than weights do")
    return arrays


class _Dict(dict[Any, Any]):
    """A dict, or another object, of which only items are kept."""

    has_tensors = False

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replaces what is no string by its type and place: some tuples take for ever to hash."""
        super().__setitem__(key if type(key) is str else (type(key).__name__, len(self)), value)
        self.has_tensors |= isinstance(value, Tensor)

    append = extend = add = lambda *_: None

    @functools.cached_property  # a dict may be in many others
    def state_dict(self) -> _Dict | None:
        """The dict of tensors: this one, in an entry of `_ENTRIES`, or the only entry with any."""
        if self.has_tensors:
            return self
        known = {k: found for k in _ENTRIES if (found := getattr(self.get(k), "state_dict", None))}
        others = {k: v for k, v in self.items() if getattr(v, "has_tensors", False)}
        if len(state_dicts := known or others) > 1:
            names, last = list_names(f"{k!r:.80}" for k in state_dicts), list(state_dicts)[-1]
            if not known:
                raise UserError(f"it holds several state dicts ({names}); choose one by FILE#NAME")
            text = f"The file holds {names}: {next(iter(known))!r} is used, as in timm"
            logging.warning(f"{text}; #{last} after its name selects the other.")
        return next(iter(state_dicts.values()), None)


_NUMBERS = {"Float": "f4", "Half": "f2", "Double": "f8", "Long": "i8", "Int": "i4", "Short": "i2"}
_NUMBERS |= {"Char": "i1", "Byte": "u1", "Bool": "?", "BFloat16": ml_dtypes.bfloat16}
_DTYPES = {f"torch.{name}Storage": np.dtype(dtype) for name, dtype in _NUMBERS.items()}
_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
# What torch.save writes in protocols 2 to 5.
_OPCODES = """PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT MARK POP
BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BYTEARRAY8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE
TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET POP_MARK BINPUT
LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ BINPERSID"""


# In Python: on a few damaged bytes the C version allocates gigabytes for its memo.
class _Unpickler(pickle._Unpickler):
    """Builds dicts, lists, tuples, strings, numbers and `Tensor`; imports and calls nothing."""

    def __init__(self, stream: BinaryIO, storages: dict[str, Any]) -> None:
        """Checks the opcodes and that lengths are those of the file; adds to `storages`."""
        start, known = stream.tell(), {*_OPCODES.split()}
        for count, (opcode, *_) in enumerate(pickletools.genops(stream)):
            if opcode.name not in known or count == 2_000_000:  # a large ViT's has 200,000
                text = f"its pickle has the opcode {opcode.name} at place {count:,}"
                raise UserError(f"{text}; torch.save writes no such one, nor that many")
        stream.seek(start)
        super().__init__(stream)
        self.storages = storages

    def find_class(self, module: str, name: str) -> str:
        symbol = f"{module:.99}.{name:.99}"  # cut: a small pickle can repeat a long name
        if "rebuild" in symbol and symbol[:6] == "torch." and symbol not in _TENSORS + _PARAMETERS:
            raise UserError(f"its pickle has tensors of {symbol!r:.80}, which are not supported")
        return symbol

    def persistent_load(self, pid: Any) -> Any:
        """The key of a tensor's data, which PyTorch stores outside the pickle."""
        if pid[0] != "storage":
            return None  # a class with its source code
        _, kind, key, _location, count, *view = pid[:6]
        is_valid = [type(kind), type(key), type(count)] == [str, str, int] and count >= 0
        if not is_valid or kind not in _DTYPES or any(view):
            raise UserError("its pickle has tensors of an unsupported type")
        self.storages.setdefault(key, (_DTYPES[kind], count))  # as torch, the first of a key
        return key

    def call(self: Any) -> None:
        """In place of a call: what the few known functions return, or an empty object."""
        arguments, function = self.stack.pop(), self.stack.pop()
        value = arguments[0] if function in ("torch.Size", *_PARAMETERS) else _Dict()
        if function in _TENSORS:
            key, offset, shape, strides = arguments[:4]
            counts = (offset, *shape[:65], *strides[:65])  # numpy refuses more than 64
            if type(key) is not str or {*map(type, counts)} != {int} or min(counts) < 0:
                raise UserError("its pickle has a tensor without data or of negative size")
            value = Tensor(key, offset, shape[:65], strides[:65])
        self.stack.append(value)

    dispatch = pickle._Unpickler.dispatch | {
        **dict.fromkeys(pickle.EMPTY_DICT + pickle.EMPTY_SET, lambda self: self.append(_Dict())),
        **dict.fromkeys(pickle.REDUCE + pickle.NEWOBJ, call),
        pickle.FROZENSET[0]: lambda self: (self.pop_mark(), self.append(_Dict())),
        pickle.BUILD[0]: lambda self: self.stack.pop(),
    }
