"""Files in a bucket that grow."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vit_jax.errors import one_line

_SECONDS = 30.0  # for each MB that is written again


class BucketLog:
    """An open file in a bucket, with the methods of a local one that a log needs.

    An object cannot be appended to, so it is written again as a whole: by a thread, every 30 s
    (less often once it has several MB), and at `flush`. What fails in between is tried again.
    """

    def __init__(self, path: Path, content: bytes):
        self.name = str(path)
        self._path, self._parts = path, [content]  # of which the bucket has the first `_written`
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._writing: Future[Any] = self._pool.submit(lambda: None)
        self._starting, self._written, self._last = 1, 1, time.monotonic()

    def write(self, more: str | bytes) -> None:
        self._parts.append(more.encode() if isinstance(more, str) else more)
        pause = _SECONDS * max(1.0, sum(map(len, self._parts)) / 1e6)
        if time.monotonic() - self._last >= pause and self._writing.done():
            self._settle()
            self._start()

    def flush(self) -> None:
        """Returns once the bucket has all of it; raises where that failed."""
        self._settle()
        if self._written < len(self._parts):
            self._start()
            self._writing.result()
            self._settle()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _start(self) -> None:
        self._last, self._starting = time.monotonic(), len(self._parts)
        self._writing = self._pool.submit(self._path.write_bytes, b"".join(self._parts))

    def _settle(self) -> None:
        """Waits for the write under way and notes what it did."""
        if error := self._writing.exception():
            logging.warning("%s could not be written: %s", self.name, one_line(error))
        else:
            self._written = self._starting


class EventLog(BucketLog):
    """A log that may be lost: `flush` waits for its turn, and nothing raises."""

    def flush(self) -> None:
        self.write(b"")

    def close(self) -> None:
        try:
            BucketLog.flush(self)
        except Exception as error:  # of any client
            logging.warning("%s is not complete: %s", self.name, one_line(error))
        finally:
            self._pool.shutdown()
