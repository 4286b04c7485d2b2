"""Detects that a process of a run has died, hangs or failed, names it, and ends the others.

JAX's own heartbeats detect a death, not a hang, and do not name the process. So the processes
report to each other, through the key-value store of JAX's coordination service: each writes its
`Record` a few times per timeout and reads that of process 0, which reads all. What process 0 finds
becomes the verdict in its own record, which ends every process. If process 0 itself is killed,
and the service with it, XLA aborts the others. A single process ends if it makes no progress.
"""

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
from typing import Any

import jax
from jax._src.distributed import global_state  # known before the devices start

from vit_jax.errors import REQUEUE_EXIT_CODE

_LOG = logging.getLogger(__name__)
_RECORDS = "vit_jax/records"
_FOREVER_MILLISECONDS = 7 * 24 * 3600 * 1000  # longer than any run is watched
# From a verdict to the end of a process. Process 0 goes last: XLA aborts those left behind.
_EXIT_SECONDS, _LAST_EXIT_SECONDS = 1.0, 6.0


@dataclasses.dataclass
class Record:
    """Status report of a process."""

    host: str
    pid: int
    beat: int = 0  # increases as long as the process lives
    progress: int = 0  # increases whenever its main thread makes progress
    step: int = 0
    doing: str = "starting"
    waits: bool = False  # for others, or the devices: then it is not to blame
    limit_seconds: float = 0.0  # without progress, before it counts as hanging; 0: never
    verdict: str = ""  # why the run ends: its own failure, or the finding of process 0
    exit_code: int = 0  # to end with

    def name(self, process_id: int) -> str:
        return f"process {process_id} (pid {self.pid} on {self.host})"


# (what, process) -> (its value, when it was first seen)
Seen = dict[tuple[str, int], tuple[int, float]]


def judge(
    records: dict[int, Record], num_processes: int, seen: Seen, heartbeat_timeout_seconds: float
) -> tuple[str, int] | None:
    """(verdict, exit status) from the records of processes that have reported; None if all is well.

    `seen`: {} in the first call, the same dict afterwards.
    """

    def unchanged_seconds(what: str, process_id: int, value: int) -> float:
        key, now = (what, process_id), time.monotonic()
        if key not in seen or seen[key][0] != value:
            seen[key] = value, now
        return now - seen[key][1]

    for record in records.values():
        if record.verdict:
            return record.verdict, record.exit_code
    stuck: list[int] = []
    for i in range(num_processes):
        record = records.get(i, Record("an unknown host", 0))
        silent = unchanged_seconds("beat", i, record.beat)
        if silent >= heartbeat_timeout_seconds:
            verdict = f"{record.name(i)} is lost: no heartbeat for {silent:.0f} s. "
            return f"{verdict}It was {record.doing} (step {record.step}).", REQUEUE_EXIT_CODE
        idle = unchanged_seconds("progress", i, record.progress)
        if record.limit_seconds and idle >= record.limit_seconds:
            stuck.append(i)
    # Those that wait, wait for the one that does not; if all wait, for the one furthest behind.
    to_blame = [i for i in stuck if not records[i].waits]
    if not to_blame:
        if len(stuck) < sum(record.limit_seconds > 0 for record in records.values()):
            return None  # the one they wait for makes progress; processes that left do not count
        behind = min((records[i].step for i in stuck), default=0)
        to_blame = [i for i in stuck if records[i].step == behind]
    blamed = [
        f"{records[i].name(i)} has been {records[i].doing} (step {records[i].step}) "
        f"for {records[i].limit_seconds:.0f} s"
        for i in to_blame
    ]
    return (f"No progress: {'; '.join(blamed)}.", REQUEUE_EXIT_CODE) if blamed else None


class Watchdog:
    """Watches this process and its peers from threads, between `start` and `stop`."""

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
        """Starts to watch; call it when the processes are connected.

        A process silent for the first timeout is lost; one without progress for the second hangs
        (0: never), for the third before the first update, which includes compilation.
        """
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._step_timeout = step_timeout_seconds
        self._start_timeout = start_timeout_seconds if step_timeout_seconds else 0.0
        self._interval = min(max(heartbeat_timeout_seconds / 20, 0.1), 1.0)
        self._client: Any = global_state.client
        self.num_processes, self.process_id = global_state.num_processes, global_state.process_id
        self._record = Record(socket.gethostname(), os.getpid())
        self._records = {0: self._record} if self.num_processes == 1 else {}
        self._stopped = threading.Event()
        # In separate threads: calls of the client may hang when the network does.
        loops = [self._watch, self._report] if self.num_processes > 1 else [self._watch]
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def expect_progress(self, expected: bool) -> None:
        """Whether the main thread will call `note` from here on."""
        self._record.progress += 1
        self._record.limit_seconds = self._start_timeout if expected and self._threads else 0.0

    def state(self) -> tuple[str, int]:
        """What the main thread does, and a counter of its progress."""
        return self._record.doing, self._record.progress

    def note(
        self, doing: str, step: int | None = None, *, waits: bool = False, started: bool = False
    ) -> None:
        """Records progress of the main thread, which is now `doing`, say, "reading a batch".

        `step`: completed updates; None: unchanged. `waits`: see `Record`. `started`: the first
        update is done.
        """
        self._record.progress += 1
        self._record.doing, self._record.waits = doing, waits
        if step is not None:
            self._record.step = step
        if started and self._threads:
            self._record.limit_seconds = self._step_timeout

    def fail(self, failure: str, exit_code: int) -> None:
        """Tells the others that this process ends, why, and their exit status."""
        if not self._record.verdict:
            self._record.exit_code = exit_code
            self._record.verdict = f"{self._record.name(self.process_id)} failed: {failure}"
        self.wait_for_verdict()

    def wait_for_verdict(self) -> None:
        """After an error: returns only if no verdict ends this process."""
        if self._threads:
            self._stopped.wait(2 * self._heartbeat_timeout + _LAST_EXIT_SECONDS)

    def leave(self) -> None:
        """Waits, still watched, until all processes arrive here; then ends the watch."""
        if self._threads and self.num_processes > 1:
            self.note("finished", waits=True)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.wait_at_barrier("vit_jax/end", _FOREVER_MILLISECONDS)
        self.stop()

    def stop(self) -> None:
        """Ends the watch."""
        if self._threads:
            self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads = []

    def _watch(self) -> None:
        """Judges the known records until there is a verdict."""
        seen: Seen = {}
        num_known = self.num_processes if self.process_id == 0 else 1
        while not self._stopped.wait(self._interval):
            self._record.beat += 1
            judgement = judge(self._records, num_known, seen, self._heartbeat_timeout)
            if judgement and not self._stopped.is_set():
                self._end(*judgement)
                break

    def _report(self) -> None:
        """Writes the record of this process; reads those needed to judge."""
        folder = _RECORDS if self.process_id == 0 else f"{_RECORDS}/0"
        while not self._stopped.wait(self._interval):
            # `_watch` measures how long errors last.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                content = json.dumps(dataclasses.asdict(self._record))
                key = f"{_RECORDS}/{self.process_id}/record"
                self._client.key_value_set(key, content, allow_overwrite=True)
                rows = self._client.key_value_dir_get(f"{folder}/")
                records = {int(key.split("/")[-2]): Record(**json.loads(x)) for key, x in rows}
                if self.process_id > 0 and records:
                    records[0].limit_seconds = 0.0  # only process 0, with all records, judges hangs
                self._records = records

    def _end(self, verdict: str, exit_code: int) -> None:
        """Reports why, and ends this process, even if a hanging thread holds the log's lock."""
        is_last = self.process_id == 0 and self.num_processes > 1
        seconds = _LAST_EXIT_SECONDS if is_last else _EXIT_SECONDS
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
