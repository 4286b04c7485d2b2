"""Which process of a run is to blame, from what the processes report."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Hashable
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL: the same command resumes the run
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
    limit_seconds: float = 0.0  # without progress, before it counts as hanging; 0: never
    verdict: str = ""  # why the run ends: its own failure, or what process 0 has found
    exit_code: int = 0  # that goes with the verdict

    def name(self, process_id: int) -> str:
        return f"process {process_id} (pid {self.pid} on {self.host})"


# Values by key, each with the time at which it was first seen.
Seen = dict[Hashable, tuple[Any, float]]


def unchanged_seconds(seen: Seen, key: Hashable, value: Any) -> float:
    """Seconds since `value` was first seen for `key`."""
    now = time.monotonic()
    if key not in seen or seen[key][0] != value:
        seen[key] = value, now
    return now - seen[key][1]


def judge(
    records: dict[int, Record],
    num_processes: int,
    seen: Seen,
    heartbeat_timeout_seconds: float,
) -> tuple[str, int] | None:
    """(verdict, exit status) on the records of processes; None while all is well.

    Args:
      records: by process id; a process that has not reported yet has none.
      num_processes: how many there should be.
      seen: {} for the first call, then the same again.
      heartbeat_timeout_seconds: a record unchanged for so long belongs to a lost process.
    """
    for record in records.values():
        if record.verdict:
            return record.verdict, record.exit_code
    stuck: list[int] = []
    for i in range(num_processes):
        record = records.get(i, Record("an unknown host", 0))
        silent = unchanged_seconds(seen, ("beat", i), record.beat)
        if silent >= heartbeat_timeout_seconds:
            verdict = f"{record.name(i)} is lost: no heartbeat for {silent:.0f} s. "
            return f"{verdict}It was {record.doing} (step {record.step}).", REQUEUE_EXIT_CODE
        idle = unchanged_seconds(seen, ("progress", i), record.progress)
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
        for i in to_blame
    ]
    return (f"No progress: {'; '.join(blamed)}.", REQUEUE_EXIT_CODE) if blamed else None
