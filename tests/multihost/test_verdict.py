from __future__ import annotations

from typing import Any

import jax
import pytest

from tests.clock import Clock
from vit_jax.multihost import verdict
from vit_jax.multihost.verdict import Record, judge, may_be_caused_by_peer

HEARTBEAT_TIMEOUT = 10.0
LIMIT = 60.0


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


def lost(name: str, doing: str) -> tuple[float, str, int]:
    return 10.0, f"{name} is lost: no heartbeat for 10 s. It was {doing}.", 75


def stuck(who: str) -> tuple[float, str, int]:
    return 60.0, f"No progress: {who} for 60 s.", 75


# Of three processes that wait in an update: what is different in some (None: never heard of),
# whose heart does not beat, who gets somewhere; after how many seconds which verdict comes.
CASES: dict[str, tuple[dict[int, Any], set[int], set[int], tuple[float, str, int] | None]] = {
    "all is well": ({}, set(), {0, 1, 2}, None),
    "silent": ({}, {1}, set(), lost("process 1 (pid 71 on host)", "updating (step 5)")),
    "never seen": (
        {2: None},
        set(),
        set(),
        lost("process 2 (pid 0 on an unknown host)", "starting (step 0)"),
    ),
    "one does not wait": (
        {2: {"waits": False, "doing": "reading a batch"}},
        set(),
        set(),
        stuck("process 2 (pid 72 on host) has been reading a batch (step 5)"),
    ),
    "all wait, for the one furthest behind": (
        {1: {"step": 4}},
        set(),
        set(),
        stuck("process 1 (pid 71 on host) has been updating (step 4)"),
    ),
    "the one that they wait for still moves": ({}, set(), {1}, None),
    "two have left and wait for the last, which waits for its disk": (
        {i: {"limit_seconds": 0.0, "doing": "finished"} for i in (1, 2)},
        set(),
        set(),
        stuck("process 0 (pid 70 on host) has been updating (step 5)"),
    ),
    "without a limit": ({i: {"limit_seconds": 0.0} for i in range(3)}, set(), set(), None),
    "a failure": (
        {1: {"verdict": "no such file", "exit_code": 2}},
        set(),
        set(),
        (0.0, "no such file", 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_to_blame_and_when(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, silent, moving, expected = CASES[case]
    clock = Clock()
    monkeypatch.setattr(verdict, "time", clock)
    usual = {"limit_seconds": LIMIT, "doing": "updating", "step": 5, "waits": True}
    records = {
        i: Record("host", 70 + i, **{**usual, **changes.get(i, {})})
        for i in range(3)
        if changes.get(i, {}) is not None
    }
    seen: verdict.Seen = {}
    for seconds in range(0, 500, 5):
        if found := judge(records, 3, seen, HEARTBEAT_TIMEOUT):
            assert (seconds, *found) == expected
            return
        clock.now += 5
        for i, record in records.items():
            record.beat += i not in silent
            record.progress += i in moving
    assert expected is None
