"""A line in the log now and then on how far a long job is."""

from __future__ import annotations

import logging
import time

REPORT_EVERY_SECONDS = 10.0


class Progress:
    """Logs share, rate and time left, at most every REPORT_EVERY_SECONDS.

    Args:
      what: the job, such as "writing".
      total: of the units that `add` counts.
      unit: their name.
    """

    def __init__(self, what: str, total: float, unit: str):
        self._what, self._total, self._unit = what, max(total, 1e-9), unit
        self._done = 0.0
        self._start = self._reported = time.monotonic()

    def add(self, amount: float) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._reported < REPORT_EVERY_SECONDS or not self._done:
            return
        self._reported = now
        share, rate = self._done / self._total, self._done / (now - self._start)
        minutes = (self._total - self._done) / rate / 60
        logging.getLogger(__name__).info(
            "%s: %.1f %%, %.0f %s/s, %.0f minutes left",
            self._what, 100 * share, rate, self._unit, minutes,
        )  # fmt: skip
