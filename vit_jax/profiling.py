"""Traces of single updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from clu import profiler


class Trace:
    """Records updates first <= step < last into WORKDIR/profile, for TensorBoard or xprof."""

    def __init__(self, profile_steps: tuple[int, int], workdir: str):
        self._first, self._last = profile_steps
        self._folder = str(Path(workdir) / "profile")
        self._active = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        if not self._active and self._first <= step < self._last:
            jax.block_until_ready(state)  # the host is ahead of the devices
            profiler.start(self._folder)
            self._active = True
        elif self._active and step >= self._last:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._active:
            profiler.stop()
            self._active = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
