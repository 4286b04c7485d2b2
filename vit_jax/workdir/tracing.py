"""Traces of single updates, by JAX's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax

from vit_jax.files.paths import is_bucket, to_path, uploaded


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
                f"log.profile_steps={profile_steps}: no trace, this session makes the updates "
                f"{first_step} to {total_steps}."
            )
        self._folder = to_path(workdir) / "profile"
        self._upload = ExitStack()
        self._active = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        if (self._first <= step < self._last) != self._active:
            jax.block_until_ready(state)  # the host is ahead of the devices
            self._switch()

    def _switch(self) -> None:
        with self._book():
            if self._active:
                jax.profiler.stop_trace()
                self._upload.close()
            else:
                folder = self._folder
                if is_bucket(folder):  # which the profiler cannot write to
                    folder = self._upload.enter_context(uploaded(folder))
                jax.profiler.start_trace(str(folder))
        self._active = not self._active

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._switch()
