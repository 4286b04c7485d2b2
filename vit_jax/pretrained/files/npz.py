"""Parameters as an `.npz` file: one array per flat name, in the official code's current naming."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.parameters.names import flatten_names, unflatten_names, unstack_blocks
from vit_jax.pretrained.files.array_file import (
    DTYPES,
    ArrayInfo,
    ByteFile,
    Container,
    check_info,
    read_arrays,
    read_values,
    replacing,
    shorten,
)
from vit_jax.pretrained.files.zip_members import Member, MemberStream, read_members

_SUFFIX = ".npy"
# numpy pads headers to 64 bytes; that of an array of numbers takes 128 or 192.
_MAX_HEADER = 4096


class NpzContainer(Container):
    """An `.npz` file, plain or compressed. Every array is checked against its CRC-32.

    Pickled content is never loaded. `bfloat16` is recognised in the form in which numpy stores
    it (two bytes without a type), which is that of big_vision's files.
    """

    kind = "npz"

    def __init__(self, file: ByteFile, members: list[Member]) -> None:
        """Reads the headers of all members. The container closes `file`.

        Raises:
          UserError: a member is no array of numbers, or its header and its size disagree.
        """
        self.path = file.path
        self.metadata = {}
        self.arrays: dict[str, ArrayInfo] = {}
        self._file = file
        self._places: dict[str, tuple[Member, np.dtype, bool, int]] = {}
        if not members:
            raise file.error("it holds no arrays")
        for member in members:
            name = member.name.removesuffix(_SUFFIX)
            if name in self.arrays:
                raise file.error(f"it holds {shorten(name)} twice")
            dtype, fortran, header_size, info = self._parse_header(name, member)
            self.arrays[name] = info
            self._places[name] = (member, dtype, fortran, header_size)

    def _parse_header(self, name: str, member: Member) -> tuple[np.dtype, bool, int, ArrayInfo]:
        """(type with byte order, column-major, bytes of the header, description)."""
        header = io.BytesIO(MemberStream(self._file, member).read(_MAX_HEADER))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a damaged header that looks like Python 2's
                version = np.lib.format.read_magic(header)
                if version == (1, 0):
                    parse = np.lib.format.read_array_header_1_0
                elif version == (2, 0):
                    parse = np.lib.format.read_array_header_2_0
                else:
                    raise ValueError(f"version {version}")
                shape, fortran, stored = parse(header, max_header_size=_MAX_HEADER)
        except Exception as error:  # numpy evaluates a literal: hostile text raises anything
            raise self._file.error(
                f"member {shorten(name)} is no .npy array of numbers, or damaged"
            ) from error
        if stored.hasobject:
            raise self._file.error(
                f"array {shorten(name)} holds pickled Python objects, which are never loaded"
            )
        # numpy has no bfloat16 of its own: it writes the bytes without their type.
        dtype = DTYPES["bfloat16"] if stored.str in ("<V2", "|V2") else stored
        if dtype.names is not None or dtype.name not in DTYPES:
            raise self._file.error(f"array {shorten(name)} has type {shorten(stored.str)}")
        info = check_info(self._file, name, shape, dtype.name)
        if header.tell() + info.num_bytes != member.size:
            raise self._file.error(
                f"array {shorten(name)} of shape {info.shape} and type {info.dtype} cannot have "
                f"{member.size - header.tell()} bytes"
            )
        return dtype, fortran, header.tell(), info

    def _read(self, name: str) -> np.ndarray:
        member, dtype, fortran, header_size = self._places[name]
        info = self.arrays[name]
        stream = MemberStream(self._file, member)
        stream.read(header_size)  # the checksum covers it
        if fortran:
            transposed = ArrayInfo(info.shape[::-1], info.dtype)
            values = np.ascontiguousarray(read_values(self._file, stream, dtype, transposed).T)
        else:
            values = read_values(self._file, stream, dtype, info)
        stream.finish()
        return values

    def close(self) -> None:
        self._file.close()


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, np.ndarray]) -> Path:
    """Writes named arrays as they are, atomically; the same arrays give the same bytes.

    The file appears under its name only when it is complete and on disk.

    Returns:
      `path`.
    """
    # Not np.savez, which takes the names as keyword arguments: one of them may be called `file`.
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(name + _SUFFIX, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return Path(path)


def write_npz(path: str | os.PathLike[str], params: Any) -> None:
    """Writes a parameter tree (either form of the blocks) as float32, see `write_arrays`."""
    flat = flatten_names(unstack_blocks(params))
    write_arrays(path, {name: np.asarray(x, np.float32) for name, x in flat.items()})


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads an `.npz` file into a nested dict of float32 arrays. Pickled content is never loaded.

    Raises:
      UserError: not an `.npz`, damaged, empty, or holding something else than real arrays.
    """
    file = ByteFile(path)
    try:
        if file.read(0, min(file.size, 2)) != b"PK":
            raise file.error("it is not an .npz of named arrays")
        container = NpzContainer(file, read_members(file))
        for name, info in container.arrays.items():
            if "float" not in info.dtype:
                raise UserError(f"{path}: {name!r} has type {info.dtype}; parameters are floats.")
        return unflatten_names(read_arrays(container, container.arrays))
    finally:
        file.close()
