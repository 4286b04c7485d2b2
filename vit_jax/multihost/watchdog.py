"""Notices that a process of a run has died, hangs or failed, names it, and ends the others.

JAX's own heartbeats notice a death, not a hang, and abort the other processes with a number in
place of a name. So the processes report to each other, through the key-value store of JAX's
coordination service (no port but JAX's own): each writes its `Record` a few times per timeout and
reads that of process 0, which reads all. What process 0 finds becomes the verdict in its own
record, which ends every process.

The service is a part of process 0. When that is killed, XLA aborts the others within a second:
nothing can be said in time, and JAX has no setting that prevents it.

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
from typing import Any

import jax
from jax._src.distributed import global_state  # known before the devices start

from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, Record, Seen, judge

_LOG = logging.getLogger(__name__)
_RECORDS = "vit_jax/records"
_FOREVER_MILLISECONDS = 7 * 24 * 3600 * 1000  # longer than anything that is watched
# From a verdict to the end of a process. Process 0 goes last: XLA aborts those that it leaves.
_EXIT_SECONDS, _LAST_EXIT_SECONDS = 1.0, 6.0


class Watchdog:
    """Watches over this process and its peers from threads, between `start` and `stop`.

    `num_processes` and `process_id` are known from `start` on.
    """

    def __init__(self) -> None:
        self.num_processes, self.process_id = 1, 0
        self._record = Record("", 0)
        self._threads: list[threading.Thread] = []

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
        self._client: Any = global_state.client
        self.num_processes, self.process_id = global_state.num_processes, global_state.process_id
        self._record = Record(socket.gethostname(), os.getpid())
        self._records = {0: self._record} if self.num_processes == 1 else {}
        self._stopped = threading.Event()
        # Apart from each other: calls of the client may hang when the network does.
        loops = [self._watch, self._report] if self.num_processes > 1 else [self._watch]
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def expect_progress(self, expected: bool) -> None:
        """From here on the main thread is to call `note`; or it no longer is."""
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
        self._record.progress += 1
        self._record.doing, self._record.waits = doing, waits
        if step is not None:
            self._record.step = step
        if started and self._threads:
            self._record.limit_seconds = self._step_timeout

    def fail(self, failure: str, exit_code: int) -> None:
        """Tells the others that this process ends, why, and with which status they should."""
        if not self._record.verdict:
            self._record.exit_code = exit_code
            self._record.verdict = f"{self._record.name(self.process_id)} failed: {failure}"
        self.wait_for_verdict()

    def wait_for_verdict(self) -> None:
        """After an error: returns only if no verdict comes, which ends this process itself."""
        if self._threads:
            self._stopped.wait(2 * self._heartbeat_timeout + _LAST_EXIT_SECONDS)

    def leave(self) -> None:
        """Waits, still watched, until all processes have got here; then nobody is watched."""
        if self._threads and self.num_processes > 1:
            self.note("finished", waits=True)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.wait_at_barrier("vit_jax/end", _FOREVER_MILLISECONDS)
        self.stop()

    def stop(self) -> None:
        """Nobody is watched from here on."""
        if self._threads:
            self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []

    def _watch(self) -> None:
        """Judges what is known, until there is a verdict."""
        seen: Seen = {}
        num_known = self.num_processes if self.process_id == 0 else 1
        while not self._stopped.wait(self._interval):
            self._record.beat += 1
            found = judge(self._records, num_known, seen, self._heartbeat_timeout)
            if found and not self._stopped.is_set():
                self._end(*found)
                break

    def _report(self) -> None:
        """Writes the record of this process; reads those that it judges by."""
        folder = _RECORDS if self.process_id == 0 else f"{_RECORDS}/0"
        while not self._stopped.wait(self._interval):
            # `_watch` counts for how long errors last.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                content = json.dumps(dataclasses.asdict(self._record))
                key = f"{_RECORDS}/{self.process_id}/record"
                self._client.key_value_set(key, content, allow_overwrite=True)
                found = self._client.key_value_dir_get(f"{folder}/")
                records = {
                    int(key.split("/")[-2]): Record(**json.loads(text)) for key, text in found
                }
                if self.process_id > 0 and records:
                    records[0].limit_seconds = 0.0  # who hangs is judged by all records, or not
                self._records = records

    def _end(self, verdict: str, exit_code: int) -> None:
        """Says why, and ends this process, even if the log is locked by one that hangs."""
        is_left = self.process_id == 0 and self.num_processes > 1
        seconds = _LAST_EXIT_SECONDS if is_left else _EXIT_SECONDS
        timer = threading.Timer(seconds, os._exit, [exit_code])
        timer.daemon = True
        timer.start()
        has_been_told = bool(self._record.verdict)  # by this process, which failed
        self._record.exit_code, self._record.verdict = exit_code, verdict  # for the others
        if verdict.startswith("No progress") and self._record.name(self.process_id) in verdict:
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=sys.stderr)  # where it hangs
        if not has_been_told:
            _LOG.error("%s", verdict)
        if exit_code == REQUEUE_EXIT_CODE:
            _LOG.error("Stopping; the same command resumes from the last checkpoint.")
        logging.shutdown()


# Of this process: the parts of a run report to it without being handed it.
watchdog = Watchdog()
