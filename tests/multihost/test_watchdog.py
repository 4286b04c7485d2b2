"""Who is to blame where a run stands still, and what the others do when one fails or is frozen."""

import os

import pytest

from tests.clock import Clock
from tests.distributed.cluster import cluster
from vit_jax.multihost import watchdog
from vit_jax.multihost.watchdog import Record, Seen, judge


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
def test_who_is_to_blame_and_when(changes, expected, monkeypatch):
    """Of three processes that wait in an update, but for `changes`: seconds, verdict, status."""
    monkeypatch.setattr(watchdog, "time", clock := Clock())
    usual = {"limit_seconds": 60.0, "doing": "updating", "step": 5, "waits": True}
    fields = {
        i: {**usual, **changes.get(i, {})} for i in range(3) if changes.get(i, {}) is not None
    }
    beats = {i: values.pop("beats", True) for i, values in fields.items()}
    moves = {i: values.pop("moves", False) for i, values in fields.items()}
    records = {i: Record("host", 70 + i, **values) for i, values in fields.items()}
    seen: Seen = {}
    for seconds in range(0, 500, 5):
        if judgement := judge(records, 3, seen, heartbeat_timeout_seconds=10.0):
            assert (seconds, *judgement) == expected
            return
        clock.now += 5
        for i, record in records.items():
            record.beat += beats[i]
            record.progress += moves[i]
    assert expected is None


# Three processes that wait for each other, until one of them does something else.
SCRIPT = """
import os, signal, time
from vit_jax import launch
from vit_jax.errors import UserError

def run(options, watchdog):
    watchdog.expect_progress(True)
    watchdog.note("updating", 7, waits=True)
    time.sleep(1)
    if watchdog.process_id == PROCESS_ID:
        ACT
    time.sleep(100)

launch.main(run, "")
"""
FAIL = "raise UserError('the disk is full')"
FREEZE = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "process_id", "status", "verdict"),
    [
        (FAIL, 0, 2, "failed: the disk is full"),
        (FREEZE, 0, 75, "is lost: no heartbeat for 8 s. It was updating (step 7)."),
    ],
    ids=["fails", "is frozen"],
)
def test_all_end_with_the_same_status_and_say_why(act, process_id, status, verdict, tmp_path):
    """Process 0 too: its end must not be what the others end by, since XLA aborts them then."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("PROCESS_ID", str(process_id)).replace("ACT", act))
    with cluster(tmp_path, script=str(script), num_processes=3) as running:
        victim = running[process_id]
        for process in running.processes:
            if process is not victim:
                assert process.wait() == status, process.output
        if act == FAIL:
            assert victim.wait() == status, victim.output
            assert victim.output.splitlines()[-1] == "error: the disk is full"
    name = f"process {process_id} (pid {victim.popen.pid} on {os.uname().nodename})"
    for process in running.processes:
        assert process is victim or f"{name} {verdict}" in process.output
