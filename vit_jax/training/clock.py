"""How fast a run goes, what its time is spent on, and when it ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# What the wall time of a run is booked as; the rest of it is training.
KINDS = ("start", "compile", "evaluation", "checkpoint", "profile", "data_wait", "lost")


class DataWait:
    """Measures how long the devices had nothing to do because the next batch was not there.

    That the host waits for a batch is no loss while the devices still compute. So a thread takes
    the time at which each update is done, and what counts is the part of the host's wait after it.
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
    """Books the time of a run, and tells speed and remaining time.

    Images per second are those of training alone: what is booked as something else does not count,
    except for waiting for data, which is a part of training that is reported beside it.

    Args:
      start_step: finished updates at the start.
      began: `time.monotonic()` at which the session began; None: now. Booked as `start`.
      total_steps: updates in all.
      batch_size: examples per update.
      earlier: what `totals` gave when earlier sessions of this run ended.
      every_steps: of each event that interrupts training (0: only after the last step), for the
        remaining time.
      guessed_images: of an event that has not happened yet: it takes about as long as training
        on so many images.
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
        every_steps: Mapping[str, int] | None = None,
        guessed_images: Mapping[str, float] | None = None,
        flops_per_second: float | None = None,
        flops_per_image: float = 0.0,
    ):
        self._start_step = start_step
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._earlier = dict(earlier or {})
        self._every_steps = dict(every_steps or {})
        self._guessed_images = dict(guessed_images or {})
        self._peak = flops_per_second
        self._flops_per_image = flops_per_image
        now = time.monotonic()
        self._start = now if began is None else began
        self._booked = {**dict.fromkeys(KINDS, 0.0), "start": now - self._start}
        self._events: dict[str, list[float]] = {}  # seconds of each, by name
        self._first_done: float | None = None
        self._window = (start_step, now, self._interruptions(), 0.0)  # since the last `report`
        self.data_wait = DataWait()

    @contextlib.contextmanager
    def book(self, kind: str, event: str = "") -> Iterator[None]:
        """Time spent inside is `kind`, not training; `event` names what may come again."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._booked[kind] += seconds
            if event:
                self._events.setdefault(event, []).append(seconds)

    def first_step_done(self, step: int) -> float:
        """Books what was not booked so far as compilation; returns its seconds."""
        now = time.monotonic()
        seconds = now - self._start - self._interruptions()
        self._booked["compile"] += seconds
        self._first_done = now
        self._window = (step, now, self._interruptions(), self.data_wait.seconds)
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
        training = elapsed - sum(totals.values())
        return {
            "elapsed_seconds": elapsed,
            **totals,
            "goodput": min(max(training / max(elapsed, 1e-9), 0.0), 1.0),
        }

    def report(self, step: int) -> dict[str, float]:
        """`images_per_second`, `data_wait`, `mfu` since the last call, `eta_seconds`, `totals`.

        No speed is given where nothing but the first step has been done. `data_wait` is the share
        of the training time in which the devices waited for data. `mfu`, model FLOPs utilisation,
        is given where the peak of the devices is known.
        """
        now = time.monotonic()
        step_before, time_before, interruptions_before, wait_before = self._window
        interruptions, wait = self._interruptions(), self.data_wait.seconds
        training = max(now - time_before - (interruptions - interruptions_before), 1e-9)
        self._window = (step, now, interruptions, wait)
        report = {"eta_seconds": self._eta(step), **self.totals()}
        if step > step_before:
            speed = (step - step_before) * self._batch_size / training
            report["images_per_second"] = speed
            report["data_wait"] = min((wait - wait_before) / training, 1.0)
            if self._peak:
                report["mfu"] = speed * self._flops_per_image / self._peak
        return report

    def close(self) -> None:
        self.data_wait.close()

    def _interruptions(self) -> float:
        return sum(self._booked.values())

    def _eta(self, step: int) -> float:
        """Remaining steps at the speed so far, and the events that are still to come."""
        if self._first_done is None:
            return 0.0
        done = step - self._start_step - 1  # the first one compiled
        training = time.monotonic() - self._start - self._interruptions()
        seconds_per_step = training / done if done else 0.0
        eta = (self._total_steps - step) * seconds_per_step
        for event, every_steps in self._every_steps.items():
            seen = self._events.get(event, [])
            guess = self._guessed_images.get(event, 0.0) * seconds_per_step / self._batch_size
            seconds = sum(seen) / len(seen) if seen else guess
            eta += seconds * remaining_events(step, self._total_steps, every_steps)
        return eta


def remaining_events(step: int, total_steps: int, every_steps: int) -> int:
    """How often something is still due that is due every so many steps, and after the last."""
    if step >= total_steps:
        return 0
    if not every_steps:
        return 1
    multiples = total_steps // every_steps - step // every_steps
    return multiples + bool(total_steps % every_steps)


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
