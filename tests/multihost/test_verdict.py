from __future__ import annotations

from typing import Any

import jax
import pytest

from tests.clock import Clock
from vit_jax.multihost import verdict
from vit_jax.multihost.verdict import Record, judge, may_be_caused_by_peer


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


def lost(who: str) -> tuple[float, str, int]:
    process, doing = who.split(", ")
    return 10.0, f"process {process} is lost: no heartbeat for 10 s. It was {doing}.", 75


def stuck(who: str) -> tuple[float, str, int]:
    process, doing = who.split(", ")
    return 60.0, f"No progress: process {process} has been {doing} for 60 s.", 75


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({i: {"moves": True} for i in range(3)}, None),
        ({1: {"beats": False}}, lost("1 (pid 71 on host), updating (step 5)")),
        ({2: None}, lost("2 (pid 0 on an unknown host), starting (step 0)")),  # never heard of
        # Who does not wait is to blame; where all do, the one furthest behind.
        ({2: {"waits": False, "doing": "x"}}, stuck("2 (pid 72 on host), x (step 5)")),
        ({1: {"step": 4}}, stuck("1 (pid 71 on host), updating (step 4)")),
        ({1: {"moves": True}}, None),  # the one that they wait for
        # Two have left and wait for the last one, which waits for its disk.
        (
            {i: {"limit_seconds": 0.0, "doing": "finished"} for i in (1, 2)},
            stuck("0 (pid 70 on host), updating (step 5)"),
        ),
        ({i: {"limit_seconds": 0.0} for i in range(3)}, None),  # no limit: nothing is a hang
        ({1: {"verdict": "no such file", "exit_code": 2}}, (0.0, "no such file", 2)),
    ],
)
def test_who_is_to_blame_and_when(
    changes: dict[int, Any],
    expected: tuple[float, str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three processes that wait in an update, but for `changes`: seconds, verdict, status."""
    monkeypatch.setattr(verdict, "time", clock := Clock())
    usual = {"limit_seconds": 60.0, "doing": "updating", "step": 5, "waits": True}
    given = {i: {**usual, **changes.get(i, {})} for i in range(3) if changes.get(i, {}) is not None}
    beats = {i: each.pop("beats", True) for i, each in given.items()}
    moves = {i: each.pop("moves", False) for i, each in given.items()}
    records = {i: Record("host", 70 + i, **each) for i, each in given.items()}
    seen: verdict.Seen = {}
    for seconds in range(0, 500, 5):
        if found := judge(records, 3, seen, heartbeat_timeout_seconds=10.0):
            assert (seconds, *found) == expected
            return
        clock.now += 5
        for i, record in records.items():
            record.beat += beats[i]
            record.progress += moves[i]
    assert expected is None
