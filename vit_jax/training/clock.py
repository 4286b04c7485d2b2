"""How fast a run goes, where its time goes, and when it will end."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# What wall time is booked as; the rest is training.
KINDS = ("start", "compile", "evaluation", "checkpoint", "profile", "data_wait", "lost")


class DataWait:
    """Measures how long the devices were idle because the next batch was not ready.

    The host may wait for a batch while the devices still compute. So a thread notes when each
    update is done, and only the part of the host's wait after that counts.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._queue: queue.SimpleQueue[tuple[float, float, Any] | None] = queue.SimpleQueue()
        self._waited = (0.0, 0.0)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the host's wait for a batch."""
        start = time.monotonic()
        yield
        self._waited = (start, time.monotonic())

    def dispatched(self, output: jax.Array) -> None:
        """The update of that batch is under way; `output` is one of its results."""
        self._queue.put((*self._waited, output))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _follow(self) -> None:
        done: float | None = None  # when the devices finished the update before
        while (item := self._queue.get()) is not None:
            wait_start, wait_end, output = item
            if done is not None:
                self.seconds += max(0.0, wait_end - max(wait_start, done))
            try:
                output.block_until_ready()
            except Exception:  # the loop meets the error too, and reports it
                return
            done = time.monotonic()


class Clock:
    """Books the time of a run, and estimates speed and remaining time.

    Images per second count training time only, which includes waiting for data.

    Args:
      start_step: finished updates at the start.
      total_steps: updates in all.
      batch_size: examples per update.
      began: `time.monotonic()` at which the session began; None: now. Booked as `start`.
      earlier: what `totals` gave when earlier sessions of this run ended.
      flops_per_second: peak of all devices together; None: no `mfu`.
      flops_per_image: of forward and backward pass.
    """

    def __init__(
        self,
        *,
        start_step: int,
        total_steps: int,
        batch_size: int,
        began: float | None = None,
        earlier: Mapping[str, float] | None = None,
        flops_per_second: float | None = None,
        flops_per_image: float = 0.0,
    ):
        self._start_step = start_step
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._earlier = earlier or {}
        self._peak = flops_per_second
        self._flops_per_image = flops_per_image
        now = time.monotonic()
        self._start = now if began is None else began
        self._booked = {**dict.fromkeys(KINDS, 0.0), "start": now - self._start}
        self._compiled = (start_step, now)  # step and time at which the first update was done
        self._window = (start_step, 0.0, 0.0)  # step, training and waiting at the last `report`
        self.data_wait = DataWait()

    @contextlib.contextmanager
    def book(self, kind: str) -> Iterator[None]:
        """Books the time spent inside as `kind`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._booked[kind] += time.monotonic() - start

    def first_step_done(self, step: int) -> float:
        """Books the time not booked so far as compilation; returns its seconds."""
        seconds = self._training_seconds()
        self._booked["compile"] += seconds
        self._window = (step, self._training_seconds(), self.data_wait.seconds)
        self._compiled = (step, time.monotonic())
        return seconds

    @property
    def elapsed_seconds(self) -> float:
        """Wall seconds of this run, earlier sessions included."""
        return self._earlier.get("elapsed_seconds", 0.0) + time.monotonic() - self._start

    def totals(self) -> dict[str, float]:
        """Seconds of this run by kind, `elapsed_seconds`, and `goodput`, the share of training.

        `lost_seconds` went into updates that a session after a crash had to compute again.
        """
        booked = {**self._booked, "data_wait": self.data_wait.seconds}
        totals = {
            f"{kind}_seconds": seconds + self._earlier.get(f"{kind}_seconds", 0.0)
            for kind, seconds in booked.items()
        }
        elapsed = self.elapsed_seconds
        goodput = 1.0 - sum(totals.values()) / max(elapsed, 1e-9)
        return {"elapsed_seconds": elapsed, **totals, "goodput": min(max(goodput, 0.0), 1.0)}

    def report(self, step: int) -> dict[str, float]:
        """`images_per_second`, `data_wait`, `mfu` since the last call, `eta_seconds`, `totals`.

        No speed is given where nothing but the first step has been done. `data_wait` is the share
        of the training time in which the devices waited for data. `mfu`, model FLOPs utilisation,
        is given where the peak of the devices is known.
        """
        step_before, training_before, wait_before = self._window
        self._window = (step, self._training_seconds(), self.data_wait.seconds)
        training = max(self._window[1] - training_before, 1e-9)
        report = {"eta_seconds": self._eta(step), **self.totals()}
        if step > step_before:
            speed = (step - step_before) * self._batch_size / training
            report["images_per_second"] = speed
            report["data_wait"] = min((self._window[2] - wait_before) / training, 1.0)
            if self._peak:
                report["mfu"] = speed * self._flops_per_image / self._peak
        return report

    def close(self) -> None:
        self.data_wait.close()

    def _training_seconds(self) -> float:
        return time.monotonic() - self._start - sum(self._booked.values())

    def _eta(self, step: int) -> float:
        """The remaining updates at the pace so far, evaluations and checkpoints included."""
        first, since = self._compiled
        pace = (time.monotonic() - since) / max(step - first, 1)
        return (self._total_steps - step) * pace


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
