"""What the parts of a run tell the watchdog of their process, without being handed it."""

from __future__ import annotations

from vit_jax.multihost.coordination import num_processes
from vit_jax.multihost.watchdog import Watchdog

_current: Watchdog | None = None


def start(**timeouts: float) -> None:
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


def fail(failure: str, exit_code: int) -> None:
    """Ends the other processes with this one; see `Watchdog.fail`."""
    if _current is not None and num_processes() > 1:
        _current.fail(failure, exit_code)


def verdict() -> tuple[str, int] | None:
    """What is about to end this process, if anything is; see `Watchdog.verdict`."""
    return None if _current is None else _current.verdict


def coordinator_is_lost(why: str) -> str:
    """See `Watchdog.coordinator_is_lost`."""
    return "" if _current is None else _current.coordinator_is_lost(why)


def wait_for_verdict() -> None:
    """After a collective has failed: gives the watchdog time to say whose fault it is."""
    if _current is not None:
        _current.wait_for_verdict()
