"""Speed of a run, where its time goes, when it will end, and the log line of an update."""

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from vit_jax.console import Progress, format_seconds, numbers_text
from vit_jax.multihost.watchdog import Watchdog

# Categories of wall time; the rest is training.
KINDS = ("start", "compile", "evaluation", "checkpoint", "profile", "data_wait", "lost")
FIRST_LINE_SECONDS = 10.0  # after the first update


@dataclasses.dataclass(kw_only=True)
class Clock:
    """Accounts for the time of a run, estimates its speed, and keeps the watchdog informed.

    Images per second count training time only, including waits for data.
    """

    start_step: int  # updates completed before the session
    total_steps: int
    batch_size: int
    began: float  # `time.monotonic()` at the start of the session; booked as `start` since then
    earlier: Mapping[str, float]  # `totals` at the end of this run's earlier sessions
    every_steps: int  # between two log lines
    every_seconds: float  # the same; 0: by steps only
    flops_per_image: float = 0.0  # of forward and backward pass
    peak_flops: float | None = None  # per second, of all devices together; None: no `mfu`
    progress: Progress
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self.progress.begin(self.start_step, self.total_steps)
        self.every_seconds = self.every_seconds or math.inf
        self._line_by = math.inf  # time of the next line, unless a step is due earlier
        now = time.monotonic()
        self._booked = {**dict.fromkeys(KINDS, 0.0), "start": now - self.began}
        self._compiled = (self.start_step, now)  # step and time when the first update finished
        self._window = (self.start_step, 0.0, 0.0)  # step, training, waiting at the last `report`
        self._updates: queue.Queue[Any] = queue.Queue()
        self._wait = (0.0, 0.0)  # of the host for its last batch: start and end
        self._thread = threading.Thread(target=self._follow_devices, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def book(self, kind: str, doing: str, step: int) -> Iterator[None]:
        """Books the time spent inside as `kind`; `doing` is reported if the run hangs."""
        self.watchdog.note(doing, step, waits=True)
        start = time.monotonic()
        try:
            yield
        finally:
            self._booked[kind] += time.monotonic() - start

    @contextlib.contextmanager
    def waiting_for_data(self, step: int) -> Iterator[None]:
        """Wraps the host's wait for the batch of update `step`."""
        self.watchdog.note("reading a batch", step)
        start = time.monotonic()
        yield
        self._wait = (start, time.monotonic())
        if step == self.start_step + 1:
            logging.info("Compiling the update; large models take minutes.")
            self.watchdog.note("compiling the update", step, waits=True)
        else:
            self.watchdog.note("updating", step, waits=True)

    def dispatched(self, step: int, output: jax.Array) -> None:
        """Update `step` was dispatched with that batch; `output` is one of its results.

        Waits for the first of a session, which is booked as compilation, and later for the previous
        one: a host dozens of updates ahead of its devices would stop only after all of them.
        """
        self._updates.join()
        self._updates.put((*self._wait, output))
        self.progress.advance(step)
        if step > self.start_step + 1:
            return
        output.block_until_ready()
        self.watchdog.note("updating", step, waits=True, started=True)
        seconds = self._training_seconds()
        logging.info("Compiled in %.1f s, including the first step.", seconds)
        self._booked["compile"] += seconds
        self._window = (step, self._training_seconds(), self._booked["data_wait"])
        self._compiled = (step, time.monotonic())
        self._line_by = time.monotonic() + min(FIRST_LINE_SECONDS, self.every_seconds)

    def _follow_devices(self) -> None:
        """Adds up the host's waiting for data after the devices have finished their update."""
        done: float | None = None  # when the devices finished the previous update
        while (update := self._updates.get()) is not None:
            wait_start, wait_end, output = update
            if done is not None:
                self._booked["data_wait"] += max(0.0, wait_end - max(wait_start, done))
            with contextlib.suppress(Exception):  # the loop gets the error too, and reports it
                output.block_until_ready()
            done = time.monotonic()
            self._updates.task_done()

    def close(self) -> None:
        self._updates.put(None)
        self._thread.join(timeout=5)

    def is_line_due(self, step: int) -> bool:
        """Whether to log a line after update `step`: always after the first one."""
        is_first = step == self.start_step + 1
        return is_first or step % self.every_steps == 0 or time.monotonic() >= self._line_by

    def totals(self) -> dict[str, float]:
        """Seconds of this run by category, `elapsed_seconds`, and `goodput`, the training share.

        Earlier sessions are included; `lost_seconds` went into updates that were repeated.
        """
        totals = {
            f"{kind}_seconds": seconds + self.earlier.get(f"{kind}_seconds", 0.0)
            for kind, seconds in self._booked.items()
        }
        elapsed = self.earlier.get("elapsed_seconds", 0.0) + time.monotonic() - self.began
        goodput = 1.0 - sum(totals.values()) / max(elapsed, 1e-9)
        return {"elapsed_seconds": elapsed, **totals, "goodput": min(max(goodput, 0.0), 1.0)}

    def report(self, step: int) -> dict[str, float]:
        """`images_per_second`, `data_wait`, `mfu` since the last call, `eta_seconds`, `totals`.

        No speed before the second step. `data_wait` is the share of training time in which the
        devices waited for data, `mfu` the model FLOPs utilization, if their peak is known.
        """
        self._line_by = time.monotonic() + self.every_seconds
        step_before, training_before, wait_before = self._window
        self._window = (step, self._training_seconds(), self._booked["data_wait"])
        training = max(self._window[1] - training_before, 1e-9)
        first, since = self._compiled
        pace = (time.monotonic() - since) / max(step - first, 1)  # including evaluations
        report = {"eta_seconds": (self.total_steps - step) * pace, **self.totals()}
        if step > step_before:
            speed = (step - step_before) * self.batch_size / training
            report["images_per_second"] = speed
            report["data_wait"] = min((self._window[2] - wait_before) / training, 1.0)
            if self.peak_flops:
                report["mfu"] = speed * self.flops_per_image / self.peak_flops
        return report

    def _training_seconds(self) -> float:
        """Includes waits for data."""
        booked = sum(seconds for kind, seconds in self._booked.items() if kind != "data_wait")
        return time.monotonic() - self.began - booked


def update_text(row: Mapping[str, float], eta_seconds: float) -> tuple[list[str], list[str]]:
    """What is shown of an update: its numbers, and its speed, the most important first.

    `row`: as in `metrics.jsonl`, which has all values.
    """
    rates = ("images_per_second", "mfu", "data_wait")
    left_out = ("loss", "learning_rate", "goodput", "grad_norm", "param_norm", *rates)
    others = (
        numbers_text({name: value})
        for name, value in row.items()
        if name not in left_out and not name.endswith("_seconds")
    )
    numbers = [f"loss {row['loss']:.4f}", *others, f"lr {row['learning_rate']:.3g}"]
    if "images_per_second" not in row:
        return numbers, []
    if "mfu" in row:
        numbers.append(f"MFU {row['mfu']:.0%}")
    if row["data_wait"] >= 0.01:
        numbers.append(f"data wait {row['data_wait']:.0%}")
    speed = f"{row['images_per_second']:,.0f} images/s"
    return numbers, [f"ETA {format_seconds(eta_seconds)}", speed]
