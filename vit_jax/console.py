"""Console output of a running program: log lines, and a progress bar on a terminal."""

import logging
import math
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from vit_jax.wording import as_called, escaped

WIDTH = 100  # columns of a line in a file or pipe
LIBRARIES = ("absl", "orbax", "jax", "fsspec", "google", "grain", "matplotlib")
TICK_SECONDS = 1.0
REMINDER_SECONDS = 15.0  # after which the log shows what is going on
_BAR = "{percentage:3.0f}% |{bar:10}| {n_fmt}/{total_fmt}{desc}"
# Metrics that are fractions, by a part of their name.
_SHARES = ["accuracy", "mAP", "mIoU", "delta1", "calibration", "precision", "recall"]
_SHARES += ["goodput", "mfu", "data_wait"]


class _Lines(logging.Formatter):
    """One line per record, escaped: names of files and classes may contain anything."""

    def __init__(self, process: str, width: int):
        super().__init__(f"%(asctime)s {process}%(message)s", "%H:%M:%S")
        self._wrapper = textwrap.TextWrapper(
            width, subsequent_indent=9 * " ", break_long_words=False, break_on_hyphens=False
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = as_called(record.message)
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        lines = escaped(super().format(record), "\n").splitlines()
        if record.levelno < logging.WARNING:  # others stay one line: people look for them by words
            lines = ["\n".join(self._wrapper.wrap(line)) for line in lines]
        return "\n  ".join(lines)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def start_logging(process_id: int | None = None, *, to_stderr: bool = False) -> None:
    """Logs progress to stdout, or to stderr if stdout is for results; libraries only log warnings.

    Lines have at most `WIDTH` columns, on a terminal its width. The environment variable
    `VIT_LOG_LEVEL` sets the level: `debug`, `info` (default), `warning`.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else WIDTH
    handler = _Handler(stream)
    handler.setFormatter(_Lines("" if process_id is None else f"[{process_id}] ", width))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    try:
        logging.root.setLevel(os.environ.get("VIT_LOG_LEVEL", "info").upper())
    except ValueError as error:
        logging.warning("VIT_LOG_LEVEL: %s; info is shown.", error)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors it raises


def ensure_logging(*, to_stderr: bool = False) -> None:
    """`start_logging` where the user has not set up the log, as in a notebook."""

    def is_default(handler: logging.Handler) -> bool:  # importing absl or Orbax leaves one
        layout = getattr(handler.formatter, "_fmt", logging.BASIC_FORMAT)
        is_plain = type(handler) is logging.StreamHandler and layout == logging.BASIC_FORMAT
        return is_plain or "absl" in type(handler).__module__

    if logging.root.level == logging.WARNING and all(map(is_default, logging.root.handlers)):
        start_logging(to_stderr=to_stderr)


def watched(items: Iterable[Any] | None, unit: str, total: int | None = None, **more: Any) -> Any:
    """A tqdm bar, on a terminal or in a notebook, of what takes more than five seconds."""
    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(items, total=total, unit=unit, disable=not shown, delay=5, leave=False, **more)


def is_share(name: str) -> bool:
    """Whether a metric is in [0, 1] and shown in percent."""
    return any(part in name for part in _SHARES)


def number_text(name: str, value: float, digits: int = 2) -> str:
    """A metric's value as people write it: `93.00 %`, `0.3143`, `300`."""
    if is_share(name):
        return f"{100 * value:.{digits}f} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def numbers_text(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {number_text(name, value)}" for name, value in values.items())


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


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """95 % score interval of a fraction of `count` examples (Wilson, 1927), both in [0, 1]."""
    z2 = 1.959964**2 / count
    middle, half = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


class Progress:
    """Progress of a run: a bar on a terminal; in a log, operations that take long.

    `doing` returns the current activity, and a number that changes whenever it makes progress.
    """

    def __init__(self, doing: Callable[[], tuple[str, int]], *, shown: bool = True):
        self._doing, self._shown = doing, shown
        self._bar: Any = None
        self._speed: Sequence[str] = ()  # both beside the bar, see `show`
        self._numbers: Sequence[str] = ()
        self._total_steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, start_step: int, total_steps: int) -> None:
        """Draws the bar, if stderr is a terminal."""
        self._total_steps = total_steps
        if self._shown and sys.stderr.isatty():
            columns, rows = shutil.get_terminal_size()  # or its default
            options = {"bar_format": _BAR, "ncols": columns, "nrows": rows, "leave": False}
            self._bar = tqdm(total=total_steps, initial=start_step, **options)

    def advance(self, step: int) -> None:
        """Update `step` has been started."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def show(self, step: int, numbers: Sequence[str], speed: Sequence[str]) -> None:
        """Shows the metrics of an update: next to the bar, or as a log line.

        On a narrow terminal `speed`, the most important first, takes the place of `numbers`.
        """
        if self._bar is not None:
            self._numbers, self._speed = numbers, speed
            self._bar.set_description_str(self._beside_bar(""), refresh=False)
        elif self._shown:
            line = "  ".join([*numbers, *reversed(speed)])
            logging.info("step %d/%d  %s", step, self._total_steps, line)

    def _beside_bar(self, doing: str) -> str:
        """As much as fits: the speed, the start of `doing`, then the numbers."""
        total, text = self._total_steps, ""
        columns = self._bar.ncols - len(f"100% |{'':10}| {total}/{total}")
        for part in filter(None, [*self._speed, doing, *self._numbers]):
            room = columns - len(text) - 2
            if part == doing or len(part) <= room:
                text += f"  {part[: max(room, 0)]}"
        return text

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)
        if self._bar is not None:
            self._bar.close()

    def _watch(self) -> None:
        since, before, due = time.monotonic(), self._doing(), REMINDER_SECONDS
        while not self._stopped.wait(TICK_SECONDS):
            state, now = self._doing(), time.monotonic()
            if state != before:
                since, before, due = now, state, REMINDER_SECONDS
            elapsed = now - since
            if self._bar is not None:
                doing = f"{state[0]} ({elapsed:.0f} s)" if elapsed > 2 else ""
                self._bar.set_description_str(self._beside_bar(doing))
            elif self._shown and elapsed >= due:
                due = min(2 * due, due + 60.0)
                logging.info("Still %s (%.0f s).", state[0], elapsed)
