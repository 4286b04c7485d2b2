"""Traces of single updates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from clu import profiler


class Trace:
    """Records updates first <= step < last into WORKDIR/profile, for TensorBoard or xprof.

    Starting and stopping it, which takes seconds with many devices, happens inside `book()`.
    """

    def __init__(
        self,
        profile_steps: tuple[int, int],
        workdir: str,
        book: Callable[[], AbstractContextManager[None]],
        *,
        first_step: int,
        total_steps: int,
    ):
        self._first, self._last = profile_steps
        self._book = book
        if self._first < self._last and (self._first > total_steps or self._last <= first_step):
            logging.warning(
                "log.profile_steps=(%d, %d): no trace, this session makes the updates %d to %d.",
                *(*profile_steps, first_step, total_steps),
            )
        self._folder = str(Path(workdir) / "profile")
        self._active = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        if not self._active and self._first <= step < self._last:
            jax.block_until_ready(state)  # the host is ahead of the devices
            with self._book():
                profiler.start(self._folder)
            self._active = True
        elif self._active and step >= self._last:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._active:
            with self._book():
                profiler.stop()
            self._active = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
