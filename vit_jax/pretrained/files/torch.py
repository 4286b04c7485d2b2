"""PyTorch's `.pth`, `.pt` and `.bin` files, without PyTorch and without running their pickles.

Files of torch >= 1.6 are zip files, whose checksums are verified. The stream format before that
has none: a flipped bit in the data of an array goes unnoticed there.
"""

from __future__ import annotations

import io
import math
from typing import Any, Literal

import numpy as np

from vit_jax.pretrained.files.array_file import (
    DTYPES,
    FREE_EXPANSION_BYTES,
    ArrayInfo,
    ByteFile,
    Container,
    RawStream,
    check_info,
    check_name,
    read_values,
    shorten,
)
from vit_jax.pretrained.files.torch_pickle import MAX_PICKLE_BYTES, read_pickle
from vit_jax.pretrained.files.torch_symbols import Storage, Tensor
from vit_jax.pretrained.files.zip_members import Member, MemberStream

# What every file of the stream format begins with: a pickle of this number, then of the version.
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_VERSION = 1001
_PICKLE = "/data.pkl"
# Entries that hold the parameters, in the order of preference.
_ENTRIES = ("model", "state_dict")
_MAX_DEPTH = 3
_MAX_LISTED = 20
# Shared (tied) weights count once in the file and once per name here.
_MAX_SHARING = 4

# Where the data of a storage lies, and the zip member that it is, if any.
_Place = tuple[int, Member | None]


class TorchContainer(Container):
    """The tensors of a state dict.

    Where the file's top level has no tensors, they are those of its entry `model` or
    `state_dict`, or else of the only entry that has any. `metadata` tells which ("entry") and
    what else there is ("left_out"); neither key is there where it would be empty.
    """

    kind = "pth"

    def __init__(self, file: ByteFile, members: list[Member] | None) -> None:
        """Reads the pickles. The container closes `file`.

        Args:
          members: of a zip file; None for the stream format.

        Raises:
          UserError: damaged, no state dict, or a pickle that names more than one needs.
        """
        self.path = file.path
        self.arrays: dict[str, ArrayInfo] = {}
        self._file = file
        self._verified: set[str] = set()
        root, self._places, byte_order = (
            _open_stream(file) if members is None else _open_zip(file, members)
        )
        self._byte_order: Literal["<", ">"] = "<" if byte_order == "little" else ">"
        self._tensors, self.metadata = _find_state_dict(file, root)
        total = 0
        for name, tensor in self._tensors.items():
            self.arrays[name] = self._check_tensor(name, tensor)
            total += self.arrays[name].num_bytes
        if total > max(FREE_EXPANSION_BYTES, _MAX_SHARING * file.size):
            raise file.error(f"its tensors share {file.size} bytes and claim {total}")

    def _check_tensor(self, name: str, tensor: Tensor) -> ArrayInfo:
        info = check_info(self._file, name, tensor.shape, tensor.dtype)
        itemsize = DTYPES[tensor.dtype].itemsize
        storage = tensor.storage
        _, member = self._places.get(storage.key, (0, None))
        size = storage.num_elements * _itemsize(storage)
        good = (
            storage.key in self._places
            and (member is None or member.size == size)
            and len(tensor.strides) == len(tensor.shape)
            and min((tensor.offset, *tensor.strides)) >= 0
            and (tensor.offset + _span(tensor)) * itemsize <= size
            and info.num_bytes <= size
        )
        if not good:
            raise self._file.error(f"tensor {shorten(name)} does not fit the data it points to")
        return info

    def _read(self, name: str) -> np.ndarray:
        tensor, info = self._tensors[name], self.arrays[name]
        start, member = self._places[tensor.storage.key]
        dtype = DTYPES[info.dtype].newbyteorder(self._byte_order)
        start += tensor.offset * dtype.itemsize
        contiguous = _is_contiguous(tensor)
        if member is not None and contiguous and member.size == info.num_bytes:
            stream = MemberStream(self._file, member)
            values = read_values(self._file, stream, dtype, info)
            stream.finish()
            return values
        if member is not None and tensor.storage.key not in self._verified:
            MemberStream(self._file, member).verify()  # all of it, however little is wanted
            self._verified.add(tensor.storage.key)
        if contiguous:
            return read_values(self._file, RawStream(self._file, start), dtype, info)
        span = ArrayInfo((_span(tensor),), info.dtype)
        flat = read_values(self._file, RawStream(self._file, start), dtype, span)
        strides = tuple(stride * flat.itemsize for stride in tensor.strides)
        view: np.ndarray = np.ndarray(info.shape, flat.dtype, flat, strides=strides)
        return np.array(view, order="C")

    def close(self) -> None:
        self._file.close()


def _itemsize(storage: Storage) -> int:
    return 1 if storage.dtype is None else DTYPES[storage.dtype].itemsize


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor, with those in between."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))


def _is_contiguous(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != step:
            return math.prod(tensor.shape) == 0
        step *= size
    return True


def _open_zip(file: ByteFile, members: list[Member]) -> tuple[Any, dict[str, _Place], str]:
    """(what the pickle describes, storages, byte order) of a file of torch >= 1.6."""
    by_name = {member.name: member for member in members}
    pickles = [name for name in by_name if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(pickles) != 1:
        raise file.error(f"it has {len(pickles)} pickles where a PyTorch file has one")
    prefix = pickles[0].removesuffix(_PICKLE)
    if f"{prefix}/constants.pkl" in by_name:
        raise file.error(
            "it is a TorchScript program, which is never run; save the state dict of the model "
            "instead"
        )

    def content(name: str) -> bytes:
        stream = MemberStream(file, by_name[name])
        data = stream.read(MAX_PICKLE_BYTES)
        stream.finish()
        return data

    if by_name[pickles[0]].size > MAX_PICKLE_BYTES:
        raise file.error(f"its pickle has more than {MAX_PICKLE_BYTES} bytes")
    root, _ = read_pickle(file, io.BytesIO(content(pickles[0])))
    order = f"{prefix}/byteorder"
    byte_order = content(order).decode("ascii", "replace") if order in by_name else "little"
    if byte_order not in ("little", "big"):
        raise file.error(f"its byte order is {shorten(byte_order)}")
    data = f"{prefix}/data/"
    places: dict[str, _Place] = {}
    for name, member in by_name.items():
        if name.startswith(data):
            if member.deflated:
                raise file.error(f"{shorten(name)} is compressed, which PyTorch never does")
            places[name.removeprefix(data)] = (member.offset, member)
    return root, places, byte_order


def _open_stream(file: ByteFile) -> tuple[Any, dict[str, _Place], str]:
    """(what the pickle describes, storages, byte order) of a file of torch < 1.6.

    Five pickles: a magic number, a version, sizes of types, the object, the names of the storages;
    then for each storage its number of elements (8 bytes) and the elements.
    """
    stream = io.BytesIO(file.read(0, min(file.size, MAX_PICKLE_BYTES)))
    stream.seek(len(LEGACY_MAGIC))
    version, system = (read_pickle(file, stream)[0] for _ in range(2))
    root, storages = read_pickle(file, stream)
    keys, _ = read_pickle(file, stream)
    if version != _LEGACY_VERSION or not isinstance(system, dict) or not isinstance(keys, list):
        raise file.error("it is no PyTorch file of a known version")
    byte_order = "little" if system.get("little_endian", True) is True else "big"
    position = stream.tell()
    places: dict[str, _Place] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in places:
            raise file.error(f"its storage {shorten(key)} belongs to no tensor")
        count = int.from_bytes(file.read(position, 8), byte_order)  # type: ignore[arg-type]
        places[key] = (position + 8, None)
        position += 8 + count * _itemsize(storage)
        if count != storage.num_elements or position > file.size:
            raise file.error("it ends before its content does, or its storages are damaged")
    if position != file.size:
        raise file.error(f"it has {file.size - position} bytes more than its storages")
    return root, places, byte_order


def _find_state_dict(file: ByteFile, root: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name to tensor, notes), see `TorchContainer`."""
    path = _locate(file, root, _MAX_DEPTH) if isinstance(root, dict) else None
    if path is None:
        raise file.error("it holds no state dict, that is, no dict of tensors")
    left_out: list[str] = []
    for depth, chosen in enumerate(path):
        left_out += [_dotted(path[:depth], key) for key in root if key != chosen]
        root = root[chosen]
    tensors = {
        check_name(file, key): value for key, value in root.items() if isinstance(value, Tensor)
    }
    left_out += [_dotted(path, key) for key in root if key not in tensors]
    if len(left_out) > _MAX_LISTED:
        left_out[_MAX_LISTED:] = [f"and {len(left_out) - _MAX_LISTED} more"]
    notes = {"entry": ".".join(path), "left_out": ", ".join(left_out)}
    return tensors, {key: text for key, text in notes.items() if text}


def _locate(file: ByteFile, level: dict[Any, Any], depth: int) -> list[str] | None:
    """The keys that lead to the state dict, from `level` on; None where there is none."""
    has_tensors: dict[int, bool] = {}  # by identity: a hostile file may list one dict very often

    def is_state_dict(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        if id(value) not in has_tensors:
            has_tensors[id(value)] = any(isinstance(x, Tensor) for x in value.values())
        return has_tensors[id(value)]

    if is_state_dict(level):
        return []
    for key in _ENTRIES:
        if depth and isinstance(level.get(key), dict):
            path = _locate(file, level[key], depth - 1)
            if path is not None:
                return [key, *path]
    candidates = [key for key, value in level.items() if is_state_dict(value)]
    if len(candidates) > 1:
        names = ", ".join(_dotted([], key) for key in candidates[:_MAX_LISTED])
        raise file.error(f"it holds several state dicts ({names}); save the one you want alone")
    return [check_name(file, key) for key in candidates] or None


def _dotted(path: list[str], key: Any) -> str:
    text = key if isinstance(key, str) and key.isprintable() and len(key) < 80 else shorten(key)
    return ".".join([*path, text])
