"""Where the members of a tar lie, also of a tar within a tar, without unpacking anything."""

from __future__ import annotations

import dataclasses
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.files.manifest import UNFINISHED, sync


@dataclasses.dataclass(frozen=True)
class Member:
    """A regular file in a tar: its path there, and its bytes in the outermost file."""

    name: str
    offset: int
    size: int


class _Range(io.RawIOBase):
    """Bytes `start : start + size` of an open file, as a file of its own."""

    def __init__(self, file: int, start: int, size: int):
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size < 0 else min(size, left)
        data = os.pread(self._file, wanted, self._start + self._position)
        self._position += len(data)
        return data


def list_tar(
    path: str,
    wanted: Callable[[str], bool],
    start: int = 0,
    size: int | None = None,
    *,
    name: str = "",
) -> list[Member]:
    """The wanted files of a tar that is `path`, or lies at `start` in it; reads headers only.

    Args:
      path: an uncompressed file.
      wanted: tells by a member's file name.
      start: where the tar begins.
      size: its bytes; to the end of the file by default.
      name: what to call an inner tar in errors.

    Raises:
      UserError: it cannot be read, is no tar, ends too early, or a wanted member does not lie in
        it as it is (a link, a sparse file).
    """
    where = f"{path}: {name}" if name else path
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    try:
        stored = os.fstat(file).st_size
        size = stored - start if size is None else size
        if start + size > stored:
            raise UserError(f"{where}: truncated: it ends after {stored} bytes; copy it again.")
        content = _Range(file, start, size)
        with tarfile.open(fileobj=content, mode="r:", bufsize=512) as tar:
            members = [
                Member(info.name, start + info.offset_data, info.size)
                for info in tar
                if _is_file(info, wanted, where)
            ]
            end = tar.offset
        content.seek(end)
        # tarfile stops in silence where a header is missing or damaged.
        if content.read(512) != bytes(512):
            raise UserError(f"{where}: truncated or damaged at byte {end}; copy it again.")
        return members
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}.") from None
    except tarfile.TarError as error:
        reason = "truncated" if "unexpected end" in str(error) else f"not a tar ({error})"
        raise UserError(f"{where}: {reason}; copy it again.") from None
    finally:
        os.close(file)


def _is_file(info: tarfile.TarInfo, wanted: Callable[[str], bool], where: str) -> bool:
    """Whether a member is wanted; UserError if its bytes do not follow its name in one piece."""
    if not wanted(os.path.basename(info.name)):
        return False
    if info.islnk() or info.issym():
        raise UserError(
            f"{where}: {info.name!r} is only a link to {info.linkname!r}; pack it again with "
            "tar --dereference --hard-dereference."
        )
    if info.issparse():
        raise UserError(f"{where}: {info.name!r} is sparse; pack it again without tar --sparse.")
    return info.isfile()


def is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def unpack_stream(
    path: str, folder: Path, wanted: Callable[[str], bool], report: Callable[[int], None]
) -> None:
    """Writes the wanted members of a compressed tar to `folder`, which gives no random access.

    Members that are there already (from an interrupted call) are not written again.

    Args:
      path: a tar, compressed by gzip.
      folder: where to; the members' folders are dropped.
      wanted: tells by a member's file name.
      report: called with the bytes of `path` read so far.

    Raises:
      UserError: the archive is damaged or truncated, a wanted member is a link or a sparse file,
        or the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "rb") as packed, tarfile.open(fileobj=packed, mode="r:gz") as tar:
            for info in tar:
                report(packed.tell())
                target = folder / os.path.basename(info.name)
                if not _is_file(info, wanted, path):
                    continue
                if target.exists() and target.stat().st_size == info.size:
                    continue
                content = tar.extractfile(info)
                assert content is not None
                temporary = target.with_name(target.name + UNFINISHED)
                with open(temporary, "wb") as file:
                    while block := content.read(1 << 20):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(target)
        sync(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); copy it again.") from None
    except OSError as error:
        if error.errno is None:  # gzip's own, as of a wrong checksum
            raise UserError(f"{path}: damaged ({error}); copy it again.") from None
        raise UserError(f"{path}: cannot unpack it to {folder} ({error.strerror}).") from None
