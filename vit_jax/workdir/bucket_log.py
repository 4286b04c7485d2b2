"""Files in a bucket that grow."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SECONDS = 30.0


class BucketLog:
    """An open file in a bucket, with the methods of a local one that a log needs.

    An object cannot be appended to, so it is written again as a whole: by a thread, at most every
    30 s, and at `flush`. Errors of the thread are raised by the next call.
    """

    def __init__(self, path: Path, content: bytes):
        self.name = str(path)
        self._path, self._parts = path, [content]  # of which the bucket has the first `_written`
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._writing: Future[Any] = self._pool.submit(lambda: None)
        self._written, self._last = 1, time.monotonic()

    def write(self, more: str | bytes) -> None:
        self._parts.append(more.encode() if isinstance(more, str) else more)
        if time.monotonic() - self._last >= _SECONDS and self._writing.done():
            self._start()

    def flush(self) -> None:
        """Returns once the bucket has all of it."""
        self._writing.result()
        if self._written < len(self._parts):
            self._start()
            self._writing.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _start(self) -> None:
        self._writing.result()
        self._last, self._written = time.monotonic(), len(self._parts)
        self._writing = self._pool.submit(self._path.write_bytes, b"".join(self._parts))
