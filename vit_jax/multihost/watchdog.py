"""Notices that a process of a run has died, hangs or failed, names it, and ends the others.

JAX's own heartbeats notice a death, not a hang, and abort the other processes with a number in
place of a name. So the processes report to each other, through the key-value store of JAX's
coordination service (no port but JAX's own): a thread of each writes its `Record` a few times per
timeout; that of process 0, where the service runs, judges all records and writes the state of the
run, which the others read. Whatever is wrong ends in a verdict that ends every process.

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
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, STOPPING, ChangeTimer, Record, judge

_LOG = logging.getLogger(__name__)
_RECORDS = "vit_jax/records"
_STATE = "vit_jax/state"
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
        self._coordinator = Record("an unknown host", 0)  # of process 0, as last read
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
          heartbeat_timeout_seconds: a process without a sign of life for so long is lost.
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
        self._last_contact = time.monotonic()  # with process 0
        self._timer = ChangeTimer()
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._client: Any = coordination_client()
        # Apart from each other: calls of the client may hang when the network does.
        several = self._num_processes > 1
        loops = [self._report, self._watch_coordinator] if several else [self._watch_alone]
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
          doing: shown where this process hangs or is lost.
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
        self.wait_for_verdict()

    def wait_for_verdict(self) -> None:
        """After an error: returns only if no verdict comes, which ends this process itself."""
        if (
            self._threads
            and self._stopped.wait(2 * self._heartbeat_timeout)
            and self.verdict is not None
        ):
            self._ended.wait()

    def leave(self) -> None:
        """Waits, still watched, until all processes have got here; then nobody is watched."""
        if self._threads and self._num_processes > 1:
            self.note("finished", waits=True)
            self._wait_at_barrier("end", _FOREVER_MILLISECONDS)
        self.stop()

    def stop(self) -> None:
        """Nobody is watched from here on."""
        if self._threads:
            self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []

    def coordinator_is_lost(self, why: str) -> str:
        """The verdict on process 0."""
        record = self._coordinator
        return (
            f"process 0 (the coordinator, pid {record.pid} on {record.host}) is lost: {why}. "
            f"It was {record.doing} (step {record.step})."
        )

    def _end(self, verdict: str, exit_code: int, alive: Sequence[int] = ()) -> None:
        """Logs why, and ends this process together with those that are `alive`."""
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
            _LOG.error(STOPPING)
        logging.shutdown()
        if self._id in alive:  # JAX aborts those that process 0 leaves behind
            self._wait_at_barrier("verdict", 5000, alive)
        self._exit_process(exit_code)
        self._ended.set()

    def _watch_alone(self) -> None:
        while not self._stopped.wait(self._interval):
            record = dataclasses.replace(self._record, beat=time.monotonic_ns())
            if found := judge({0: record}, 1, self._timer, self._heartbeat_timeout):
                self._end(*found)

    def _watch_coordinator(self) -> None:
        while not self._stopped.wait(self._interval):
            if time.monotonic() - self._last_contact >= self._heartbeat_timeout:
                why = f"no heartbeat for {self._heartbeat_timeout:.0f} s"
                self._end(self.coordinator_is_lost(why), REQUEUE_EXIT_CODE)

    def _report(self) -> None:
        while not self._stopped.wait(self._interval):
            # `_watch_coordinator` counts how long errors go on.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                with self._lock:
                    self._record.beat += 1
                self._set(f"{_RECORDS}/{self._id}", dataclasses.asdict(self._record))
                state = self._judge_all() if self._id == 0 else self._get(_STATE).get(0)
                if state is None:  # process 0 has not come so far
                    continue
                record = Record(**state["coordinator"])
                if record.beat != self._coordinator.beat:
                    self._coordinator, self._last_contact = record, time.monotonic()
                if state["verdict"]:
                    verdict, exit_code = state["verdict"]
                    self._end(verdict, exit_code, state["alive"])

    def _judge_all(self) -> dict[str, Any]:
        """Process 0: writes and returns the state that follows from all records."""
        records = {i: Record(**value) for i, value in self._get(_RECORDS).items()}
        silent = {i: self._timer.unchanged_seconds(("beat", i), r.beat) for i, r in records.items()}
        state = {
            "coordinator": dataclasses.asdict(self._record),
            "verdict": judge(records, self._num_processes, self._timer, self._heartbeat_timeout),
            "alive": [i for i, seconds in silent.items() if seconds < 5 * self._interval],
        }
        self._set(f"{_STATE}/0", state)
        return state

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _get(self, folder: str) -> dict[int, dict[str, Any]]:
        found = self._client.key_value_dir_get(f"{folder}/")
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}

    def _wait_at_barrier(
        self, name: str, milliseconds: int, peers: Sequence[int] | None = None
    ) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.wait_at_barrier(f"vit_jax/{name}", milliseconds, peers)


# Of this process: the parts of a run report to it without being handed it.
watchdog = Watchdog()
