"""How fast a run goes and when it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Counts time for training apart from time for everything else.

    Images per second are those of training alone: time inside `pause` (evaluation, waiting for a
    checkpoint, the first compilation) is left out. The ETA adds the pauses in the proportion seen.
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
        self._training_seconds = 0.0
        self._once = 0.0  # seconds that will not come again: the first compilation
        self._window = (start_step, self._start)  # since the last `report`
        self._paused_in_window = 0.0

    @contextlib.contextmanager
    def pause(self, *, once: bool = False) -> Iterator[None]:
        """Time spent inside does not count as training; with `once` nor for the ETA."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._paused_in_window += seconds
            self._once += seconds if once else 0.0

    @property
    def elapsed_seconds(self) -> float:
        """Wall seconds of this run, earlier sessions included."""
        return self._elapsed_before + time.monotonic() - self._start

    def report(self, step: int) -> dict[str, float]:
        """`images_per_second` since the last call, `elapsed_seconds`, and `eta_seconds`."""
        now = time.monotonic()
        step_before, time_before = self._window
        training = max(now - time_before - self._paused_in_window, 1e-9)
        self._training_seconds += training
        self._window, self._paused_in_window = (step, now), 0.0
        done = max(step - self._start_step, 1)
        eta = (now - self._start - self._once) / done * (self._total_steps - step)
        return {
            "images_per_second": (step - step_before) * self._batch_size / training,
            "elapsed_seconds": self.elapsed_seconds,
            "eta_seconds": eta,
        }

    def mean_images_per_second(self, step: int) -> float:
        """Over this session, up to the last `report`."""
        return (step - self._start_step) * self._batch_size / max(self._training_seconds, 1e-9)


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
