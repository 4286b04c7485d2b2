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

import contextlib
import json
import os
from pathlib import Path

from vit_jax.pretrained.files.array_file import BadFile, Container, reading, shorten
from vit_jax.pretrained.files.npz import open_npz, open_zip
from vit_jax.pretrained.files.safetensors import open_safetensors
from vit_jax.pretrained.files.torch import STREAM_MAGIC, open_torch

_MAX_INDEX_BYTES = 16 << 20

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


def open_container(path: str | os.PathLike[str]) -> Container:
    """Opens a file of named arrays; its kind is recognised from its content.

    The index of a model in several files (Hugging Face's `model.safetensors.index.json`) opens
    them all, as one.

    Raises:
      UserError: no such file, something else than weights (the error says what, where that can
        be told), or damaged.
    """
    path = Path(path)
    with reading(path):
        index = _read_index(path)
        return _open_file(path) if index is None else _open_shards(path, index)


def _read_index(path: Path) -> dict[str, str] | None:
    """Names of arrays and the files they are in; None for a file that is no such index."""
    # Asked first: opening a pipe would wait for a writer.
    if path.exists() and not path.is_file():
        raise BadFile("it is a folder or a device, not a file")
    with open(path, "rb") as file:
        if not file.read(64).lstrip().startswith(b"{") or path.stat().st_size > _MAX_INDEX_BYTES:
            return None
    content = json.loads(path.read_bytes())
    return content.get("weight_map") if isinstance(content, dict) else None


def _open_file(path: Path) -> Container:
    """Opens a file that holds arrays itself."""
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(open(path, "rb"))
        head = file.read(512)
        if head.startswith(b"PK"):
            archive = open_zip(file, path.stat().st_size)
            is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
            container = (open_torch if is_torch else open_npz)(path, file, archive)
        elif head.startswith(STREAM_MAGIC):
            container = open_torch(path, file, None)
        # The length of the header comes first; as text it would be an absurd one.
        elif head[8:9] == b"{" and not head[:8].decode("latin-1").isprintable():
            return open_safetensors(path)
        else:
            raise BadFile(
                f"it is {_look_at(head)}; .npz, .safetensors and PyTorch's .pth/.pt/.bin files are "
                "read, and the .json index of several"
            )
        on_error.pop_all()
        return container


def _look_at(head: bytes) -> str:
    """What a file is that cannot be read, in words."""
    if not head:
        return "empty"
    for magic, text in _OTHERS.items():
        if head.lstrip().lower().startswith(magic):
            return text
    return f"of no known kind, or damaged; it begins with {shorten(head[:40])}"


def _open_shards(path: Path, index: dict[str, str]) -> Container:
    """Opens several files as one, from their index beside them.

    Raises:
      BadFile: the index names files elsewhere, or does not agree with the files.
    """
    with contextlib.ExitStack() as on_error:
        shards: dict[str, Container] = {}
        for file in sorted(set(index.values())):
            # A plain name: a hostile index must not reach files outside its folder.
            if file != Path(file).name:
                raise BadFile(f"it names {shorten(file)}, not a file beside it")
            # Not open_container: an index that names itself would be opened for ever.
            with reading(path.parent / file):
                shards[file] = on_error.enter_context(_open_file(path.parent / file))
        inside = {(name, file) for file, shard in shards.items() for name in shard.arrays}
        wrong = sorted(inside ^ set(index.items()))
        if wrong:
            raise BadFile(f"it and its files disagree, first about {shorten(wrong[0][0])}")
        return Container(
            path,
            arrays={name: shards[file].arrays[name] for name, file in index.items()},
            read_stored=lambda name: shards[index[name]].read(name),
            close=on_error.pop_all().close,
        )
