"""Where the members of a tar lie, also of a tar within a tar, without unpacking anything."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.errors import UserError


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
                infos = [info for info in tar if wanted(os.path.basename(info.name))]
                last = tar.offset
        except tarfile.TarError as error:
            reason = "truncated" if "unexpected end" in str(error) else f"not a tar ({error})"
            raise UserError(f"{where}: {reason}; copy it again.") from None
        # tarfile ends in silence where a header is damaged, and an inner tar must not run on.
        file.seek(last)
        if last + 512 > end or file.read(512) != bytes(512):
            raise UserError(f"{where}: truncated or damaged at byte {last}; copy it again.")
    for info in infos:
        if info.islnk() or info.issym() or info.issparse():
            raise UserError(
                f"{where}: {info.name!r} is a link or sparse; pack it again with tar --dereference "
                "--hard-dereference, without --sparse."
            )
    files = [info for info in infos if info.isfile()]
    return [Member(os.path.basename(file.name), file.offset_data, file.size) for file in files]
