"""PyTorch's `.pth`, `.pt` and `.bin` files, without PyTorch and without running their pickles.

Files of torch >= 1.6 are zip files, whose checksums are verified. The stream format before that,
which timm's files still have, has none: a flipped bit in an array goes unnoticed there.
"""

from __future__ import annotations

import io
import math
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from vit_jax.pretrained.files.array_file import ArrayInfo, BadFile, Container, shorten
from vit_jax.pretrained.files.torch_pickle import MAX_PICKLE_BYTES, StateDictUnpickler, Tensor

# What every file of the stream format begins with: a pickle of this number.
STREAM_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE = "/data.pkl"
# Entries that hold the parameters, in the order of preference.
_ENTRIES = ("model", "state_dict")
_MAX_DEPTH = 3
_MAX_NUMBERS = 65  # of 32 dimensions
# Shared (tied) weights count once in the file and once per name here.
_MAX_SHARING = 4
_FREE_SHARING_BYTES = 512 << 20


class _Content(NamedTuple):
    """The object that was saved in a file, and how to get the data of its storages by key."""

    root: Any
    read: Callable[[str], Any]
    byte_order: Literal["<", ">"]


def open_torch(path: Path, file: BinaryIO, archive: zipfile.ZipFile | None) -> Container:
    """Opens the tensors of a state dict.

    Where the file's top level has no tensors, they are those of its entry `model` or
    `state_dict`, or else of the only entry that has any.

    Args:
      archive: `file` as a zip file; None for the stream format.

    Raises:
      BadFile, or anything of zipfile and pickle: damaged, or no state dict.
    """
    content = _open_stream(path, file) if archive is None else _open_zip(archive)
    state_dict = _find_state_dict(content.root, _MAX_DEPTH)
    if state_dict is None:
        raise BadFile("it holds no state dict, that is, no dict of tensors")
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    size = os.fstat(file.fileno()).st_size
    claimed = sum(_check_size(name, tensor, size) for name, tensor in tensors.items())
    if claimed > max(_FREE_SHARING_BYTES, _MAX_SHARING * size):
        raise BadFile(f"its tensors share {size} bytes and claim {claimed}")

    def read(name: str) -> np.ndarray:
        storage, offset, shape, strides = tensors[name]
        data = content.read(storage.key)
        # All that keeps numpy within the data: it would take an empty one for one of any size.
        if len(data) != storage.num_elements * storage.dtype.itemsize:
            raise BadFile(f"storage {shorten(storage.key)} has {len(data)} bytes, not what it says")
        return np.ndarray(
            shape,
            storage.dtype.newbyteorder(content.byte_order),
            data,
            offset * storage.dtype.itemsize,
            [stride * storage.dtype.itemsize for stride in strides],
        )

    infos = {k: ArrayInfo(tuple(x.shape), x.storage.dtype.name) for k, x in tensors.items()}
    return Container(path, infos, read, file.close)


def _check_size(name: Any, tensor: Tensor, file_size: int) -> int:
    """The bytes of a tensor, once it is known to lie within a storage that the file may hold."""
    storage, offset, shape, strides = tensor
    numbers = (offset, *shape, *strides)
    if len(numbers) > _MAX_NUMBERS or any(type(n) is not int or n < 0 for n in numbers):
        raise BadFile(f"tensor {shorten(name)} has an impossible shape")
    # Not left to numpy, whose sum may overflow.
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = math.prod(shape)
    if (
        storage.num_elements * storage.dtype.itemsize > file_size
        or max(count, last + 1 if count else 0) > storage.num_elements
    ):
        raise BadFile(f"tensor {shorten(name)} does not fit the data it points to")
    return count * storage.dtype.itemsize


def _open_zip(archive: zipfile.ZipFile) -> _Content:
    """A file of torch >= 1.6."""

    lock = threading.Lock()

    def read(name: str) -> bytes:
        with lock, archive.open(name) as stream:  # one thread at a time, see npz.py
            return stream.read(archive.getinfo(name).file_size)  # without a number: any bomb

    names = archive.namelist()
    (pickled,) = (name for name in names if name.endswith(_PICKLE) and name.count("/") == 1)
    if archive.getinfo(pickled).file_size > MAX_PICKLE_BYTES:
        raise BadFile(f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    folder = pickled.removesuffix(_PICKLE)
    order = f"{folder}/byteorder"
    return _Content(
        root=StateDictUnpickler(io.BytesIO(read(pickled))).load(),
        read=lambda key: read(f"{folder}/data/{key}"),
        byte_order=">" if order in names and read(order) == b"big" else "<",
    )


def _open_stream(path: Path, file: BinaryIO) -> _Content:
    """A file of torch < 1.6.

    Five pickles: a magic number, a version, sizes of types, the object, the names of the storages;
    then for each storage its number of elements (8 bytes) and the elements.
    """
    file.seek(0)
    stream = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    unpickler = StateDictUnpickler(stream)
    _, _, system, root, keys = (unpickler.load() for _ in range(5))
    position = stream.tell()
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        if not isinstance(key, str):
            raise BadFile(f"its storage {shorten(key)} belongs to no tensor")
        storage = unpickler.storages[key]
        places[key] = position + 8, storage.num_elements * storage.dtype.itemsize
        position = sum(places[key])
    if position != os.fstat(file.fileno()).st_size:
        raise BadFile(f"its storages end at byte {position}, and it does not")

    def read(key: str) -> np.ndarray:
        start, num_bytes = places[key]
        return np.fromfile(path, np.uint8, num_bytes, offset=start)

    return _Content(root, read, "<" if system["little_endian"] else ">")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(x, Tensor) for x in value.values())


def _find_state_dict(level: Any, depth: int) -> dict[Any, Any] | None:
    """The dict of tensors at `level` or below, see `open_torch`; None where there is none."""
    if not isinstance(level, dict):
        return None
    if _has_tensors(level):
        return level
    for key in _ENTRIES:
        if depth and (found := _find_state_dict(level.get(key), depth - 1)):
            return found
    candidates = {key: value for key, value in level.items() if _has_tensors(value)}
    if len(candidates) > 1:
        names = ", ".join(shorten(key) for key in list(candidates)[:20])
        raise BadFile(f"it holds several state dicts ({names}); save the one you want alone")
    return next(iter(candidates.values()), None)
