"""PyTorch's `.pth`, `.pt` and `.bin` files, without PyTorch and without running their pickles.

Files of torch >= 1.6 are zip files, whose checksums are verified. The stream format before that,
which timm's files still have, has none: a flipped bit in an array goes unnoticed there.
"""

from __future__ import annotations

import io
import math
import os
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


class TorchContainer(Container):
    """The tensors of a state dict.

    Where the file's top level has no tensors, they are those of its entry `model` or
    `state_dict`, or else of the only entry that has any.
    """

    def __init__(self, path: Path, file: BinaryIO, archive: zipfile.ZipFile | None) -> None:
        """Reads the pickles; `archive` is `file` as a zip file, None for the stream format.

        Raises:
          BadFile, or anything of zipfile and pickle: damaged, or no state dict.
        """
        self._content = _open_stream(path, file) if archive is None else _open_zip(archive)
        state_dict = _find_state_dict(self._content.root, _MAX_DEPTH)
        if state_dict is None:
            raise BadFile("it holds no state dict, that is, no dict of tensors")
        self._tensors = {name: x for name, x in state_dict.items() if isinstance(x, Tensor)}
        arrays = {name: self._describe(name, x) for name, x in self._tensors.items()}
        super().__init__(path, arrays, file.close)
        claimed = sum(_num_bytes(tensor) for tensor in self._tensors.values())
        size = os.fstat(file.fileno()).st_size
        if claimed > max(_FREE_SHARING_BYTES, _MAX_SHARING * size):
            raise BadFile(f"its tensors share {size} bytes and claim {claimed}")

    def _describe(self, name: Any, tensor: Tensor) -> ArrayInfo:
        """Shape and type of a tensor, once it is known to lie within its storage."""
        storage, offset, shape, strides = tensor
        numbers = (offset, *shape, *strides)
        if len(numbers) > _MAX_NUMBERS or any(type(n) is not int or n < 0 for n in numbers):
            raise BadFile(f"tensor {shorten(name)} has an impossible shape")
        # Exact: numpy's own check of strides may overflow.
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        size = storage.num_elements * storage.dtype.itemsize
        if (
            self._content.sizes.get(storage.key) != size
            or _num_bytes(tensor) > size
            or (0 not in shape and last >= storage.num_elements)
        ):
            raise BadFile(f"tensor {shorten(name)} does not fit the data it points to")
        return ArrayInfo(tuple(shape), storage.dtype.name)

    def _read(self, name: str) -> np.ndarray:
        storage, offset, shape, strides = self._tensors[name]
        return np.ndarray(
            shape,
            storage.dtype.newbyteorder(self._content.byte_order),
            self._content.read(storage.key),
            offset * storage.dtype.itemsize,
            [stride * storage.dtype.itemsize for stride in strides],
        )


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.storage.dtype.itemsize


class _Content(NamedTuple):
    """The object that a file holds; the sizes in bytes of its storages by key; their bytes."""

    root: Any
    sizes: dict[str, int]
    read: Callable[[str], Any]
    byte_order: Literal["<", ">"]


def _open_zip(archive: zipfile.ZipFile) -> _Content:
    """A file of torch >= 1.6."""

    def read(name: str) -> bytes:
        with archive.open(name) as stream:
            return stream.read(archive.getinfo(name).file_size)  # without a number: any bomb

    names = archive.namelist()
    (pickled,) = (name for name in names if name.endswith(_PICKLE) and name.count("/") == 1)
    if archive.getinfo(pickled).file_size > MAX_PICKLE_BYTES:
        raise BadFile(f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    prefix = pickled.removesuffix(_PICKLE)
    root = StateDictUnpickler(io.BytesIO(read(pickled))).load()
    order = f"{prefix}/byteorder"
    data = f"{prefix}/data/"
    return _Content(
        root=root,
        sizes={
            member.filename.removeprefix(data): member.file_size
            for member in archive.infolist()
            if member.filename.startswith(data)
        },
        read=lambda key: read(data + key),
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
    starts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for key in keys:
        if not isinstance(key, str) or key in starts:
            raise BadFile(f"its storage {shorten(key)} belongs to no tensor")
        storage = unpickler.storages[key]
        starts[key] = position + 8
        sizes[key] = storage.num_elements * storage.dtype.itemsize
        position = starts[key] + sizes[key]
    if position != os.fstat(file.fileno()).st_size:
        raise BadFile(f"its storages end at byte {position}, and it does not")
    return _Content(
        root=root,
        sizes=sizes,
        read=lambda key: np.fromfile(path, np.uint8, sizes[key], offset=starts[key]),
        byte_order="<" if system["little_endian"] else ">",
    )


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(x, Tensor) for x in value.values())


def _find_state_dict(level: Any, depth: int) -> dict[Any, Any] | None:
    """The dict of tensors at `level` or below, see `TorchContainer`; None where there is none."""
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
