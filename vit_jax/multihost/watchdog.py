"""Notices that a process of a run has died, hangs or failed, names it, and ends the others.

Left alone, the processes of a JAX program wait for a peer that has died until their heartbeats
time out, and for ever for one that hangs. Here every process tells the others what it is doing,
through the key-value store of JAX's coordination service (no port but JAX's own):

* a thread of each process writes its record a few times per timeout, and reads two: the orders,
  and the record of process 0, which is where the coordination service runs;
* process 0 reads all records. A record that does not change: its process has died, is frozen, or
  is cut off. One that changes but tells of no progress: its process hangs. Either ends in a
  verdict, which says who it was and what it was doing, and ends every process with status 75.

A process alone has only itself to watch: it ends when it makes no progress.

The same records let all processes stop at the same update when one was asked to (`ask_to_stop`):
process 0 orders a halt, every process reports how far it got and lets its main thread wait there,
and process 0 orders the next point after the farthest. (JAX's own preemption service does the
same, but counts with whatever number it was called with last, and Orbax calls it too.)
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
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.multihost.coordination import (
    coordination_client,
    num_processes,
    process_id,
    try_get,
)
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, Record, Watch, judge

_LOG = logging.getLogger(__name__)
_RECORDS = "vit_jax/liveness/records"
_ORDERS = "vit_jax/liveness/orders"
_FOREVER_MILLISECONDS = 7 * 24 * 3600 * 1000  # longer than anything that is watched


@dataclasses.dataclass
class Orders:
    """What process 0 tells all others."""

    verdict: str = ""
    exit_code: int = 0
    halt: bool = False  # report where you are and wait there
    stop_at: int = 0  # the call of `stop_reached` that is true


class Watchdog:
    """Watches over this process and its peers from a thread.

    Args:
      heartbeat_timeout_seconds: a process unheard of for so long is lost.
      step_timeout_seconds: no progress for so long is a hang; 0: nothing is.
      start_timeout_seconds: the same before the first update, which compiles.
      exit_process: ends the process at once, with a status.
    """

    def __init__(
        self,
        *,
        heartbeat_timeout_seconds: float,
        step_timeout_seconds: float,
        start_timeout_seconds: float,
        exit_process: Callable[[int], Any] = os._exit,
    ):
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._step_timeout = step_timeout_seconds
        self._start_timeout = start_timeout_seconds if step_timeout_seconds else 0.0
        self._exit_process = exit_process
        self._interval = min(max(heartbeat_timeout_seconds / 20, 0.1), 1.0)
        self._id, self._num_processes = process_id(), num_processes()
        self._record = Record(socket.gethostname(), os.getpid())
        self._watch, self._coordinator_watch = Watch(), Watch()
        self._contact = time.monotonic()  # with the coordination service
        self._stopped = threading.Event()
        self._ending, self._ended = False, threading.Event()  # by a verdict
        self.exit_code: int | None = None  # of the verdict, once there is one
        self._lock = threading.Condition()
        self._polls = 0
        self._orders = Orders()
        self._client = coordination_client() if self._num_processes > 1 else None
        self._threads = [threading.Thread(target=self._look_after, daemon=True)]
        if self._client is not None:
            self._threads.append(threading.Thread(target=self._talk, daemon=True))
        for thread in self._threads:
            thread.start()

    def expect_progress(self, expected: bool) -> None:
        """From here on the main thread is to call `note`; or it no longer is."""
        with self._lock:
            self._record.progress += 1
            self._record.limit_seconds = self._start_timeout if expected else 0.0

    def note(self, doing: str, step: int | None, *, waits: bool, started: bool) -> None:
        """The main thread has got somewhere; `started`: the first update is done."""
        with self._lock:
            self._record.progress += 1
            self._record.doing, self._record.waits = doing, waits
            if step is not None:
                self._record.step = step
            if started:
                self._record.limit_seconds = self._step_timeout

    def ask_to_stop(self) -> None:
        """The run is to stop soon; returns at once, may be called by a signal handler."""
        self._record.asked = True

    def stop_reached(self) -> bool:
        """True from the same call on on all processes, soon after one was asked to stop."""
        if self._num_processes == 1:
            return self._record.asked
        with self._lock:
            while self._orders.halt and not self._orders.stop_at and not self._stopped.is_set():
                self._lock.wait(0.1)
            self._polls += 1
            return 0 < self._orders.stop_at <= self._polls

    def fail(self, failure: str, exit_code: int) -> None:
        """Tells the others that this process ends, why, and with which status they should."""
        with self._lock:
            self._record.failure, self._record.exit_code = failure, exit_code
        # The verdict that follows from it ends this process too.
        self._wait_for_the_end(2 * self._heartbeat_timeout)

    def wait_for_verdict(self) -> None:
        """Returns only if nothing is found to be wrong with any process."""
        self._wait_for_the_end(self._heartbeat_timeout + 10 * self._interval)

    def _wait_for_the_end(self, seconds: float) -> None:
        """So long for a verdict; after one, until it has ended this process with its status."""
        if self._stopped.wait(seconds) and self._ending:
            self._ended.wait()

    def leave(self) -> None:
        """Waits, still watched, until all processes have got here; then nobody is watched."""
        if self._client is not None:
            self.note("finished", None, waits=True, started=False)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.wait_at_barrier("vit_jax/liveness/end", _FOREVER_MILLISECONDS)
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def _end(self, verdict: str, exit_code: int) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._ending = True
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
            _LOG.error("Stopping; the same command goes on from the last checkpoint.")
        logging.shutdown()
        self._exit_process(exit_code)
        self._ended.set()

    def _look_after(self) -> None:
        """Judges what needs no word from others: a hang of a process alone, silence of process 0.

        Apart from `_talk`, whose calls may hang when the network does.
        """
        while not self._stopped.wait(self._interval):
            if self._client is None:
                with self._lock:
                    record = dataclasses.replace(self._record, waits=False)
                record.beat = time.monotonic_ns()
                found = judge({0: record}, 1, self._watch, self._heartbeat_timeout)
                if found is not None:
                    self._end(*found)
            elif time.monotonic() - self._contact >= self._heartbeat_timeout:
                silence = f"has not answered for {self._heartbeat_timeout:.0f} s"
                self._end(f"process 0 (the coordinator) {silence}.", REQUEUE_EXIT_CODE)

    def _talk(self) -> None:
        while not self._stopped.wait(0.1 if self._orders.halt else self._interval):
            try:
                found = self._exchange()
            except jax.errors.JaxRuntimeError:
                continue  # `_look_after` counts how long this goes on
            self._contact = time.monotonic()
            if found is not None:
                self.exit_code = found[1]
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._tell_and_hear()
                self._end(*found)

    def _tell_and_hear(self) -> None:
        """A process says that it knows the verdict; process 0, without which nobody hears of it,
        waits for all that are alive to have said so."""
        self._record.told = True
        deadline = time.monotonic() + self._heartbeat_timeout
        while time.monotonic() < deadline:
            records = self._exchange_records()
            waited_for = [
                record
                for each, record in records.items()
                if each != self._id
                and not record.told
                and self._watch.unchanged_seconds(("beat", each), record.beat) < 5 * self._interval
            ]
            if self._id or not waited_for:
                return
            time.sleep(0.1)

    def _exchange_records(self) -> dict[int, Record]:
        """Writes the own record; on process 0 gives those of all."""
        assert self._client is not None
        with self._lock:
            self._record.beat += 1
            self._record.polls = self._polls if self._orders.halt else -1
            text = json.dumps(dataclasses.asdict(self._record))
        self._client.key_value_set(f"{_RECORDS}/{self._id:06}", text, allow_overwrite=True)
        if self._id:
            return {}
        return {
            int(key.rpartition("/")[2]): Record(**json.loads(value))
            for key, value in self._client.key_value_dir_get(f"{_RECORDS}/")
        }

    def _exchange(self) -> tuple[str, int] | None:
        """Writes the own record and reads what concerns this process."""
        records = self._exchange_records()
        if self._id == 0:
            return self._lead(records)
        ordered = try_get(self._client, _ORDERS)
        if ordered is not None:
            self._obey(Orders(**json.loads(ordered)))
        if self._orders.verdict:
            return self._orders.verdict, self._orders.exit_code
        first = try_get(self._client, f"{_RECORDS}/{0:06}")
        if first is None:
            return None
        record = Record(**json.loads(first))
        silent = self._coordinator_watch.unchanged_seconds("beat", record.beat)
        if silent >= self._heartbeat_timeout:
            return f"{record.who(0)} is lost: silent for {silent:.0f} s.", REQUEUE_EXIT_CODE
        return None

    def _lead(self, records: dict[int, Record]) -> tuple[str, int] | None:
        """Process 0: gives the orders that follow from all records."""
        assert self._client is not None
        found = judge(records, self._num_processes, self._watch, self._heartbeat_timeout)
        orders = dataclasses.replace(self._orders)
        if found is not None:
            orders.verdict, orders.exit_code = found
        orders.halt |= any(record.asked for record in records.values())
        polls = [record.polls for record in records.values()]
        if orders.halt and len(polls) == self._num_processes and min(polls) >= 0:
            orders.stop_at = orders.stop_at or max(polls) + 1
        if orders != self._orders:
            text = json.dumps(dataclasses.asdict(orders))
            self._client.key_value_set(_ORDERS, text, allow_overwrite=True)
            self._obey(orders)
        return found

    def _obey(self, orders: Orders) -> None:
        with self._lock:
            self._orders = orders
            self._lock.notify_all()
