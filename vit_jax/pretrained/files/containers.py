"""Files of weights as named arrays, whatever their format and whatever their name.

    with open_container(path) as container:
        for name, info in container.arrays.items():  # shapes and types, before any data is read
            array = container.read(name)

Safe on any file: what is no intact file of weights gives a UserError of one line. Pickled code is
never run, and nothing is allocated because a file merely claims to need it. `.npz` and zipped
`.pth` files are verified by checksums; safetensors files and `.pth` files in the stream format of
torch < 1.6 have none, so that there a flipped bit inside an array goes unnoticed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from vit_jax.pretrained.files.array_file import (
    ArrayInfo,
    ByteFile,
    Container,
    check_name,
    read_arrays,
    shorten,
)
from vit_jax.pretrained.files.npz import NpzContainer
from vit_jax.pretrained.files.safetensors import SafetensorsContainer
from vit_jax.pretrained.files.torch import LEGACY_MAGIC, TorchContainer
from vit_jax.pretrained.files.zip_members import read_members

__all__ = ["ArrayInfo", "Container", "open_container", "open_sharded", "read_arrays"]

_READ = (
    ".npz, .safetensors and PyTorch's .pth/.pt/.bin files of a state dict are read, and the .json "
    "index of safetensors or .bin files"
)
_MAX_INDEX_BYTES = 16 << 20
_MAX_SHARDS = 256

# (position, bytes there, what the file is); the first that fits is named.
_LOOKS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with git lfs pull"),
    (0, b"\x93NUMPY", "a single array of numpy (.npy), without names"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write"),
    (0, b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (0, b"BZh", "bzip2-compressed; unpack it first"),
    (0, b"\xfd7zXZ\0", "xz-compressed; unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (257, b"ustar", "a tar archive; unpack it first"),
    (0, b"GGUF", "a GGUF file"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (0, b"model_checkpoint_path:", "the index of a TensorFlow checkpoint"),
    (0, b"\x08\x01\x12", "a TensorFlow SavedModel"),
    *((0, bytes([8, version, 0x12]), "an ONNX model") for version in range(3, 32)),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"%PDF", "a PDF document"),
)
# A table of LevelDB ends like this; TensorFlow's checkpoint.index is one.
_TABLE_END = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"


def open_container(path: str | os.PathLike[str]) -> Container:
    """Opens a file of named arrays; its kind is recognised from its content.

    Raises:
      UserError: no such file, something else than weights (the error says what, where that can
        be told), or damaged.
    """
    file = ByteFile(path)
    try:
        if _begins_json(file) and b'"weight_map"' in file.read(0, file.size):
            file.close()
            return open_sharded(path)
        return _open_arrays(file)
    except BaseException:
        file.close()
        raise


def _begins_json(file: ByteFile) -> bool:
    head = file.read(0, min(file.size, 64))
    return head.lstrip().startswith(b"{") and file.size <= _MAX_INDEX_BYTES


def _open_arrays(file: ByteFile) -> Container:
    """Opens a file that holds arrays itself."""
    head = file.read(0, min(file.size, 512))
    if head.startswith(b"PK"):
        return _open_zip(file)
    if head.startswith(LEGACY_MAGIC):
        return TorchContainer(file, None)
    # The length of the header comes first; as text it would be an absurd one.
    if head[8:9] == b"{" and not head[:8].decode("latin-1").isprintable():
        return SafetensorsContainer(file)
    raise file.error(f"it is {_look_at(file, head)}; {_READ}")


def _open_zip(file: ByteFile) -> Container:
    members = read_members(file)
    names = [member.name for member in members]
    if any(name.endswith("/data.pkl") for name in names):
        return TorchContainer(file, members)
    if names and not any(name.endswith(".npy") for name in names):
        raise file.error(f"it is a zip file of {shorten(names[0])} and the like; {_READ}")
    return NpzContainer(file, members)


def _look_at(file: ByteFile, head: bytes) -> str:
    """What a file is that cannot be read, in words."""
    if not head:
        return "empty"
    for position, magic, text in _LOOKS:
        if head[position : position + len(magic)] == magic:
            return text
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page, as a failed download leaves; fetch the file again"
    if start.startswith(b"<?xml"):
        return "an XML document, as a failed download leaves; fetch the file again"
    if head[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"):
        return "a pickle, and pickled code is never run"
    # A map of few or of many entries, whose first key is a text.
    size = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x81 <= head[0] <= 0x8F else 0)
    if size and len(head) > size and (0xA0 <= head[size] <= 0xBF or head[size] in (0xD9, 0xDA)):
        return "a msgpack file, as flax.serialization writes"
    if file.size >= 8 and file.read(file.size - 8, 8) == _TABLE_END:
        return "the index of a TensorFlow checkpoint"
    text = head.decode("utf-8", "ignore").strip()
    if text.isascii() and all(char.isprintable() or char.isspace() for char in text) and text:
        return f"a text that begins with {shorten(text[:40])}"
    return "of no kind that is known here, or damaged"


def open_sharded(index_path: str | os.PathLike[str]) -> Container:
    """Opens a model that Hugging Face's libraries split over several files, from its index.

    Args:
      index_path: `model.safetensors.index.json` or the like, beside the files it names.

    Raises:
      UserError: the index is damaged, names files elsewhere, or does not agree with the files.
    """
    file = ByteFile(index_path)
    try:
        if file.size > _MAX_INDEX_BYTES:
            raise file.error(f"it has more than {_MAX_INDEX_BYTES} bytes, too many for an index")
        try:
            weight_map = json.loads(file.read(0, file.size))["weight_map"]
            shards = {check_name(file, shard) for shard in weight_map.values()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise file.error("it is no index of a model in several files, or damaged") from error
        if not shards or len(shards) > _MAX_SHARDS:
            raise file.error(f"it names {len(shards)} files; 1 to {_MAX_SHARDS} are read")
        return _Shards(file, weight_map, sorted(shards))
    finally:
        file.close()


def _open_shard(path: Path) -> Container:
    """Not `open_container`: an index that names itself would be opened for ever."""
    file = ByteFile(path)
    try:
        return _open_arrays(file)
    except BaseException:
        file.close()
        raise


class _Shards(Container):
    """Several containers as one; `kind` is theirs, `metadata` that of the first."""

    def __init__(self, index: ByteFile, weight_map: dict[str, str], shards: list[str]) -> None:
        self.path = index.path
        self.arrays = {}
        self._shards: dict[str, Container] = {}
        try:
            for shard in shards:
                # A plain name: a hostile index must not reach files outside its folder.
                if shard != Path(shard).name or shard.startswith("."):
                    raise index.error(f"it names {shorten(shard)}, not a file beside it")
                self._shards[shard] = _open_shard(index.path.parent / shard)
                self.arrays |= self._shards[shard].arrays
            inside = {(name, shard) for shard, part in self._shards.items() for name in part.arrays}
            wrong = sorted(inside ^ set(weight_map.items()))
            if wrong:
                raise index.error(f"it and its files disagree, first about {shorten(wrong[0][0])}")
        except BaseException:
            self.close()
            raise
        self.kind = self._shards[shards[0]].kind
        self.metadata = self._shards[shards[0]].metadata
        self._where = weight_map

    def _read(self, name: str) -> np.ndarray:
        return self._shards[self._where[name]].read(name)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()
