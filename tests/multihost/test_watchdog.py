"""What the others of a run do when one fails or is frozen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.distributed.cluster import cluster

pytestmark = pytest.mark.slow

# Three processes that wait for each other, until one of them does something else.
SCRIPT = """
import os, signal, time
from vit_jax import launch
from vit_jax.errors import UserError
from vit_jax.multihost.watchdog import watchdog

def run(config, workdir):
    watchdog.expect_progress(True)
    watchdog.note("updating", 7, waits=True)
    time.sleep(1)
    if watchdog.process_id == PROCESS_ID:
        ACT
    time.sleep(100)

launch.main(run, doc="")
"""
FAIL = "raise UserError('the disk is full')"
FREEZE = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize(
    ("act", "status", "verdict"),
    [
        (FAIL, 2, "failed: the disk is full"),
        (FREEZE, 75, "is lost: no heartbeat for 8 s. It was updating (step 7)."),
    ],
    ids=["fails", "is frozen"],
)
def test_all_end_with_the_same_status_and_say_why(
    act: str, status: int, verdict: str, process_id: int, tmp_path: Path
) -> None:
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
