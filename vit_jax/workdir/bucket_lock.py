"""The lock of a work directory in a bucket: an object that the run which holds it renews.

A bucket has no locks, but writes that happen only if the object is of a certain generation. So at
most one of several processes creates the object, and at most one replaces it. A holder that was
killed does not renew it; who waits sees that by his own clock, whatever those of the hosts say.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore

from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

_LOG = logging.getLogger(__name__)
RENEW_SECONDS = 20.0
LOST_SECONDS = 120.0  # without a renewal
_POLL_SECONDS = 2.0
_RETRIES = 2  # of one request
_TIMEOUT = 15.0  # seconds, with them


class BucketLock:
    """Held from `acquire` to `release`, or until the process ends.

    Args:
      path: of the object.
      machine: name of this machine and of its process ids.
      on_lost: called with one line and a status, by a thread: another run has taken the lock, as
        this process did not renew it for two minutes, or may soon do so. The process has to end.
    """

    def __init__(self, path: Path, *, machine: str, on_lost: Callable[[str, int], Any]):
        self._folder, self._key = path.parent, path.name
        self._machine, self._on_lost = machine, on_lost
        self._token = secrets.token_hex(8)
        self._generation = b""
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        bucket, _, name = str(path.parent).removeprefix("gs://").partition("/")
        retries = {"max_retries": _RETRIES}
        spec = {
            "driver": "gcs",
            "bucket": bucket,
            "path": f"{name}/",
            "gcs_request_retries": retries,
        }
        self._store = tensorstore.KvStore.open(spec).result()

    def acquire(self) -> None:
        """Waits for a holder that may be lost.

        Raises:
          UserError: another run holds it, or the bucket refuses.
        """
        try:
            self._acquire()
            self._renew_once()  # fails in a bucket that keeps what it has (a retention policy)
        except (ValueError, TimeoutError) as error:  # ValueError: TensorStore's, of any kind
            if isinstance(error, UserError):
                raise
            reason = one_line(error).partition(" [")[0]  # of the request
            message = f"Workdir {self._folder} cannot be locked: {reason}"
            raise as_user_error(message, error) from error
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")
        self._thread.start()

    def release(self) -> None:
        """Lets others in, if it is still ours."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
            try:
                write = self._store.write(self._key, None, if_equal=self._generation)
                write.result(timeout=_TIMEOUT)
            except (ValueError, TimeoutError) as error:
                _LOG.warning("%s/%s stays behind: %s", self._folder, self._key, one_line(error))

    def _acquire(self) -> None:
        seen, deadline = b"", 0.0
        while True:
            generation, holder = self._read()
            if holder.get("token") == self._token:
                self._generation = generation
                return
            if generation == seen and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            elif not holder or generation == seen or self._is_dead(holder):
                # The next turn shows whether it was done: its reply may be lost.
                self._write(generation)
            elif seen or holder.get("machine") == self._machine:
                raise UserError(
                    f"Workdir {self._folder} is in use by another process ({_who(holder)}). "
                    "Wait for it, stop it, or choose another --workdir."
                )
            else:
                seen, deadline = generation, time.monotonic() + LOST_SECONDS
                _LOG.warning(
                    f"Workdir {self._folder} is locked by another host ({_who(holder)}): waiting "
                    f"up to {LOST_SECONDS:.0f} s, in case it is lost."
                )

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        """Whether it was a process of this machine that is gone, or whose number is another's."""
        pid = holder.get("pid")
        if holder.get("machine") != self._machine or type(pid) is not int:
            return False
        return holder.get("started") != _started(pid)

    def _read(self) -> tuple[bytes, dict[str, Any]]:
        """Generation and content; of a missing object what its first write asks for."""
        found = self._store.read(self._key).result(timeout=_TIMEOUT)
        if found.state != "value":
            return found.stamp.generation, {}
        try:
            holder = json.loads(found.value)
        except ValueError:
            holder = None
        unknown = {"pid": "?", "machine": "an unknown host"}
        return found.stamp.generation, holder if isinstance(holder, dict) else unknown

    def _write(self, generation: bytes) -> bytes:
        """The new generation; b"" where the object was of another one than given."""
        pid = os.getpid()
        content = {"pid": pid, "started": _started(pid), "machine": self._machine}
        content["token"] = self._token
        write = self._store.write(self._key, json.dumps(content), if_equal=generation)
        return write.result(timeout=_TIMEOUT).generation

    def _renew_once(self) -> dict[str, Any]:
        """Whoever has the lock now, if it is not ours any more; else {}."""
        written = self._write(self._generation)
        if not written:
            written, holder = self._read()
            if holder.get("token") != self._token:
                return holder or {"pid": "?", "machine": "an unknown host"}
        self._generation = written  # or ours, and its reply was lost
        return {}

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(RENEW_SECONDS):
            try:
                if holder := self._renew_once():
                    self._on_lost(
                        f"Workdir {self._folder} was taken over by another run ({_who(holder)}), "
                        f"because this process did not answer for {LOST_SECONDS:.0f} s.",
                        2,
                    )
                    return
                renewed = time.monotonic()
            except (ValueError, TimeoutError) as error:
                seconds = time.monotonic() - renewed
                reason = f"for {seconds:.0f} s: {one_line(error)}"
                _LOG.warning("%s: the lock could not be renewed %s", self._folder, reason)
                if seconds > LOST_SECONDS / 2:  # the next attempt may end too late
                    message = f"Workdir {self._folder}: the lock could not be renewed {reason}"
                    self._on_lost(message, REQUEUE_EXIT_CODE)
                    return


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" if there is none, or no telling."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _who(holder: dict[str, Any]) -> str:
    return f"pid {holder.get('pid')} on {holder.get('machine')}"
