"""What the parts of a run tell the watchdog of their process, without being handed it."""

from __future__ import annotations

from typing import Any

from vit_jax.multihost.coordination import num_processes
from vit_jax.multihost.watchdog import Watchdog

# What `start` has started in this process.
_current: Watchdog | None = None


def start(**timeouts: Any) -> None:
    """Begins to watch, see `Watchdog`; after the processes have found each other."""
    global _current
    stop()
    _current = Watchdog(**timeouts)


def stop() -> None:
    """Nobody is watched from here on."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def leave() -> None:
    """The work is done: see `Watchdog.leave`."""
    if _current is not None:
        _current.leave()
    stop()


def is_watching() -> bool:
    return _current is not None


def expect_progress(expected: bool) -> None:
    """See `Watchdog.expect_progress`."""
    if _current is not None:
        _current.expect_progress(expected)


def note(
    doing: str, step: int | None = None, *, waits: bool = False, started: bool = False
) -> None:
    """Reports progress of the main thread: it is `doing` something now, as "reading a batch"."""
    if _current is not None:
        _current.note(doing, step, waits=waits, started=started)


def ask_to_stop() -> None:
    """See `Watchdog.ask_to_stop`."""
    if _current is not None:
        _current.ask_to_stop()


def stop_reached() -> bool:
    """See `Watchdog.stop_reached`; False where nobody watches."""
    return _current is not None and _current.stop_reached()


def fail(failure: str, exit_code: int) -> None:
    """Ends the other processes with this one; see `Watchdog.fail`."""
    if _current is not None and num_processes() > 1:
        _current.fail(failure, exit_code)


def exit_code() -> int | None:
    """Status of the verdict that is about to end this process, if there is one."""
    return None if _current is None else _current.exit_code


def wait_for_verdict() -> None:
    """After a collective has failed: gives the watch time to say whose fault it is."""
    if _current is not None:
        _current.wait_for_verdict()
