"""One file over HTTP, whole or not at all.

Bytes go to NAME.part, which becomes NAME once its size and hashes are right. A broken connection,
or a killed process, costs nothing: the next attempt asks the server for the rest (`Range`), on the
condition that the file is still the same (`If-Range`). Of several processes that want a file one
fetches it while the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from io import BufferedRandom
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.pretrained.zoo.download_bar import mebibytes
from vit_jax.pretrained.zoo.fetch import TryAgain, between, empty, fetch, length_of
from vit_jax.pretrained.zoo.remote_file import RemoteFile, forget, http_address

_LOG = logging.getLogger(__name__)
# An attempt that brought this much counts as a new start: long files meet many short faults.
_PROGRESS = 16 * 2**20
_LONGEST_PAUSE = 60.0


class _Damaged(Exception):
    """All bytes are there, and they are not the right ones."""


def download(
    url: str,
    destination: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    sha256: str = "",
    md5: str = "",
    attempts: int = 5,
    timeout: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Fetches `url` to the file `destination`, unless it is there.

    Args:
      url: gs://, https:// or http://. Proxies are those of the environment.
      destination: path of the file; folders are made.
      size: least and most bytes it may have.
      sha256: in hex; the beginning is enough. "" checks nothing.
      md5: in hex; "" checks nothing. What the server says of itself (x-goog-hash) is checked too.
      attempts: how often in a row a fault may happen before giving up.
      timeout: seconds without a byte that count as a fault.
      sleep: waits between attempts; 1, 2, 4, ... seconds, or what the server asks for.

    Returns:
      `destination`.

    Raises:
      UserError: no such file, no permission, no network, no space, or not the file that was asked
        for; the message says which. What has arrived is kept for the next call.
    """
    http_address(url)  # says what is no address, before any folder is made
    destination = Path(destination)
    if _is_whole(destination, size):
        return destination
    with _held(destination.with_name(destination.name + ".part")) as part:
        if _is_whole(destination, size):  # another process was faster
            return destination
        _LOG.info("Downloading %s to %s.", url, destination)
        faults, restarts = 0, 0
        while True:
            before = length_of(part)
            try:
                remote = fetch(url, part, size, timeout)
                _check(part, remote, size, sha256, md5)
                break
            except _Damaged as error:
                empty(part)
                restarts += 1
                if restarts == 2:  # once may have happened on the way
                    raise UserError(f"{url}: {error}; the file is not kept.") from None
                _LOG.warning("%s: %s; fetching it once more.", url, error)
            except TryAgain as error:
                faults = 1 if length_of(part) - before >= _PROGRESS else faults + 1
                if faults >= attempts:
                    raise UserError(_gave_up(url, faults, part, error)) from error.__cause__
                pause = 2.0 ** (faults - 1) if error.pause is None else error.pause
                pause = min(pause, _LONGEST_PAUSE)
                _LOG.warning("%s: %s; again in %g s.", url, error, pause)
                sleep(pause)
        forget(Path(part.name))
        os.replace(part.name, destination)
    return destination


def _is_whole(path: Path, size: tuple[int, int] | None) -> bool:
    """Whether the file is there, with a size that it may have; it was checked when it came."""
    try:
        length = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    if size is None or size[0] <= length <= size[1]:
        return True
    _LOG.warning("%s has %d bytes, which is not its size; fetching it again.", path, length)
    return False


@contextlib.contextmanager
def _held(path: Path) -> Iterator[BufferedRandom]:
    """Opens the file for appending, locked against other processes; waits for one that has it."""
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(_open(path))
            _lock(file)
            if _is_named(file, path):
                break
            stack.close()
        try:
            yield file
        finally:
            if not length_of(file):
                empty(file)
                path.unlink(missing_ok=True)


def _is_named(file: BufferedRandom, path: Path) -> bool:
    """False where whoever held the file before has renamed or removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _open(path: Path) -> BufferedRandom:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b")
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent} ({error.strerror}); set VIT_JAX_CACHE to a folder "
            "where you may."
        ) from error


def _lock(file: BufferedRandom) -> None:
    """The kernel drops the lock when the file is closed or the process dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _LOG.info("Another process is fetching %s; waiting for it.", file.name)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems cannot
        _LOG.warning("%s cannot be locked (%s).", file.name, error.strerror)


def _gave_up(url: str, faults: int, part: BufferedRandom, error: TryAgain) -> str:
    have = length_of(part)
    end = f" The same command continues at {mebibytes(have)}." if have else ""
    return f"{url}: gave up after {faults} attempts: {error}.{error.advice}{end}"


def _check(
    part: BufferedRandom, remote: RemoteFile, size: tuple[int, int] | None, sha256: str, md5: str
) -> None:
    """Raises _Damaged unless the bytes are those of the file."""
    length = length_of(part)
    if remote.length not in (None, length) or (size and not size[0] <= length <= size[1]):
        wanted = between(size) if size else str(remote.length)
        raise _Damaged(f"it has {length} bytes and should have {wanted}")
    for name, wanted in (("sha256", sha256), ("md5", md5), ("md5", remote.md5)):
        if wanted:
            part.seek(0)
            found = hashlib.file_digest(part, name).hexdigest()
            if not found.startswith(wanted.lower()):
                raise _Damaged(f"its {name} is {found} and should be {wanted}")
