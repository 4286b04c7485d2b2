"""How fast a run goes and when it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Counts time for training apart from time for everything else.

    Images per second are those of training alone: time inside `pause` (evaluation, waiting for a
    checkpoint) and the first step, which compiles, are left out. The ETA adds the pauses in the
    proportion seen.
    """

    def __init__(self, *, start_step: int, total_steps: int, batch_size: int, elapsed: float = 0.0):
        """
        Args:
          start_step: finished updates at the start.
          total_steps: updates in all.
          batch_size: examples per update.
          elapsed: seconds that earlier sessions of this run took.
        """
        self._start_step = start_step
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._elapsed_before = elapsed
        self._start = time.monotonic()
        self._once = 0.0  # seconds that will not come again: the first step compiles
        self._window = (start_step, self._start)  # since the last `report`
        self._paused_in_window = 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside does not count as training."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused_in_window += time.monotonic() - start

    def first_step_done(self, step: int) -> float:
        """Starts the clock of training anew; returns the seconds since the start."""
        now = time.monotonic()
        self._once = now - self._start
        self._window, self._paused_in_window = (step, now), 0.0
        return self._once

    @property
    def elapsed_seconds(self) -> float:
        """Wall seconds of this run, earlier sessions included."""
        return self._elapsed_before + time.monotonic() - self._start

    def report(self, step: int) -> dict[str, float]:
        """`images_per_second` since the last call, `elapsed_seconds` and `eta_seconds`.

        No speed is given where nothing but the first step has been done.
        """
        now = time.monotonic()
        step_before, time_before = self._window
        training = max(now - time_before - self._paused_in_window, 1e-9)
        self._window, self._paused_in_window = (step, now), 0.0
        done = max(step - self._start_step, 1)
        eta = (now - self._start - self._once) / done * (self._total_steps - step)
        report = {"elapsed_seconds": self.elapsed_seconds, "eta_seconds": eta}
        if step > step_before:
            report["images_per_second"] = (step - step_before) * self._batch_size / training
        return report


def format_seconds(seconds: float) -> str:
    """`42s`, `3m05s`, `2h07m`, `4d03h`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
