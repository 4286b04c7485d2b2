"""What all files of named arrays share: reading by position, element types, writing in one move."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError, nearest

# Small enough to be checked and converted while it is in the processor's cache.
CHUNK_BYTES = 1 << 20
# Up to here an array that is larger than its file (compressed, or shared) needs no justification.
FREE_EXPANSION_BYTES = 512 << 20
_CHUNK_ELEMENTS = CHUNK_BYTES // 4
_MAX_DIMENSIONS = 32
_MAX_BYTES = 1 << 62
_MAX_NAME = 1024
_READING_THREADS = 4

# Floats become float32 when they are read, everything else keeps its type.
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")},
    **{f"int{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and type of an array as stored, known before its data is read.

    Attributes:
      dtype: one of the names of `DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize


class ByteFile:
    """A regular file, read by position; threads may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Asked first: opening a pipe would wait for a writer.
            if self.path.exists() and not self.path.is_file():
                raise self.error("it is a folder or a device, not a file")
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115  (closed by close)
            self.size = os.fstat(self._file.fileno()).st_size
        except FileNotFoundError as error:
            raise UserError(f"{self.path} does not exist.") from error
        except OSError as error:
            raise self.error(error.strerror or str(error)) from error

    def error(self, problem: str) -> UserError:
        """A UserError in one line, for what is wrong with this file."""
        return UserError(f"cannot read {self.path}: {problem}.")

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the bytes from `offset` on."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise self.error(error.strerror or str(error)) from error
            if not count:
                raise self.error(f"it ends at byte {self.size}, before its content does")
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; never allocates more than the file holds."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.error(f"it ends at byte {self.size}, before its content does")
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def close(self) -> None:
        self._file.close()


class Stream(Protocol):
    """Bytes of one array, from the first to the last."""

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes, or raises a UserError."""


class RawStream:
    """The bytes of a file from a position on, unchecked."""

    def __init__(self, file: ByteFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def read_into(self, view: memoryview) -> None:
        self._file.read_into(self._offset, view)
        self._offset += len(view)


class Container(abc.ABC):
    """A file, or several, of named arrays. Reading is safe from several threads.

    Attributes:
      path: the file.
      kind: "npz", "safetensors" or "pth".
      arrays: name to shape and type as stored, in the file's order.
      metadata: the notes that a safetensors file carries; for a pth file which entry was taken
        ("entry") and what was left out ("left_out"); else {}.
    """

    path: Path
    kind: str
    arrays: dict[str, ArrayInfo]
    metadata: dict[str, str]

    def read(self, name: str) -> np.ndarray:
        """One array, contiguous and owned by the caller; floats as float32, the rest as stored.

        Raises:
          UserError: no such name, damaged data, or a float64 beyond the range of float32.
        """
        if name not in self.arrays:
            raise UserError(f"{self.path} has no array {name!r}.{nearest(name, self.arrays)}")
        return self._read(name)

    @abc.abstractmethod
    def _read(self, name: str) -> np.ndarray: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_arrays(container: Container, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Several arrays at once, with threads: reading and checking leave the interpreter free."""
    names = list(names)
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        return dict(zip(names, pool.map(container.read, names), strict=True))


def shorten(value: object) -> str:
    """`value` as shown in an error: in one short line, whatever a hostile file put into it."""
    if not isinstance(value, str | bytes):
        return f"a value of type {type(value).__name__}"
    return repr(value) if len(value) <= 80 else repr(value[:77]) + "..."


def check_name(file: ByteFile, name: object) -> str:
    """Raises a UserError unless `name` is a printable text of sensible length."""
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or not name.isprintable():
        raise file.error(f"{shorten(name)} is no name of an array")
    return name


def check_info(file: ByteFile, name: str, shape: Iterable[object], dtype: str) -> ArrayInfo:
    """The description of an array, once it is one that numpy can hold."""
    sizes: list[int] = []
    for size in shape:
        # Not bool, which is an int too.
        if type(size) is not int or not 0 <= size < _MAX_BYTES or len(sizes) >= _MAX_DIMENSIONS:
            raise file.error(f"array {shorten(name)} has an impossible shape")
        sizes.append(size)
    # numpy multiplies the sizes other than zero even for an array without elements.
    if math.prod(size or 1 for size in sizes) * DTYPES[dtype].itemsize >= _MAX_BYTES:
        raise file.error(f"array {shorten(name)} has an impossible shape")
    return ArrayInfo(tuple(sizes), dtype)


def _loaded_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype.name in _FLOATS else dtype.newbyteorder("=")


def read_values(file: ByteFile, stream: Stream, dtype: np.dtype, info: ArrayInfo) -> np.ndarray:
    """The next `info.num_elements` elements, in C order, as floats or integers of this machine.

    Needs no more memory than the result and a small buffer.

    Args:
      file: named in errors.
      stream: gives elements of type `dtype`.
      dtype: that of `info`, in any byte order.

    Returns:
      An array of shape `info.shape`.
    """
    target = _loaded_dtype(dtype)
    # A byte other than 0 and 1 is no valid bool in memory.
    stored = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    count = info.num_elements
    try:
        values = np.empty(count, target)
    except MemoryError as error:
        raise file.error(f"an array of shape {info.shape} does not fit into memory") from error
    if stored == target:
        stream.read_into(values.view(np.uint8).data)
        return values.reshape(info.shape)
    buffer = np.empty(min(count, _CHUNK_ELEMENTS), stored)
    for start in range(0, count, _CHUNK_ELEMENTS):
        part = buffer[: count - start]
        stream.read_into(part.view(np.uint8).data)
        try:
            with np.errstate(over="raise", under="ignore", invalid="ignore"):
                values[start : start + len(part)] = part
        except FloatingPointError as error:
            raise file.error("an array holds numbers beyond the range of float32") from error
    return values.reshape(info.shape)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` only when it is complete and on disk.

    Raises:
      UserError: the place cannot be written to; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
