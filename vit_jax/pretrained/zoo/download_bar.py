"""How far a download is, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
import time

_EVERY_SECONDS = 0.2


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class Bar:
    """One line on stderr, redrawn as bytes arrive. A context manager; `add` counts bytes."""

    def __init__(self, name: str, *, have: int, length: int | None):
        """
        Args:
          name: of the file.
          have: bytes that were there before.
          length: bytes in all, None if the server does not say.
        """
        self._name, self._have, self._length = name, have, length
        self._new = 0
        self._start = self._drawn = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def __enter__(self) -> Bar:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        if self._on_terminal:
            print(file=sys.stderr)

    def add(self, count: int) -> None:
        self._new += count
        if time.monotonic() - self._drawn >= _EVERY_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._on_terminal:
            print(f"\r{self._line()}\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self) -> str:
        done = self._have + self._new
        speed = self._new / max(self._drawn - self._start, 1e-3)
        parts = [self._name, mebibytes(done), f"{mebibytes(round(speed))}/s"]
        if self._length:
            parts[1] = f"{100 * done // self._length:3} % of {mebibytes(self._length)}"
            if speed:
                left = round((self._length - done) / speed)
                parts.append(f"{left // 60}:{left % 60:02} left")
        return "  ".join(parts)
