"""Safetensors files. They have no checksum: a flipped bit in an array goes unnoticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vit_jax.errors import UserError
from vit_jax.files.atomic import replacing
from vit_jax.pretrained.files.array_file import ArrayInfo, Container

# How the library abbreviates types, but for the bits. Others are refused by its name.
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "BOOL": "bool"}


def open_safetensors(path: Path) -> Container:
    """Opens a file whose header the library finds to be sound."""
    # Not through a mapping: a disk that fails would end the process.
    handle = safe_open(path, framework="np", backend="pread")
    arrays = {}
    for name in handle.offset_keys():
        part = handle.get_slice(name)
        code = part.get_dtype()
        kind = code.rstrip("0123456789")
        dtype = _KINDS[kind] + code.removeprefix(kind) if kind in _KINDS else code
        arrays[name] = ArrayInfo(tuple(part.get_shape()), dtype)
    return Container(path, arrays, handle.get_tensor, lambda: handle.__exit__(None, None, None))


def write_safetensors(
    path: str | os.PathLike[str], arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file, atomically.

    The same arrays in any order give the same bytes, as long as `metadata` has one entry: the
    library writes several in a random order.

    Raises:
      UserError: a type that the format lacks, or a place that cannot be written to.
    """
    # The library writes the memory as it lies there.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(contiguous, temporary, metadata)
            temporary.chmod(mode)  # the library makes a file that only its owner may read
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}.") from error
