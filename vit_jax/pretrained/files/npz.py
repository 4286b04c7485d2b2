"""`.npz` files: a zip file with one array per flat name, in the official code's current naming."""

from __future__ import annotations

import math
import os
import threading
import zipfile
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from vit_jax.pretrained.files.array_file import (
    ArrayInfo,
    BadFile,
    Container,
    shorten,
)

_SUFFIX = ".npy"
_BFLOAT16 = ("<V2", "|V2")  # numpy has none of its own: it writes the bytes without their type
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # whose reader takes a limit
# Trained weights shrink to 0.9 when compressed, a small file of zeros a thousandfold.
_MAX_EXPANSION = 20
_FREE_EXPANSION_BYTES = 512 << 20
# By version; others are for records.
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_zip(file: BinaryIO, size: int) -> zipfile.ZipFile:
    """The zip file of `size` bytes, once it is known not to be a bomb.

    Raises:
      BadFile: its directory is damaged, its members overlap, or it claims to expand to more than
        20 times its size and 512 MiB.
    """
    archive = zipfile.ZipFile(file)
    members = archive.infolist()
    # `zipfile` does not compare: a damaged length in the directory makes members disappear.
    file.seek(-12 - len(archive.comment), os.SEEK_END)
    announced = int.from_bytes(file.read(2), "little")
    if announced not in (len(members), 0xFFFF) or len(set(archive.namelist())) != len(members):
        raise BadFile("its zip directory lacks a name or lists one twice")
    if any(member.compress_type not in _METHODS for member in members):
        raise BadFile("its zip members are neither stored nor deflated")
    if sum(member.compress_size for member in members) > size:
        raise BadFile("its zip members overlap")
    expanded = sum(member.file_size for member in members)
    if expanded > max(_FREE_EXPANSION_BYTES, _MAX_EXPANSION * size):
        raise BadFile(f"its {size} bytes claim to expand to {expanded}, more than weights ever do")
    return archive


def open_npz(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> Container:
    """Opens an `.npz` file, plain or compressed, whose arrays are checked against their CRC-32.

    Pickled content is never loaded. `bfloat16` is recognised in the form in which numpy stores
    it (two bytes without a type), which is that of big_vision's files.

    Raises:
      BadFile, or anything of numpy and zipfile: no arrays of numbers, or damaged.
    """
    arrays = {}
    for member in archive.infolist():
        if not member.filename.endswith(_SUFFIX):
            raise BadFile(f"it is a zip file of {shorten(member.filename)} and the like")
        with archive.open(member) as stream:
            shape, _, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
            num_bytes = member.file_size - stream.tell()
        if dtype.hasobject:
            raise BadFile("it holds pickled Python objects, which are never loaded")
        name = member.filename.removesuffix(_SUFFIX)
        arrays[name] = ArrayInfo(shape, "bfloat16" if dtype.str in _BFLOAT16 else dtype.name)
        if math.prod(shape) * dtype.itemsize != num_bytes:
            raise BadFile(f"array {shorten(name)} of {arrays[name]} cannot have {num_bytes} bytes")

    lock = threading.Lock()

    def read(name: str) -> np.ndarray:
        # One thread at a time: `zipfile` of Python 3.12.1 mixes up what several read, and parsing
        # headers in several threads fails now and then on 3.11 (CPython issue 106905).
        with lock, archive.open(name + _SUFFIX) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        return array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array

    return Container(path, arrays, read, file.close)
