"""Traces of single updates, by JAX's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import jax

from vit_jax.files.paths import is_bucket, to_path, uploaded


@contextmanager
def trace(workdir: str) -> Iterator[None]:
    """Records what the devices do into WORKDIR/profile, for TensorBoard or xprof."""
    folder = to_path(workdir) / "profile"
    # A bucket, which the profiler cannot write to, gets a copy at the end.
    place = uploaded(folder) if is_bucket(folder) else nullcontext(folder)
    with place as local, jax.profiler.trace(str(local)):
        yield


class Trace:
    """Records updates first <= step < last.

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
        self._workdir, self._book, self._recording = workdir, book, ExitStack()
        self._active = False
        if self._first < self._last and (self._first > total_steps or self._last <= first_step):
            logging.warning(
                f"log.profile_steps={profile_steps}: no trace, this session makes the updates "
                f"{first_step} to {total_steps}."
            )

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        if (self._first <= step < self._last) != self._active:
            jax.block_until_ready(state)  # the host is ahead of the devices
            self._switch()

    def _switch(self) -> None:
        with self._book():
            if self._active:
                self._recording.close()
            else:
                self._recording.enter_context(trace(self._workdir))
        self._active = not self._active

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._switch()
