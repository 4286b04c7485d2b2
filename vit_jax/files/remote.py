"""Files on servers, read at random: pieces of them are kept on disk, within a bound.

Addresses are hf://datasets/OWNER/NAME/FILE, https:// and gs://, each read by fsspec's client.
"""

import dataclasses
import fcntl
import functools
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vit_jax.errors import (
    CLIENT_ERRORS,
    TransientError,
    UserError,
    missing_package,
    one_line,
    status_of,
)
from vit_jax.files.network import within
from vit_jax.files.paths import bucket_files, cache_dir, replacing
from vit_jax.wording import unsigned

CHUNK = 8 << 20  # bytes that are fetched at once
ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled before each later one
_SILENCE = 300.0  # seconds for an answer
_CLIENTS = {"hf": ("huggingface_hub", "hf"), "gs": ("gcsfs", "gcs")}  # and the extra
_LOCKS = 64
T = TypeVar("T")


def scheme_of(address: str) -> str:
    """`hf`, `https`, `http` or `gs`; "" for a path."""
    scheme, separator, _ = address.partition("://")
    return scheme if separator and scheme in ("hf", "https", "http", "gs") else ""


@functools.cache
def file_system(scheme: str) -> Any:
    """fsspec's client; UserError if its package is not installed."""
    package, extra = _CLIENTS.get(scheme, ("aiohttp", "http"))
    if importlib.util.find_spec(package) is None:
        raise missing_package(f"{scheme}://", package, extra)
    import fsspec

    return bucket_files() if scheme == "gs" else fsspec.filesystem(scheme)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of known size, of which at most `limit` bytes (with all others) are kept on disk."""

    address: str
    size: int
    version: str  # changes with the content
    limit: int

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `start:stop`, in chunks that are kept; TransientError if none arrive."""
        firsts = range(start // CHUNK * CHUNK, stop, CHUNK)
        return b"".join(self._of_chunk(first, max(start, first), stop) for first in firsts)

    def open(self, read: Callable[[int, int], bytes] | None = None) -> io.RawIOBase:
        """A file object; `read` is `fetch` for one whose bytes are not kept."""
        return _Reader(read or self.read, self.size)

    def keep(self, what: str, make: Callable[[Path], None], load: Callable[[Path], T]) -> T:
        """What `load` reads of a file that `make` writes, unless it is still there."""
        return kept(f"{self.address} {self.size} {self.version} {what}", self.limit, make, load)

    def index(self, what: str, make: Callable[[Path], None], load: Callable[[Path], T]) -> T:
        """The same for what is small, and never removed."""
        return kept(f"{self.address} {self.size} {self.version} {what}", 0, make, load)

    def _of_chunk(self, first: int, start: int, stop: int) -> bytes:
        """The bytes `start:stop`, or less, of the chunk that begins at `first`."""

        def make(path: Path) -> None:
            path.write_bytes(self.fetch(first, min(first + CHUNK, self.size)))

        def load(path: Path) -> bytes:
            with path.open("rb") as file:
                file.seek(start - first)
                return file.read(stop - start)

        return self.keep(f"bytes {first} of {CHUNK}", make, load)

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes from the server; UserError if it has none, or serves no parts of files."""
        shown = unsigned(self.address)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                content = within(_SILENCE, functools.partial(self._fetch_once, start, stop))
                if len(content) == stop - start:
                    return content
                problem = f"{len(content):,} bytes came for {stop - start:,}"
                if len(content) > stop - start:
                    lacks = f"the server sends no parts of files ({problem})"
                    raise UserError(f"{shown}: {lacks}; copy the file, and use its path.")
            except UserError:
                raise
            except Exception as error:  # of any client
                problem = one_line(error)
                if isinstance(error, FileNotFoundError) or status_of(error) in CLIENT_ERRORS:
                    raise UserError(f"{shown} cannot be read: {problem}.") from error
            if attempt < ATTEMPTS:
                logging.warning(f"{shown}: {problem}; retrying.")
                time.sleep(PAUSE * 2 ** (attempt - 1))
        raise TransientError(f"{shown} cannot be read, attempt {ATTEMPTS}: {problem}.")

    def _fetch_once(self, start: int, stop: int) -> bytes:
        scheme = scheme_of(self.address)
        options = {"cache_type": "none"} if scheme == "hf" else {}  # else it reads ahead
        return file_system(scheme).cat_file(self.address, start=start, end=stop, **options)


class _Reader(io.RawIOBase):
    """The bytes of a RemoteFile as a file object."""

    def __init__(self, read: Callable[[int, int], bytes], size: int):
        self._read, self._size, self._position = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        size = left if size is None or size < 0 else min(size, left)
        content = self._read(self._position, self._position + size) if size else b""
        self._position += size
        return content


def kept(key: str, limit: int, make: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """What `load` reads of the file of this key, which `make` writes if it is not there.

    When one is written, those that were not read for longest are removed until all have at most
    `limit` bytes; 0 is no limit. Threads and processes wait for each other, so none makes it twice.
    """
    folder = cache_dir() / ("remote" if limit else "remote_index")
    digest = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
    path = folder / digest
    while True:
        with suppress(FileNotFoundError):  # it may be removed at any time
            with suppress(PermissionError):  # of another user
                os.utime(path)
            return load(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"lock{int(digest, 16) % _LOCKS}", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                if not path.exists():
                    with replacing(path) as unfinished:
                        make(unfinished)
        except OSError as error:
            hint = "make room, or set VIT_JAX_CACHE to another folder"
            raise UserError(f"{folder} cannot be written to: {one_line(error)}; {hint}.") from error
        if limit:
            _remove_oldest(folder, limit)


def _remove_oldest(folder: Path, limit: int) -> None:
    files = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            if not entry.name.startswith("lock"):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files)[:-1]:
        if total <= limit:
            return
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size


def check_room(key: str, needed: int) -> None:
    """Raises a UserError that names `key` unless the disk of the cache has room for it."""
    (folder := cache_dir() / "remote").mkdir(parents=True, exist_ok=True)
    there = sum(entry.stat().st_size for entry in os.scandir(folder))
    if (free := shutil.disk_usage(folder).free + there) < needed:
        room = f"{needed / 2**30:.1f} GiB are needed in {folder}, {free / 2**30:.1f} are free"
        raise UserError(f"{key}: {room}; lower it, or set VIT_JAX_CACHE to a larger disk.")
