"""Traces of single updates, by JAX's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax


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
                "log.profile_steps=%s: no trace, this session makes the updates %d to %d.",
                profile_steps, first_step, total_steps,
            )  # fmt: skip
        self._folder = str(Path(workdir) / "profile")
        self._active = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        due = self._first <= step < self._last
        if due == self._active:
            return
        jax.block_until_ready(state)  # the host is ahead of the devices
        if due:
            with self._book():
                jax.profiler.start_trace(self._folder)
            self._active = True
        else:
            self._stop()

    def _stop(self) -> None:
        if self._active:
            with self._book():
                jax.profiler.stop_trace()
            self._active = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
