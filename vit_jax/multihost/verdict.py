"""Which process of a run is to blame, from what the processes say of themselves."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Hashable
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL: the same command resumes the run
# How XLA's errors begin that a process which is gone may cause in the others.
_STATUS = re.compile(
    r"(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE"
    r"|UNKNOWN): "
)


def may_be_of_a_peer(error: BaseException) -> bool:
    """Whether another process may be to blame: a collective has failed, or the like.

    By the words, because JAX raises one and the same as JaxRuntimeError or as ValueError.
    """
    return type(error).__name__ == "JaxRuntimeError" or _STATUS.match(str(error)) is not None


@dataclasses.dataclass
class Record:
    """What a process says of itself."""

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

    def who(self, process_id: int) -> str:
        return f"process {process_id} (pid {self.pid} on {self.host})"


class Watch:
    """When values were last seen to change."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Any, float]] = {}

    def unchanged_seconds(self, key: Hashable, value: Any) -> float:
        """Seconds since `value` was first seen for `key`."""
        now = time.monotonic()
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, now)
        return now - self._seen[key][1]


def judge(
    records: dict[int, Record], num_processes: int, watch: Watch, heartbeat_timeout_seconds: float
) -> tuple[str, int] | None:
    """(verdict, exit status) on the records of all processes; None while all is well.

    Args:
      records: by process id; a process that has not said anything yet has none.
      num_processes: how many there should be.
      watch: of the earlier calls.
      heartbeat_timeout_seconds: a record unchanged for so long belongs to a lost process.
    """
    for process_id, record in sorted(records.items()):
        if record.failure:
            return f"{record.who(process_id)} failed: {record.failure}", record.exit_code
    stuck: list[int] = []
    for process_id in range(num_processes):
        record = records.get(process_id, Record("an unknown host", 0))
        silent = watch.unchanged_seconds(("beat", process_id), record.beat)
        if silent >= heartbeat_timeout_seconds:
            return (
                f"{record.who(process_id)} is lost: nothing was heard of it for {silent:.0f} s. "
                f"It was {record.doing} (step {record.step}).",
                REQUEUE_EXIT_CODE,
            )
        idle = watch.unchanged_seconds(("progress", process_id), record.progress)
        if record.limit_seconds and idle >= record.limit_seconds:
            stuck.append(process_id)
    if not stuck:
        return None
    # Those that wait do so for the one that does not; where all wait, for the one furthest behind.
    to_blame = [each for each in stuck if not records[each].waits]
    if not to_blame:
        if len(stuck) < sum(record.limit_seconds > 0 for record in records.values()):
            return None  # the one they wait for still gets somewhere; who has left does not count
        behind = min(records[each].step for each in stuck)
        to_blame = [each for each in stuck if records[each].step == behind]
    listed = "; ".join(
        f"{records[each].who(each)} has been {records[each].doing} (step {records[each].step}) "
        f"for {records[each].limit_seconds:.0f} s"
        for each in to_blame[:5]
    )
    more = f"; and {len(to_blame) - 5} more" if len(to_blame) > 5 else ""
    return f"No progress: {listed}{more}.", REQUEUE_EXIT_CODE
