"""Who works in a work directory: one process at a time holds its `.lock`.

On a disk that is a record lock, which the kernel drops when the process dies. A bucket has no
locks, but writes that happen only if the object is of a certain generation: of several processes
at most one creates the object, and at most one replaces it. Its holder renews it; whoever waits
sees by his own clock that a killed one does not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore

from vit_jax.errors import REQUEUE_EXIT_CODE, UserError, one_line
from vit_jax.files.paths import is_bucket
from vit_jax.multihost.watchdog import watchdog

_LOG = logging.getLogger(__name__)
_LOCK = ".lock"
RENEW_SECONDS = 20.0
LOST_SECONDS = 120.0  # until a silent host counts as lost; NFS 4 gives it up after 90
_POLL_SECONDS = 2.0
_TIMEOUT = 15.0  # seconds of one request, repetitions included


def lock_folder(folder: Path) -> Callable[[], None]:
    """Takes the exclusive lock of a work directory; returns what gives it back.

    A holder on another host is waited for, in case that host is lost.

    Raises:
      UserError: another process works in it.
      OSError, ValueError: the file system or the bucket refuses.
    """
    if is_bucket(folder):
        bucket_lock = BucketLock(folder, machine=_machine(), on_lost=_end)
        bucket_lock.acquire()
        return bucket_lock.release
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(lock, folder)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {_machine()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return functools.partial(os.close, lock)


def _acquire(lock: int, folder: Path) -> None:
    """Locks the open file, or raises a UserError that says who has it.

    By lockf, because it is not inherited: a worker process that outlives a killed parent must not
    keep the workdir shut, as it would with flock.
    """
    deadline = 0.0
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                _LOG.warning("%s: this file system has no locks; start one run at a time.", folder)
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown"
        if holder.endswith((f" on {_machine()}", "unknown")) or 0 < deadline <= time.monotonic():
            raise _in_use(folder, holder)
        if not deadline:
            deadline = _start_waiting(folder, holder)
        time.sleep(_POLL_SECONDS)


def _in_use(folder: Path, holder: str) -> UserError:
    return UserError(
        f"Workdir {folder} is in use by another process ({holder}). "
        "Wait for it, stop it, or choose another --workdir."
    )


def _start_waiting(folder: Path, holder: str) -> float:
    """Says so; returns when the waiting ends."""
    _LOG.warning(
        f"Workdir {folder} is locked by another host ({holder}): waiting up to "
        f"{LOST_SECONDS:.0f} s, in case it is lost."
    )
    return time.monotonic() + LOST_SECONDS


def _machine() -> str:
    """This host since it was started: Kubernetes gives a pod's name to its successor elsewhere.

    And its process ids, of which each container has its own.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        ids = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
        return f"{name} (boot {boot}, ids {ids})"
    return name


def _end(message: str, exit_code: int) -> None:
    """Ends this process, and the others of its run, from any thread."""
    _LOG.error("error: %s", message)
    watchdog.fail(message, exit_code)
    logging.shutdown()
    os._exit(exit_code)


class BucketLock:
    """The object `.lock`, held from `acquire` to `release`, or until the process ends.

    Args:
      folder: of a bucket.
      machine: name of this machine and of its process ids.
      on_lost: called with one line and a status, by a thread: another run has taken the lock, as
        this process did not renew it for two minutes, or may soon do so. The process has to end.
    """

    def __init__(self, folder: Path, *, machine: str, on_lost: Callable[[str, int], Any]):
        self._folder, self._machine, self._on_lost = folder, machine, on_lost
        self._token = secrets.token_hex(8)
        self._generation = b""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")
        bucket, _, name = str(folder).removeprefix("gs://").partition("/")
        spec = {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}
        retries = {"gcs_request_retries": {"max_retries": 2}}
        self._store = tensorstore.KvStore.open({**spec, **retries}).result()

    def acquire(self) -> None:
        """Waits for a holder that may be lost.

        Raises:
          UserError: another run holds it.
          ValueError, TimeoutError: TensorStore's; the bucket refuses, or does not answer.
        """
        awaited, deadline = b"", 0.0
        generation, holder = self._read()
        while holder.get("token") != self._token:
            if generation == awaited and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            elif not holder or generation == awaited or self._is_dead(holder):
                self._write(generation)
            elif awaited or holder.get("machine") == self._machine:
                raise _in_use(self._folder, _who(holder))
            else:
                awaited, deadline = generation, _start_waiting(self._folder, _who(holder))
            generation, holder = self._read()
        self._generation = generation
        self._renew_once()  # fails in a bucket that keeps what it has (a retention policy)
        self._thread.start()

    def release(self) -> None:
        """Lets others in, if it is still ours."""
        self._released.set()
        self._thread.join()
        try:
            write = self._store.write(_LOCK, None, if_equal=self._generation)
            write.result(timeout=_TIMEOUT)
        except (ValueError, TimeoutError) as error:
            _LOG.warning("%s/%s stays behind: %s", self._folder, _LOCK, one_line(error))

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether it was a process of this machine that is gone, or whose number is another's."""
        same = holder.get("machine") == self._machine
        return same and holder.get("started") != _started(holder.get("pid"))

    def _read(self) -> tuple[bytes, dict[str, Any]]:
        """Generation and content; of a missing object what its first write asks for."""
        found = self._store.read(_LOCK).result(timeout=_TIMEOUT)
        return found.stamp.generation, json.loads(found.value) if found.state == "value" else {}

    def _write(self, generation: bytes) -> None:
        """Writes the object if it is of that generation; only reading it shows whether it was."""
        pid = os.getpid()
        content = {"pid": pid, "started": _started(pid), "machine": self._machine}
        text = json.dumps({**content, "token": self._token})
        self._store.write(_LOCK, text, if_equal=generation).result(timeout=_TIMEOUT)

    def _renew_once(self) -> str:
        """Who has the lock now, if it is no longer ours; else ""."""
        self._write(self._generation)
        generation, holder = self._read()
        if holder.get("token") != self._token:
            return _who(holder)
        self._generation = generation
        return ""

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(RENEW_SECONDS):
            try:
                if holder := self._renew_once():
                    self._on_lost(
                        f"Workdir {self._folder} was taken over by another run ({holder}), "
                        f"because this process did not answer for {LOST_SECONDS:.0f} s.",
                        2,
                    )
                    return
                renewed = time.monotonic()
            except (ValueError, TimeoutError) as error:
                seconds = time.monotonic() - renewed
                reason = f"for {seconds:.0f} s: {one_line(error)}"
                message = f"Workdir {self._folder}: the lock could not be renewed {reason}"
                _LOG.warning(message)
                if seconds > LOST_SECONDS / 2:  # the next attempt may end too late
                    self._on_lost(message, REQUEUE_EXIT_CODE)
                    return


def _started(pid: Any) -> str:
    """When a process began, in the kernel's ticks; "" if there is none, or no telling."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _who(holder: dict[str, Any]) -> str:
    return f"pid {holder.get('pid', '?')} on {holder.get('machine', 'an unknown host')}"
