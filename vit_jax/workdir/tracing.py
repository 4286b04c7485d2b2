"""Traces of single updates, by JAX's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import jax

from vit_jax.files.paths import is_bucket, to_path, uploaded


class Profile:
    """Records updates first <= step < last of a run into WORKDIR/profile, for TensorBoard or xprof.

    Starting and ending it, which takes seconds with many devices, happens inside `book(step)`.
    """

    def __init__(
        self,
        workdir: str,
        steps: tuple[int, int],
        start_step: int,
        total_steps: int,
        book: Callable[[int], AbstractContextManager[None]],
    ):
        self._folder, self._book, self._recording = to_path(workdir) / "profile", book, ExitStack()
        self._first, self._last = max(steps[0], start_step + 1), steps[1]
        if steps[0] < steps[1] and not self._first < min(self._last, total_steps + 1):
            logging.warning(
                f"log.profile_steps={steps}: no trace, this session makes the updates "
                f"{start_step + 1} to {total_steps}."
            )

    def before(self, step: int, state: Any) -> None:
        """To be called before each update, with the state that it starts from."""
        if step in (self._first, self._last):
            with self._book(step):
                jax.block_until_ready(state)  # the host is ahead of the devices
                self._recording.close()
                if step < self._last:
                    folder = self._folder
                    # A bucket, which the profiler cannot write to, gets a copy at the end.
                    place = uploaded(folder) if is_bucket(folder) else nullcontext(folder)
                    local = self._recording.enter_context(place)
                    self._recording.enter_context(jax.profiler.trace(str(local)))

    def close(self) -> None:
        self._recording.close()
