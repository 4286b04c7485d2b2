from __future__ import annotations

import jax
import pytest

from tests.clock import Clock
from vit_jax.multihost import verdict
from vit_jax.multihost.verdict import (
    REQUEUE_EXIT_CODE,
    ChangeTimer,
    Record,
    judge,
    may_be_caused_by_peer,
)

TIMEOUT = 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(verdict, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [::1]:3496"), True),
        (jax.errors.JaxRuntimeError("whatever it says"), True),
        (RuntimeError("UNAVAILABLE: the service has gone"), True),
        (ValueError("too many values to unpack"), False),
        (ValueError("the state is UNKNOWN: nobody set it"), False),
        (ValueError("INVALID_ARGUMENT: shapes differ"), False),
    ],
)
def test_for_which_errors_a_peer_may_be_to_blame(error: Exception, expected: bool) -> None:
    assert may_be_caused_by_peer(error) is expected


def records_of(count: int, **kwargs: object) -> dict[int, Record]:
    return {
        i: Record("host", 70 + i, limit_seconds=60.0, doing="updating", step=5, **kwargs)  # type: ignore[arg-type]
        for i in range(count)
    }


def pass_time(clock: Clock, records: dict[int, Record], seconds: float, alive: set[int]) -> None:
    clock.now += seconds
    for i in alive:
        records[i].beat += 1


def test_all_is_well_while_hearts_beat_and_something_moves(clock: Clock) -> None:
    records, timer = records_of(3, waits=True), ChangeTimer()
    for _ in range(20):
        pass_time(clock, records, 9.0, {0, 1, 2})
        for record in records.values():
            record.progress += 1
        assert judge(records, 3, timer, TIMEOUT) is None


def test_a_silent_process_is_lost(clock: Clock) -> None:
    records, timer = records_of(3, waits=True), ChangeTimer()
    assert judge(records, 3, timer, TIMEOUT) is None
    pass_time(clock, records, 9.0, {0, 2})
    assert judge(records, 3, timer, TIMEOUT) is None
    pass_time(clock, records, 1.0, {0, 2})
    found = judge(records, 3, timer, TIMEOUT)
    assert found is not None
    assert found[0].startswith("process 1 (pid 71 on host) is lost")
    assert "updating (step 5)" in found[0]
    assert found[1] == REQUEUE_EXIT_CODE


def test_a_process_that_never_said_anything_is_lost_too(clock: Clock) -> None:
    records, timer = records_of(1), ChangeTimer()
    assert judge(records, 2, timer, TIMEOUT) is None
    pass_time(clock, records, TIMEOUT, {0})
    found = judge(records, 2, timer, TIMEOUT)
    assert found is not None
    assert found[0].startswith("process 1 (")


def test_who_does_not_wait_is_to_blame_for_a_hang(clock: Clock) -> None:
    records, timer = records_of(3, waits=True), ChangeTimer()
    records[2].waits, records[2].doing = False, "reading a batch"
    assert judge(records, 3, timer, TIMEOUT) is None
    for _ in range(7):
        pass_time(clock, records, 9.0, {0, 1, 2})
        found = judge(records, 3, timer, TIMEOUT)
    assert found is not None
    assert "process 2 (pid 72 on host) has been reading a batch (step 5) for 60 s" in found[0]
    assert "process 0" not in found[0]


def test_where_all_wait_the_one_furthest_behind_is_named(clock: Clock) -> None:
    records, timer = records_of(3, waits=True), ChangeTimer()
    records[1].step = 4
    for _ in range(8):
        pass_time(clock, records, 9.0, {0, 1, 2})
        found = judge(records, 3, timer, TIMEOUT)
    assert found is not None
    assert "process 1 (" in found[0]
    assert "process 0 (" not in found[0]


def test_waiting_for_one_that_still_moves_is_no_hang(clock: Clock) -> None:
    records, timer = records_of(2, waits=True), ChangeTimer()
    for _ in range(20):
        pass_time(clock, records, 9.0, {0, 1})
        records[1].progress += 1
        assert judge(records, 2, timer, TIMEOUT) is None


def test_those_that_have_left_wait_for_the_last_one(clock: Clock) -> None:
    """It waits for its disk, say, and nobody works any more."""
    records, timer = records_of(3, waits=True), ChangeTimer()
    for i in (1, 2):
        records[i].limit_seconds, records[i].doing = 0.0, "finished"
    for _ in range(8):
        pass_time(clock, records, 9.0, {0, 1, 2})
        found = judge(records, 3, timer, TIMEOUT)
    assert found is not None
    assert found[0].startswith("No progress: process 0 (pid 70 on host)")


def test_without_a_limit_nothing_is_a_hang(clock: Clock) -> None:
    records, timer = records_of(1), ChangeTimer()
    records[0].limit_seconds = 0.0
    for _ in range(1000):
        pass_time(clock, records, 9.0, {0})
        assert judge(records, 1, timer, TIMEOUT) is None


def test_a_failure_is_handed_on_with_its_status() -> None:
    records = records_of(2)
    records[1].failure, records[1].exit_code = "no such file", 2
    found = judge(records, 2, ChangeTimer(), TIMEOUT)
    assert found == ("process 1 (pid 71 on host) failed: no such file", 2)
