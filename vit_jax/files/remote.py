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
import random
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vit_jax.errors import (
    TransientError,
    UserError,
    is_transient,
    missing_package,
    one_line,
    status_of,
)
from vit_jax.files.network import within
from vit_jax.files.paths import UNFINISHED, bucket_files, cache_dir, replacing
from vit_jax.wording import unsigned

CHUNK = 8 << 20  # bytes that are fetched at once
ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled before each later one
_SILENCE = 300.0  # seconds for an answer
_CLIENTS = {"hf": ("huggingface_hub", "hf"), "gs": ("gcsfs", "gcs")}  # and the extra
_LOCKS = 64
_COMMIT = re.compile("@[0-9a-f]{40}(?=/)")
_NAME = re.compile(rf"[0-9a-f]{{32}}(\..*{UNFINISHED})?")  # of a kept file
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


def asked(shown: str, ask: Callable[[], T], hint: str = "") -> T:
    """What a server answers; it is asked again while it fails.

    UserError if it refuses, TransientError if it fails for long.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return within(_SILENCE, ask)
        except UserError:
            raise
        except Exception as error:  # of any client
            is_told = isinstance(error, FileNotFoundError)  # fsspec calls a 503 so, too
            cause = (is_told and error.__cause__) or error
            problem = unsigned(one_line(cause))
            if status_of(cause) == 412:
                problem = "it has changed since it was opened; start again"
            if not is_transient(cause):
                raise UserError(f"{shown} cannot be read: {problem}{hint}.") from error
        if attempt < ATTEMPTS:
            logging.warning(f"{shown}: {problem}; retrying.")
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise TransientError(f"{shown} cannot be read, attempt {ATTEMPTS}: {problem}.")


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of known size, of which at most `limit` bytes (with all others) are kept on disk."""

    address: str  # a path, if it is on this machine
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

    def keep(
        self, what: str, make: Callable[[Path], None], load: Callable[[Path], T], is_small=False
    ) -> T:
        """What `load` reads of a file that `make` writes, unless it is still there.

        One that is small is never removed.
        """
        address = _COMMIT.sub("", self.address)  # others may have the same file
        key = f"{address} {self.size} {self.version} {what}"
        return kept(key, 0 if is_small else self.limit, make, load)

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
        return asked(unsigned(self.address), functools.partial(self._fetch_once, start, stop))

    def _fetch_once(self, start: int, stop: int) -> bytes:
        options: Any = {"cache_type": "none", "size": self.size}  # else it reads ahead
        scheme = scheme_of(self.address)
        opener: Any = open
        if scheme.startswith("http"):
            options["headers"] = {"Accept-Encoding": "identity"}
            if self.version.startswith('"'):  # a strong ETag
                options["headers"]["If-Match"] = self.version
        if scheme:
            opener = functools.partial(file_system(scheme).open, **options)
        with opener(self.address, "rb") as file:
            file.seek(start)
            try:
                content = file.read(stop - start)
            except ValueError as error:  # fsspec's
                lacks = "its server sends no parts of files; copy it, and use its path"
                raise UserError(f"{unsigned(self.address)}: {lacks}.") from error
        if len(content) < stop - start:
            raise TimeoutError(f"{len(content):,} bytes came for {stop - start:,}")
        return content


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
    folder = _folder("remote" if limit else "remote_index")
    digest = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
    path, is_new = folder / digest, False
    while True:
        with suppress(OSError):  # it is not there, or not ours
            os.utime(path)
        try:
            return load(path)
        except FileNotFoundError:  # it may be removed at any time
            pass
        except Exception:
            if is_new:
                raise
            path.unlink(missing_ok=True)  # damaged on this disk
        try:
            with open(folder / f"lock{int(digest, 16) % _LOCKS}", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                if not path.exists():
                    with replacing(path) as unfinished:
                        make(unfinished)
                    is_new = True
        except OSError as error:
            raise _cannot_write(folder, error) from error
        # All are counted after each 32nd part of the limit, on average.
        with suppress(FileNotFoundError):
            if limit and random.random() * limit < 32 * path.stat().st_size:
                _remove_oldest(folder, limit)


def _folder(name: str) -> Path:
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return folder


def _cannot_write(folder: Path, error: OSError) -> UserError:
    hint = "make room, or set VIT_JAX_CACHE to another folder"
    return UserError(f"{folder} cannot be written to: {one_line(error)}; {hint}.")


def _list(folder: Path) -> list[tuple[float, int, str]]:
    """Time of the last use, size and path of each kept file."""
    files = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(entry.name):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    return files


def _remove_oldest(folder: Path, limit: int) -> None:
    files = _list(folder)
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files)[:-1]:
        if total <= limit * 31 / 32:
            return
        if path.endswith(UNFINISHED) and used > time.time() - 3600:
            continue  # it is being written
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size


def check_room(key: str, needed: int) -> None:
    """Raises a UserError that names `key` unless the disk of the cache has room for it."""
    folder = _folder("remote")
    there = sum(size for _, size, _ in _list(folder))
    if (free := shutil.disk_usage(folder).free + there) < needed:
        room = f"{needed / 2**30:.1f} GiB are needed in {folder}, {free / 2**30:.1f} are free"
        raise UserError(f"{key}: {room}; lower it, or set VIT_JAX_CACHE to a larger disk.")
