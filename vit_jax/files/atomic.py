"""Files that have their old content or the new one, also after a loss of power; JSON files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files.paths import is_bucket, move, to_path, uploaded

UNFINISHED = ".unfinished"  # ends the names of files that are being written


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; its file takes the place of `path` only when it is complete and on disk.

    An object of a bucket is written on this machine first.

    Raises:
      OSError: names `path`; nothing is left behind.
    """
    if is_bucket(path):
        with uploaded(to_path(path)) as local:
            yield local
        return
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield temporary
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes text; names of files in it, as Linux has them, need not be text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON, see `replacing`."""
    write_atomically(to_path(path), json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises:
      UserError: the file is missing, unreadable or not JSON; names the file.
    """
    try:
        return json.loads(to_path(path).read_bytes())
    except OSError as error:
        raise as_user_error(f"{path} cannot be read: {one_line(error)}.", error) from error
    except (ValueError, RecursionError) as error:  # ValueError: of JSON and of UTF-8
        raise UserError(f"{path} is damaged, not a JSON file: {error}.") from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON file that holds an object; errors as `read_json`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged, it holds no JSON object.")
    return value


def free_name(path: Path) -> Path:
    """`config.<n>.json` with the first n not taken."""
    numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def set_aside(path: Path, why: str) -> None:
    """Renames what is not ours, or of no use, to its `free_name`, and says so."""
    target = free_name(path)
    move(path, target)
    logging.getLogger(__name__).warning("%s %s: moved to %s.", path, why, target.name)


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
    return to_path(path)


def sync(path: Path) -> None:
    """Waits until the disk has a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do it for folders, and need not.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
