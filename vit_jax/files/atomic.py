"""Files that have their old content or the new one, also after a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from vit_jax.errors import as_user_error

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; its file takes the place of `path` only when it is complete and on disk.

    Raises:
      UserError: the place cannot be written to; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        try:
            yield temporary
            sync(temporary)
            temporary.rename(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise as_user_error(f"cannot write {path}: {error.strerror or error}.", error) from error


def write_atomically(path: Path, text: str) -> None:
    """Writes text; names of files in it, as Linux has them, need not be text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes an `.npz` of named arrays as they are; the same arrays give the same bytes.

    Returns:
      `path`.
    """
    # Not np.savez, which takes the names as keyword arguments: one of them may be called `file`.
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return Path(path)


def sync(path: Path) -> None:
    """Waits until the disk has a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do it for folders, and need not.
        unsupported = error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
        if not (unsupported and path.is_dir()):
            raise
    finally:
        os.close(descriptor)
