"""Which process of a run is to blame, from what the processes report."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Hashable
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL: the same command resumes the run
STOPPING = "Stopping; the same command resumes from the last checkpoint."
# How XLA's errors begin that the loss of a process may cause in the others.
_STATUS = re.compile(
    r"(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE"
    r"|UNKNOWN): "
)


def may_be_caused_by_peer(error: BaseException) -> bool:
    """Whether another process may be to blame: a collective has failed, or the like.

    By the words, because JAX raises one and the same as JaxRuntimeError or as ValueError.
    """
    return type(error).__name__ == "JaxRuntimeError" or _STATUS.match(str(error)) is not None


@dataclasses.dataclass
class Record:
    """What a process reports of itself."""

    host: str
    pid: int
    beat: int = 0  # grows as long as the process lives
    progress: int = 0  # grows whenever its main thread gets somewhere
    step: int = 0
    doing: str = "starting"
    waits: bool = False  # for others, or the devices: then it is not to blame
    limit_seconds: float = 0.0  # without progress, before it counts as hanging
    failure: str = ""
    exit_code: int = 0

    def name(self, process_id: int) -> str:
        return f"process {process_id} (pid {self.pid} on {self.host})"


class ChangeTimer:
    """For how long values have not changed."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Any, float]] = {}

    def unchanged_seconds(self, key: Hashable, value: Any) -> float:
        """Seconds since `value` was first seen for `key`."""
        now = time.monotonic()
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, now)
        return now - self._seen[key][1]


def judge(
    records: dict[int, Record],
    num_processes: int,
    timer: ChangeTimer,
    heartbeat_timeout_seconds: float,
) -> tuple[str, int] | None:
    """(verdict, exit status) on the records of all processes; None while all is well.

    Args:
      records: by process id; a process that has not reported yet has none.
      num_processes: how many there should be.
      timer: of the earlier calls.
      heartbeat_timeout_seconds: a record unchanged for so long belongs to a lost process.
    """
    for i, record in sorted(records.items()):
        if record.failure:
            return f"{record.name(i)} failed: {record.failure}", record.exit_code
    stuck: list[int] = []
    for i in range(num_processes):
        record = records.get(i, Record("an unknown host", 0))
        silent = timer.unchanged_seconds(("beat", i), record.beat)
        if silent >= heartbeat_timeout_seconds:
            verdict = f"{record.name(i)} is lost: no heartbeat for {silent:.0f} s. "
            return f"{verdict}It was {record.doing} (step {record.step}).", REQUEUE_EXIT_CODE
        idle = timer.unchanged_seconds(("progress", i), record.progress)
        if record.limit_seconds and idle >= record.limit_seconds:
            stuck.append(i)
    # Those that wait do so for the one that does not; where all wait, for the one furthest behind.
    to_blame = [i for i in stuck if not records[i].waits]
    if not to_blame:
        if len(stuck) < sum(record.limit_seconds > 0 for record in records.values()):
            return None  # the one they wait for still gets somewhere; who has left does not count
        behind = min((records[i].step for i in stuck), default=0)
        to_blame = [i for i in stuck if records[i].step == behind]
    blamed = [
        f"{records[i].name(i)} has been {records[i].doing} (step {records[i].step}) "
        f"for {records[i].limit_seconds:.0f} s"
        for i in to_blame[:5]
    ]
    if len(to_blame) > 5:
        blamed.append(f"and {len(to_blame) - 5} more")
    return (f"No progress: {'; '.join(blamed)}.", REQUEUE_EXIT_CODE) if blamed else None
