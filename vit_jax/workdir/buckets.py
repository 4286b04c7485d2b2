"""Work directories in a bucket: a lock without file locks, and files that grow.

A bucket can write an object conditionally on its generation: of several processes
at most one creates the object, and at most one replaces it. Objects cannot be appended to. A disk
lock (claim.py) is waited for in the same way.
"""

import json
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_jax.errors import REQUEUE_EXIT_CODE, UserError, one_line
from vit_jax.files.paths import names_below, size_of

_LOG = logging.getLogger(__name__)
LOCK = ".lock"
LOST_SECONDS = 120.0  # until a silent host counts as lost; NFS 4 gives up after 90
POLL_SECONDS = 2.0
RENEW_SECONDS = 20.0
_TIMEOUT = 15.0  # seconds per request, including retries
_UPLOAD_SECONDS = 30.0  # per MB


def in_use(folder: Path, holder: str) -> UserError:
    return UserError(
        f"Workdir {folder} is in use by another process ({holder}). "
        "Wait for it, stop it, or choose another --workdir."
    )


def start_waiting(folder: Path, holder: str) -> float:
    """Logs that it waits; returns the deadline."""
    _LOG.warning(
        f"Workdir {folder} is locked by another host ({holder}): waiting up to "
        f"{LOST_SECONDS:.0f} s, in case it is lost."
    )
    return time.monotonic() + LOST_SECONDS


class BucketLock:
    """The object `.lock` of a folder, held from `acquire` to `release`, or until the process ends.

    Its holder renews it; waiting processes notice by their own clock if it stops. `machine`
    identifies this machine and its process ids. `on_loss`: see `claim_workdir`.
    """

    def __init__(self, folder: Path, machine: str, on_loss: Callable[[str, int], None]):
        import tensorstore  # slow

        self._folder, self._machine, self._on_loss = folder, machine, on_loss
        self._token = secrets.token_hex(8)
        self._generation = b""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")
        bucket, _, name = str(folder).removeprefix("gs://").partition("/")
        spec = {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}
        retries = {"gcs_request_retries": {"max_retries": 2}}
        self._store = tensorstore.KvStore.open({**spec, **retries}).result()

    def acquire(self) -> None:
        """Waits if the holder may be lost; raises UserError if another run holds it.

        TensorStore raises ValueError if the bucket refuses, TimeoutError if it does not answer.
        """
        awaited, deadline = b"", 0.0
        generation, holder = self._read()
        while holder.get("token") != self._token:
            if generation == awaited and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            elif not holder or generation == awaited or self._is_dead(holder):
                self._write(generation)
            elif awaited or holder.get("machine") == self._machine:
                raise in_use(self._folder, _holder_name(holder))
            else:
                awaited, deadline = generation, start_waiting(self._folder, _holder_name(holder))
            generation, holder = self._read()
        self._generation = generation
        self._renew_once()  # fails if the bucket forbids overwriting (a retention policy)
        self._thread.start()

    def release(self) -> None:
        """Releases the lock, if it is still ours."""
        self._released.set()
        self._thread.join()
        try:
            self._store.write(LOCK, None, if_equal=self._generation).result(timeout=_TIMEOUT)
        except (ValueError, TimeoutError) as error:
            _LOG.warning("Could not remove %s/%s: %s", self._folder, LOCK, one_line(error))

    def end(self, message: str, exit_code: int) -> None:
        """Ends all processes of this run: another run has the lock, or soon may."""
        _LOG.error("error: %s", message)
        self._on_loss(message, exit_code)
        logging.shutdown()
        os._exit(exit_code)

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether it was a process of this machine that is gone, or whose pid has been reused."""
        same = holder.get("machine") == self._machine
        return same and holder.get("started") != _started(holder.get("pid"))

    def _read(self) -> tuple[bytes, dict[str, Any]]:
        """Generation and content; for a missing object, those required to create it."""
        stored = self._store.read(LOCK).result(timeout=_TIMEOUT)
        return stored.stamp.generation, json.loads(stored.value) if stored.state == "value" else {}

    def _write(self, generation: bytes) -> None:
        """Writes the object if it has that generation; only reading it shows whether it did."""
        pid = os.getpid()
        content = {"pid": pid, "started": _started(pid), "machine": self._machine}
        text = json.dumps({**content, "token": self._token})
        self._store.write(LOCK, text, if_equal=generation).result(timeout=_TIMEOUT)

    def _renew_once(self) -> str:
        """The current holder if the lock is no longer ours; else ""."""
        self._write(self._generation)
        generation, holder = self._read()
        if holder.get("token") != self._token:
            return _holder_name(holder)
        self._generation = generation
        return ""

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(RENEW_SECONDS):
            try:
                if holder := self._renew_once():
                    why = f"this process did not respond for {LOST_SECONDS:.0f} s"
                    message = f"was taken over by another run ({holder}), because {why}."
                    return self.end(f"Workdir {self._folder} {message}", 2)
                renewed = time.monotonic()
            except (ValueError, TimeoutError) as error:
                seconds = time.monotonic() - renewed
                reason = f"for {seconds:.0f} s: {one_line(error)}"
                message = f"Workdir {self._folder}: the lock could not be renewed {reason}"
                _LOG.warning(message)
                if seconds > LOST_SECONDS / 2:  # the next attempt may be too late
                    return self.end(message, REQUEUE_EXIT_CODE)


def _started(pid: Any) -> str:
    """Start time of a process, in kernel ticks; "" if there is none, or it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _holder_name(holder: dict[str, Any]) -> str:
    return f"pid {holder.get('pid', '?')} on {holder.get('machine', 'an unknown host')}"


class BucketUpload:
    """Copies the files in `folder` to a bucket, every 30 s per MB and at the end."""

    def __init__(self, target: Path):
        self._temporary = tempfile.TemporaryDirectory()
        self.folder, self._target = Path(self._temporary.name), target
        self._copied: dict[str, int] = {}  # bytes of each file that are in the bucket
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="upload")
        self._thread.start()

    def copy(self, name: str) -> None:
        """Returns when the whole file is in the bucket; raises if that fails."""
        with self._lock:
            content = (self.folder / name).read_bytes()
            if self._copied.get(name) != len(content):
                (self._target / name).write_bytes(content)
                self._copied[name] = len(content)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._temporary.cleanup()

    def _repeat(self) -> None:
        last = False
        while not last:
            size = sum(size_of(self.folder / name) for name in names_below(self.folder))
            last = self._closing.wait(_UPLOAD_SECONDS * max(1.0, size / 1e6))
            for name in names_below(self.folder):
                try:
                    self.copy(name)
                except Exception as error:  # of any client; the next time may do
                    path = self._target / name
                    logging.warning("%s could not be written: %s", path, one_line(error))
