"""Notices that a process of a run has died, hangs or failed, names it, and ends the others.

JAX's own heartbeats notice a death, not a hang, and abort the other processes with a number in
place of a name. So every process says what it is doing, through the key-value store of JAX's
coordination service (no port but JAX's own):

* a thread of each process writes its record a few times per timeout, and reads the orders;
* process 0, where the coordination service runs, reads all records and gives the orders. A record
  that does not change: its process has died, is frozen, or is cut off. One that changes but tells
  of no progress: its process hangs. Either ends in a verdict, which says who it was and what it
  was doing, and ends every process with status 75.

A process alone has only itself to watch: it ends when it makes no progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from vit_jax.multihost.coordination import coordination_client, num_processes, process_id
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, Record, Watch, judge

_LOG = logging.getLogger(__name__)
_RECORDS = "vit_jax/records"
_ORDERS = "vit_jax/orders"
_FOREVER_MILLISECONDS = 7 * 24 * 3600 * 1000  # longer than anything that is watched


class Watchdog:
    """Watches over this process and its peers from a thread, between `start` and `stop`.

    Args:
      exit_process: ends the process at once, with a status.
    """

    def __init__(self, exit_process: Callable[[int], Any] = os._exit):
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._record = Record("", 0)
        self._first: Record | None = None  # of process 0, as last heard
        self._threads: list[threading.Thread] = []
        self.verdict: tuple[str, int] | None = None  # what ends this process, and its status

    def start(
        self,
        *,
        heartbeat_timeout_seconds: float,
        step_timeout_seconds: float,
        start_timeout_seconds: float,
    ) -> None:
        """Begins to watch; after the processes have found each other.

        Args:
          heartbeat_timeout_seconds: a process unheard of for so long is lost.
          step_timeout_seconds: no progress for so long is a hang; 0: nothing is.
          start_timeout_seconds: the same before the first update, which compiles.
        """
        self.stop()
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._step_timeout = step_timeout_seconds
        self._start_timeout = start_timeout_seconds if step_timeout_seconds else 0.0
        self._interval = min(max(heartbeat_timeout_seconds / 20, 0.1), 1.0)
        self._id, self._num_processes = process_id(), num_processes()
        self._record = Record(socket.gethostname(), os.getpid())
        self._heard = time.monotonic()  # the last word of process 0
        self._watch = Watch()
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._client: Any = coordination_client()
        # Apart from each other: calls of the client may hang when the network does.
        several = self._num_processes > 1
        loops = [self._talk, self._watch_first] if several else [self._watch_alone]
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def expect_progress(self, expected: bool) -> None:
        """From here on the main thread is to call `note`; or it no longer is."""
        with self._lock:
            self._record.progress += 1
            self._record.limit_seconds = self._start_timeout if expected and self._threads else 0.0

    def note(
        self, doing: str, step: int | None = None, *, waits: bool = False, started: bool = False
    ) -> None:
        """The main thread has got somewhere, and is `doing` something now, as "reading a batch".

        Args:
          doing: said of this process where it hangs or is lost.
          step: finished updates; None: as before.
          waits: for others, or the devices: then it is not to blame.
          started: the first update is done.
        """
        with self._lock:
            self._record.progress += 1
            self._record.doing, self._record.waits = doing, waits
            if step is not None:
                self._record.step = step
            if started and self._threads:
                self._record.limit_seconds = self._step_timeout

    def fail(self, failure: str, exit_code: int) -> None:
        """Tells the others that this process ends, why, and with which status they should."""
        with self._lock:
            self._record.failure, self._record.exit_code = failure, exit_code
        # The verdict that follows from it ends this process too.
        if self._threads and self._num_processes > 1:
            self._wait_for_the_end(2 * self._heartbeat_timeout)

    def wait_for_verdict(self) -> None:
        """After a collective has failed: returns only if nothing is wrong with any process."""
        if self._threads:
            self._wait_for_the_end(self._heartbeat_timeout + 10 * self._interval)

    def _wait_for_the_end(self, seconds: float) -> None:
        """So long for a verdict; after one, until it has ended this process with its status."""
        if self._stopped.wait(seconds) and self.verdict is not None:
            self._ended.wait()

    def leave(self) -> None:
        """Waits, still watched, until all processes have got here; then nobody is watched."""
        if self._threads and self._num_processes > 1:
            self.note("finished", waits=True)
            self._wait_for_peers("end", _FOREVER_MILLISECONDS)
        self.stop()

    def stop(self) -> None:
        """Nobody is watched from here on."""
        if self._threads:
            self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []

    def coordinator_is_lost(self, why: str) -> str:
        """The verdict on process 0, whose word is missing."""
        first = self._first
        if first is None:
            return f"process 0 (the coordinator) is lost: {why}."
        return (
            f"process 0 (the coordinator, pid {first.pid} on {first.host}) is lost: {why}. "
            f"It was {first.doing} (step {first.step})."
        )

    def _end(self, verdict: str, exit_code: int, alive: Sequence[int] = ()) -> None:
        """Says why, and ends this process together with those that are `alive`."""
        with self._lock:
            if self._stopped.is_set():
                return
            self.verdict = verdict, exit_code
            self._stopped.set()
        # Whatever happens: the main thread may hold the lock of the log while it hangs.
        timer = threading.Timer(10.0, self._exit_process, [exit_code])
        timer.daemon = True
        timer.start()
        if f"process {self._id} (" in verdict and "has been" in verdict:
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=sys.stderr)  # where it hangs
        if not self._record.failure:  # else it has been printed
            _LOG.error("%s", verdict)
        if exit_code == REQUEUE_EXIT_CODE:
            _LOG.error("Stopping; the same command resumes from the last checkpoint.")
        logging.shutdown()
        if self._id in alive:  # JAX aborts those that process 0 leaves behind
            self._wait_for_peers("verdict", 5000, alive)
        self._exit_process(exit_code)
        self._ended.set()

    def _watch_alone(self) -> None:
        while not self._stopped.wait(self._interval):
            with self._lock:
                record = dataclasses.replace(self._record, beat=time.monotonic_ns(), waits=False)
            found = judge({0: record}, 1, self._watch, self._heartbeat_timeout)
            if found is not None:
                self._end(*found)

    def _watch_first(self) -> None:
        while not self._stopped.wait(self._interval):
            if time.monotonic() - self._heard >= self._heartbeat_timeout:
                why = f"nothing was heard of it for {self._heartbeat_timeout:.0f} s"
                self._end(self.coordinator_is_lost(why), REQUEUE_EXIT_CODE)

    def _talk(self) -> None:
        while not self._stopped.wait(self._interval):
            # `_watch_first` counts how long errors go on.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._write_record()
                orders = self._lead() if self._id == 0 else self._read_orders()
                if "verdict" in orders:
                    self._end(orders["verdict"], orders["exit_code"], orders["alive"])

    def _write_record(self) -> None:
        with self._lock:
            self._record.beat += 1
        self._set(f"{_RECORDS}/{self._id}", dataclasses.asdict(self._record))

    def _read_orders(self) -> dict[str, Any]:
        orders = self._get(_ORDERS).get("0", {})
        if orders:
            first = Record(**orders["first"])
            if self._first is None or first.beat != self._first.beat:
                self._first, self._heard = first, time.monotonic()
        return orders

    def _lead(self) -> dict[str, Any]:
        """Process 0: gives the orders that follow from all records."""
        records = {int(key): Record(**value) for key, value in self._get(_RECORDS).items()}
        self._heard = time.monotonic()
        orders: dict[str, Any] = {"first": dataclasses.asdict(self._record)}
        found = judge(records, self._num_processes, self._watch, self._heartbeat_timeout)
        if found is not None:
            orders["verdict"], orders["exit_code"] = found
            orders["alive"] = [
                each
                for each, record in records.items()
                if self._watch.unchanged_seconds(("beat", each), record.beat) < 5 * self._interval
            ]
        self._set(f"{_ORDERS}/0", orders)
        return orders

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _get(self, folder: str) -> dict[str, dict[str, Any]]:
        found = self._client.key_value_dir_get(f"{folder}/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in found}

    def _wait_for_peers(
        self, name: str, milliseconds: int, peers: Sequence[int] | None = None
    ) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.wait_at_barrier(f"vit_jax/{name}", milliseconds, peers)
