"""A line in the log now and then on how far a long job is."""

from __future__ import annotations

import logging
import time

REPORT_EVERY_SECONDS = 10.0


class Progress:
    """Logs share, rate and time left of `total` units, at most every REPORT_EVERY_SECONDS."""

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
        share, rate = 100 * self._done / self._total, self._done / (now - self._start)
        minutes = (self._total - self._done) / rate / 60
        logging.getLogger(__name__).info(
            f"{self._what}: {share:.1f} %, {rate:.0f} {self._unit}/s, {minutes:.0f} minutes left"
        )
