"""Files of weights as named arrays: `.npz`, safetensors, PyTorch's, and the index of several.

A file is recognised by its content. The result is its true arrays or a UserError of one line;
pickled code is never run. `.npz` and zipped `.pth` files are verified by checksums; safetensors
and the stream format of torch < 1.6 have none: a flipped bit goes unnoticed there.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vit_jax.errors import UserError, as_user_error
from vit_jax.files.paths import cache_dir, replacing
from vit_jax.pretrained import torch_file

Arrays = dict[str, np.ndarray]

_MAX_INDEX = 16 << 20  # bytes
# Trained weights shrink to 0.9 when compressed, a small file of zeros a thousandfold.
_MAX_EXPANSION = 20
_FREE_EXPANSION_BYTES = 512 << 20
_BFLOAT16 = ("<V2", "|V2")  # numpy has none of its own: it writes the bytes without their type
# How other files begin (in lower case), and what they are.
_OTHERS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with git lfs pull",
    b"<": "an HTML or XML page, as a failed download leaves; fetch the file again",
    b"\x93numpy": "a single array of numpy (.npy), without names",
    b"\x89hdf": "an HDF5 file, as Keras and TensorFlow write",
    b"\x1f\x8b": "gzip-compressed; unpack it first",
    b"\x80": "a pickle, and pickled code is never run",
    b"\x81": "a msgpack file, as flax.serialization writes",
}


def read_arrays(path: str | os.PathLike[str], entry: str = "") -> Arrays:
    """Reads all arrays of a file, in the types in which they are stored (`bfloat16` included).

    The index of several files (`model.safetensors.index.json`) gives the arrays of all of them.
    `entry` names one of several state dicts in a file of PyTorch's.

    Raises:
      UserError: no such file, something else than weights (it says what), or damaged.
    """
    path = Path(path)
    try:
        # Asked first: opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise UserError("it is a folder or a device, not a file")
        arrays = _read_file(path, entry)
        if not arrays:
            raise UserError("it holds no arrays")
        for name, array in arrays.items():
            if not isinstance(name, str) or not name.isprintable():
                raise UserError(f"{name!r:.80} is no name of an array")
            if array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16:
                raise UserError(f"array {name!r:.80} has type {array.dtype}; only numbers are read")
        return arrays
    except UserError as error:
        text = f"cannot read {path}: {str(error).rstrip('.')}{_of_cache(path)}."
        raise as_user_error(text, error) from error
    except OSError as error:
        raise as_user_error(f"cannot read {path}: {error.strerror or error}.", error) from error
    except Exception as error:  # a hostile file makes the libraries raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"cannot read {path}: it is incomplete or damaged, fetch it again ({reason!r:.90})"
            f"{_of_cache(path)}."
        ) from error


def _of_cache(path: Path) -> str:
    is_ours = path.absolute().is_relative_to(cache_dir().absolute())
    return "; it is in the cache: delete it, and it is fetched again" if is_ours else ""


def _read_shards(path: Path) -> Arrays:
    """Reads the files that an index beside them names; UserError where they do not agree."""
    index = json.loads(path.read_bytes())["weight_map"]
    arrays: Arrays = {}
    places: dict[str, str] = {}
    for file in sorted(set(index.values())):
        if file != Path(file).name or file == path.name:
            raise UserError(f"it names {file!r:.80}, not a file of weights beside it")
        found = read_arrays(path.parent / file)
        places |= dict.fromkeys(found, file)
        arrays |= found
    if wrong := sorted(places.items() ^ index.items()):
        raise UserError(f"it and its files disagree, first about {wrong[0][0]!r:.80}")
    return {name: arrays[name] for name in index}


def _read_file(path: Path, entry: str) -> Arrays:
    with open(path, "rb") as file:
        head = file.read(512)
        if head.lstrip().startswith(b"{") and b'"weight_map"' in head + file.read(_MAX_INDEX):
            return _read_shards(path)
        file.seek(0)
        if head.startswith(b"PK"):
            archive = _open_zip(file)
            is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
            return torch_file.read_zip(archive, entry) if is_torch else _read_npz(archive)
        if head.startswith(torch_file.STREAM_MAGIC):
            return torch_file.read_stream(file, entry)
    # The length of the header comes first; as text it would be an absurd one.
    if head[8:9] == b"{" and not head[:8].decode("latin-1").isprintable():
        # Not through a mapping: a disk that fails would end the process.
        with safe_open(path, framework="np", backend="pread") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.offset_keys()}
    kind = f"of no known kind, or damaged; it begins with {head[:40]!r}" if head else "empty"
    for magic, text in _OTHERS.items():
        kind = text if head.lstrip().lower().startswith(magic) else kind
    raise UserError(
        f"it is {kind}; .npz, .safetensors and PyTorch's .pth/.pt/.bin files are read, and the "
        ".json index of several"
    )


def _open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """A zip file; UserError for a damaged directory or more than `_MAX_EXPANSION`."""
    archive = zipfile.ZipFile(file)
    members = archive.infolist()
    # `zipfile` does not compare: a damaged length in the directory makes members disappear.
    file.seek(-12 - len(archive.comment), os.SEEK_END)
    if int.from_bytes(file.read(2), "little") not in (len(members), 0xFFFF):
        raise UserError("its zip directory is damaged, fetch it again")
    size = os.fstat(file.fileno()).st_size
    expanded = sum(member.file_size for member in members)
    if expanded > max(_FREE_EXPANSION_BYTES, _MAX_EXPANSION * size):
        raise UserError(f"its {size} bytes claim to expand to {expanded}, as weights never do")
    return archive


def _read_npz(archive: zipfile.ZipFile) -> Arrays:
    """Reads an `.npz` file, plain or compressed, whose arrays are checked against their CRC-32."""
    arrays = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename:
            raise UserError(f"it is a zip file of {name!r:.80} and the like")
        with archive.open(member) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
            if stream.read(1):  # the checksum is that of the whole
                raise UserError(f"array {name!r:.80} is longer than its shape says")
        arrays[name] = array.view(ml_dtypes.bfloat16) if array.dtype.str in _BFLOAT16 else array
    return arrays


def write_safetensors(
    path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]
) -> None:
    """Writes a safetensors file, atomically: the same bytes for the same arrays in any order.

    UserError for a type that the format lacks, or a place that cannot be written to.
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
