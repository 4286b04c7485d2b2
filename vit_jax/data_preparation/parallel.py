"""Work spread over processes that end with this one, and a line now and then on how far it is."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from vit_jax.errors import UserError

REPORT_EVERY_SECONDS = 10.0

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextlib.contextmanager
def worker_processes(num_workers: int) -> Iterator[Map]:
    """Gives a `map` that runs in `num_workers` processes; one worker is this process.

    Results come in the order of the arguments.

    Raises:
      UserError: (when iterating) a worker was killed.
    """
    if num_workers == 1:
        yield map
        return
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_follow_parent
    )

    def mapped(function: Callable[[Any], Any], arguments: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from pool.map(function, arguments)
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (is memory short? try fewer --num_workers); the same "
                "command goes on where this one ended."
            ) from None

    try:
        yield mapped
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """In a worker: Ctrl-C is the parent's business, and a killed parent ends it too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()


class Progress:
    """Logs share, rate and time left, at most every REPORT_EVERY_SECONDS.

    Args:
      what: is being done, such as "writing train".
      total: of the units that `add` counts.
      unit: their name; bytes are shown in MB.
    """

    def __init__(self, what: str, total: int, unit: str):
        self._what, self._total, self._unit = what, max(total, 1), unit
        self._done = 0
        self._start = self._reported = time.monotonic()

    def add(self, amount: int) -> None:
        self.reach(self._done + amount)

    def reach(self, done: int) -> None:
        self._done = done
        now = time.monotonic()
        if now - self._reported < REPORT_EVERY_SECONDS or not done:
            return
        self._reported = now
        rate = done / (now - self._start)
        left = (self._total - done) / rate
        scale, unit = (1e6, "MB") if self._unit == "bytes" else (1, self._unit)
        logging.getLogger(__name__).info(
            "%s: %.1f %%, %.0f %s/s, %d:%02d:%02d left",
            *(self._what, 100 * done / self._total, rate / scale, unit),
            *(left // 3600, left // 60 % 60, left % 60),
        )
