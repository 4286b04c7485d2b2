"""Where the members of a tar lie, also of a tar within a tar, without unpacking anything."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.files.atomic import UNFINISHED, sync


class Member(NamedTuple):
    """A regular file in a tar: its name without folders, and its bytes in the outermost file."""

    name: str
    offset: int
    size: int


def list_tar(
    path: str,
    wanted: Callable[[str], object],
    start: int = 0,
    size: int | None = None,
    *,
    name: str = "",
) -> list[Member]:
    """The files, by name, that are `wanted` of an uncompressed tar; reads headers only.

    The tar is `path`, or `size` bytes from `start` on, an inner tar that errors call `name`.

    Raises:
      UserError: it is no tar, ends too early, or a wanted member does not lie in it as it is (a
        link, a sparse file).
    """
    where = f"{path}: {name}" if name else path
    end = os.path.getsize(path) if size is None else start + size
    with open(path, "rb") as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members = [
                    Member(os.path.basename(info.name), info.offset_data, info.size)
                    for info in _wanted_files(tar, wanted, where)
                ]
                last = tar.offset
        except tarfile.TarError as error:
            reason = "truncated" if "unexpected end" in str(error) else f"not a tar ({error})"
            raise UserError(f"{where}: {reason}; copy it again.") from None
        # tarfile ends in silence where a header is damaged, and an inner tar must not run on.
        file.seek(last)
        if last + 512 > end or file.read(512) != bytes(512):
            raise UserError(f"{where}: truncated or damaged at byte {last}; copy it again.")
    return members


def _wanted_files(
    tar: tarfile.TarFile, wanted: Callable[[str], object], where: str
) -> Iterator[tarfile.TarInfo]:
    """The wanted members; UserError where the bytes do not follow the name in one piece."""
    for info in tar:
        if not wanted(os.path.basename(info.name)):
            continue
        if info.islnk() or info.issym() or info.issparse():
            raise UserError(
                f"{where}: {info.name!r} is a link or sparse; pack it again with tar --dereference "
                "--hard-dereference, without --sparse."
            )
        if info.isfile():
            yield info


def unpack_gzip(
    path: str, folder: Path, wanted: Callable[[str], object], report: Callable[[int], None]
) -> None:
    """Writes the wanted members of a tar.gz, which has no random access, to `folder`.

    Members that are there already (from an interrupted call) are not written again; their folders
    are dropped. `report` is called with the bytes of `path` read since the last call.

    Raises:
      UserError: the archive is damaged, or a wanted member is a link or a sparse file.
    """
    folder.mkdir(exist_ok=True)
    position = 0
    try:
        with open(path, "rb") as packed, tarfile.open(fileobj=packed, mode="r:gz") as tar:
            for info in _wanted_files(tar, wanted, path):
                report(packed.tell() - position)
                position = packed.tell()
                target = folder / os.path.basename(info.name)
                content = tar.extractfile(info)
                if content is None or (target.exists() and target.stat().st_size == info.size):
                    continue
                temporary = target.with_name(target.name + UNFINISHED)
                with open(temporary, "wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                sync(temporary)
                temporary.rename(target)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); copy it again.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot unpack it to {folder} ({error.strerror}).") from None
    sync(folder)
