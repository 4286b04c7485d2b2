"""Safetensors files. They have no checksum: a flipped bit in the data of an array goes unnoticed.

The library reads and judges the header. The data is read here, straight into the result: the
library's arrays come from a mapping of the file, which stays in memory beside them, and it has no
float8 for numpy.
"""

from __future__ import annotations

import json
import os
import struct

import numpy as np
from safetensors import SafetensorError, safe_open

from vit_jax.errors import UserError
from vit_jax.pretrained.files.array_file import (
    DTYPES,
    ArrayInfo,
    ByteFile,
    Container,
    RawStream,
    check_info,
    check_name,
    read_values,
    replacing,
    shorten,
)

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
# The format allows 100 MB; a header takes about 100 bytes per array.
_MAX_HEADER = 16 << 20
_METADATA = "__metadata__"


class SafetensorsContainer(Container):
    """A safetensors file; `metadata` is its `__metadata__`."""

    kind = "safetensors"

    def __init__(self, file: ByteFile) -> None:
        """Reads the header. The container closes `file`.

        Raises:
          UserError: truncated, damaged, or with arrays that overlap, leave gaps or have a type
            that numpy cannot hold.
        """
        self.path = file.path
        self.arrays: dict[str, ArrayInfo] = {}
        self._file = file
        self._offsets: dict[str, int] = {}
        if file.size < _LENGTH.size:
            raise file.error("it is too short for a safetensors file")
        (header_size,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
        position = _LENGTH.size + header_size
        if position > file.size or header_size > _MAX_HEADER:
            raise file.error(
                f"its safetensors header claims {header_size} bytes of {file.size} in the file; "
                "it is incomplete or damaged, fetch it again"
            )
        for name, shape, code in self._parse_header():
            if code not in _NAMES:
                raise file.error(f"array {shorten(name)} has type {shorten(code)}")
            info = check_info(file, check_name(file, name), shape, _NAMES[code])
            self.arrays[name] = info
            self._offsets[name] = position
            position += info.num_bytes
        if not self.arrays:
            raise file.error("it holds no arrays")
        if position != file.size:
            raise file.error(f"it has {file.size} bytes, and its arrays take {position}")

    def _parse_header(self) -> list[tuple[str, list[int], str]]:
        """(name, shape, code of the type) in the order of the data, which has no gaps."""
        try:
            with safe_open(self.path, framework="np") as handle:
                self.metadata = dict(handle.metadata() or {})
                slices = [(name, handle.get_slice(name)) for name in handle.offset_keys()]
                return [(name, part.get_shape(), part.get_dtype()) for name, part in slices]
        except (SafetensorError, OSError, ValueError) as error:
            reason = shorten(str(error))
            raise self._file.error(f"its safetensors header is damaged ({reason})") from error

    def _read(self, name: str) -> np.ndarray:
        info = self.arrays[name]
        stream = RawStream(self._file, self._offsets[name])
        return read_values(self._file, stream, DTYPES[info.dtype].newbyteorder("<"), info)

    def close(self) -> None:
        self._file.close()


def write_safetensors(
    path: str | os.PathLike[str], arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file, atomically; the same arrays and notes give the same bytes.

    Not with the library, which writes the notes in a random order. As there, wide types come
    first, so that every array begins at a multiple of its element's size.

    Raises:
      UserError: a type that the format lacks, or a place that cannot be written to.
    """
    for name, array in arrays.items():
        if array.dtype.name not in _CODES or name == _METADATA:
            raise UserError(f"safetensors files hold no array {name!r} of type {array.dtype}.")
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, object] = {}
    if metadata:
        header[_METADATA] = dict(sorted(metadata.items()))
    end = 0
    for name in names:
        array = arrays[name]
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    with replacing(path) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in names:
            array = arrays[name]
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            file.write(little.reshape(-1).view(np.uint8).data)
