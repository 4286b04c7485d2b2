"""Weight files as named arrays: `.npz`, safetensors, PyTorch's, Flax's, the index of several.

The contents tell the format. The result is the exact arrays or a one-line UserError; pickled code
is never run. Only `.npz` and zipped `.pth` files have checksums, which are verified.
"""

import os
import re
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import save

from vit_jax.errors import UserError, as_user_error
from vit_jax.files.paths import cache_dir, check_file, parse_json, replacing
from vit_jax.pretrained import torch_file

Arrays = dict[str, np.ndarray]

_MAX_INDEX = 16 << 20  # bytes
# A map of up to 15 pairs, or of up to 65535, and its first key, a string.
_MSGPACK = re.compile(rb"([\x81-\x8f]|\xde..)[\xa1-\xbf\xd9]", re.DOTALL)
_BFLOAT16 = ("<V2", "|V2")  # numpy has no bfloat16: it writes untyped bytes
# First bytes (lower-cased) of other kinds of file, and what they are.
_OTHER_FORMATS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with git lfs pull",
    b"<": "an HTML or XML page, usually a failed download; download the file again",
    b"\x93numpy": "a single numpy array (.npy) without a name",
    b"\x89hdf": "an HDF5 file, as written by Keras and TensorFlow",
    b"\x1f\x8b": "gzip-compressed; unpack it first",
    b"\x80": "a pickle; pickled code is never run",
}


def read_arrays(path: str | os.PathLike[str], entry: str = "", is_shard: bool = False) -> Arrays:
    """Reads all arrays of a file, in their stored dtypes (including `bfloat16`).

    For the index of several files (`model.safetensors.index.json`), reads all of them; a shard may
    not be an index itself. `entry` selects one of several state dicts in a PyTorch file. UserError:
    no such file, not weights (the message says what it is), or damaged.
    """
    path = Path(path)
    try:
        check_file(path)
        arrays = _read_file(path, entry, is_shard)
        if not arrays:
            raise UserError("it has no arrays")
        for name, array in arrays.items():
            if not isinstance(name, str) or not name.isprintable():
                raise UserError(f"{name!r:.80} is not the name of an array")
            if array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16:
                raise UserError(f"array {name!r:.80} has non-numeric type {array.dtype}")
        return arrays
    except UserError as error:
        text = f"cannot read {path}: {str(error).rstrip('.')}{_cache_hint(path)}."
        raise as_user_error(text, error) from error
    except OSError as error:
        raise as_user_error(f"cannot read {path}: {error.strerror or error}.", error) from error
    except Exception as error:  # a hostile file makes the libraries raise anything
        reason = f"{f'{type(error).__name__}: {error}'!r:.90}"
        text = f"cannot read {path}: it is incomplete or damaged, download it again ({reason})"
        raise UserError(f"{text}{_cache_hint(path)}.") from error


def _cache_hint(path: Path) -> str:
    is_ours = path.absolute().is_relative_to(cache_dir().absolute())
    return "; it is in the cache: delete it to download it again" if is_ours else ""


def _read_shards(path: Path, content: bytes) -> Arrays:
    """Reads the files listed in an index next to them; UserError if they are inconsistent."""
    index = parse_json(content)["weight_map"]
    arrays: Arrays = {}
    places: dict[str, str] = {}
    for file in sorted(set(index.values())):
        if file != Path(file).name or file == path.name:
            raise UserError(f"it lists {file!r:.80}, which is not a weight file next to it")
        shard = read_arrays(path.parent / file, is_shard=True)
        places |= dict.fromkeys(shard, file)
        arrays |= shard
    if wrong := sorted(places.items() ^ index.items()):
        raise UserError(f"it disagrees with its files, first on {wrong[0][0]!r:.80}")
    return {name: arrays[name] for name in index}


def _read_file(path: Path, entry: str, is_shard: bool) -> Arrays:
    most = max(512 << 20, 20 * path.stat().st_size)  # bytes of arrays; weights shrink to about 0.9
    with open(path, "rb") as file:
        head = file.read(4096)
        index = head + file.read(_MAX_INDEX) if head.lstrip().startswith(b"{") else b""
        if b'"weight_map"' in index:
            if is_shard:
                raise UserError("it is an index, listed as a weight file by another")
            return _read_shards(path, index)
        file.seek(0)
        if head.startswith(b"PK"):
            archive = zipfile.ZipFile(file)
            file.seek(-12 - len(archive.comment), os.SEEK_END)  # `zipfile` does not check the count
            if int.from_bytes(file.read(2), "little") not in (len(archive.infolist()), 0xFFFF):
                raise UserError("its zip directory is damaged, download it again")
            expanded = sum(member.file_size for member in archive.infolist())
            if expanded > most:
                raise UserError(f"it claims to expand to {expanded} bytes, which weights never do")
            is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
            return torch_file.read_zip(archive, most, entry) if is_torch else _read_npz(archive)
        if torch_file.STREAM_MAGIC in head[:24]:
            return torch_file.read_stream(file, most, entry)
    # The header length comes first; read as text it would be absurdly large.
    if head[8:9] == b"{" and not head[:8].decode("latin-1").isprintable():
        # Not memory-mapped: a failing disk would kill the process.
        with safe_open(path, framework="np", backend="pread") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.offset_keys()}
    if _MSGPACK.match(head):  # of flax.serialization
        return flatten_dict(msgpack_restore(path.read_bytes()), sep="/")
    kind = f"of an unknown format, or damaged; it starts with {head[:40]!r}" if head else "empty"
    start = b"<" if looks_like_a_page(head) else head.lstrip().lower()
    for magic, text in _OTHER_FORMATS.items():
        kind = text if start.startswith(magic) else kind
    supported = ".npz, .safetensors, PyTorch's, Flax's .msgpack files, the .json index of several"
    raise UserError(f"it is {kind}; supported: {supported}")


def looks_like_a_page(head: bytes) -> bool:
    """Whether a file that starts so is HTML or XML in any encoding, maybe after blank lines."""
    # With fewer letters the length of a safetensors header could look like it.
    start = rb"[\s\xef\xbb\xbf\xfe\xff]*<[a-z!?][a-z-]{2}"  # after a byte order mark
    return re.match(start, head.replace(b"\0", b"").lower()) is not None


def _read_npz(archive: zipfile.ZipFile) -> Arrays:
    """Reads an `.npz` file, plain or compressed, and checks its arrays against their CRC-32."""
    arrays = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename:
            raise UserError(f"it is a zip file with other contents ({name!r:.80}, ...)")
        with archive.open(member) as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
            if stream.read(1):  # the checksum covers all of it
                raise UserError(f"array {name!r:.80} has more data than its shape")
        arrays[name] = array.view(ml_dtypes.bfloat16) if array.dtype.str in _BFLOAT16 else array
    return arrays


def write_safetensors(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically; same bytes for the same arrays in any order."""
    # The library writes memory as it is laid out.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(contiguous, metadata))
