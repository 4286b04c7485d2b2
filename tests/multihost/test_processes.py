from __future__ import annotations

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vit_jax.command_line import step_range
from vit_jax.errors import UserError
from vit_jax.multihost import preemption, processes
from vit_jax.multihost.preemption import PreemptionNotice, metadata_server, read_metadata
from vit_jax.multihost.processes import PeersMissingError, start_processes
from vit_jax.multihost.watchdog import Watchdog

TIMEOUTS: dict[str, Any] = {
    "arrival_timeout_seconds": 5,
    "heartbeat_timeout_seconds": 1.0,
    "step_timeout_seconds": 1.0,
    "start_timeout_seconds": 1.0,
}
ALONE: dict[str, Any] = {"coordinator_address": None, "num_processes": None, "process_id": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 2}, "--coordinator_address is missing"),
        ({"coordinator_address": "a:1", "num_processes": 2}, "--process_id is missing"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "--process_id=2 must be from 0 to 1",
        ),
        (
            {"coordinator_address": "a", "num_processes": 2, "process_id": 0},
            "--coordinator_address=a is no HOST:PORT",
        ),
        (
            {"coordinator_address": "a:1", "num_processes": 0, "process_id": 0},
            "--process_id=0 must be from 0 to -1",
        ),
        ({"arrival_timeout_seconds": 0}, "arrival_timeout_seconds=0 must be positive."),
        ({"heartbeat_timeout_seconds": float("nan")}, "heartbeat_timeout_seconds=nan must be"),
        ({"start_timeout_seconds": -1.0}, r"seconds=-1.0 must be positive or 0 \(no limit\)"),
        (
            {"distributed": "off", "process_id": 0},
            "--distributed=off contradicts the flags",
        ),
    ],
)
def test_flags_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    arguments = {"distributed": "auto", **ALONE, **TIMEOUTS, **changes}
    with pytest.raises(UserError, match=message):
        start_processes(**arguments)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("Failed to recognize coordinator address l16-workers-0-0"), True),
        (ConnectionError("metadata.google.internal does not answer"), True),
        (RuntimeError("initialize must be called before any computations"), False),
    ],
)
def test_a_cluster_that_is_not_there_yet_may_come(
    error: Exception, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of a TPU run whose name is not known so far: the launcher starts it again."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("jax.distributed.initialize", fails)
    monkeypatch.setattr(processes, "_on_abort", lambda _: None)
    with pytest.raises(PeersMissingError if raised else RuntimeError, match=str(error)):
        start_processes(**{"distributed": "auto", **ALONE, **TIMEOUTS})


@pytest.mark.parametrize("text", ["10", "10:", "20:10", "a:b", "10:10"])
def test_bad_profile_steps(text: str) -> None:
    with pytest.raises(UserError, match="--profile_steps="):
        step_range(text)


def test_profile_steps() -> None:
    assert step_range("100:110") == (100, 110)


def test_a_process_alone_ends_when_it_makes_no_progress() -> None:
    ended: list[int] = []
    watch = Watchdog(ended.append)
    watch.start(heartbeat_timeout_seconds=2.0, step_timeout_seconds=0.5, start_timeout_seconds=0.5)
    try:
        watch.expect_progress(True)
        watch.wait_for_verdict()
    finally:
        watch.stop()
    assert ended == [75]


def test_sigterm_is_noticed_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionNotice() as notice:
        assert not notice.reached()
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.reached()
        os.kill(os.getpid(), signal.SIGTERM)  # a machine that shuts down sends several
        assert notice.reached()
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_machines_have_no_metadata_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(preemption, "_PRODUCT", tmp_path / "absent")
    assert metadata_server() == ""
    (tmp_path / "product").write_text("Google Compute Engine\n")
    monkeypatch.setattr(preemption, "_PRODUCT", tmp_path / "product")
    assert metadata_server() == "metadata.google.internal"


def test_a_maintenance_notice_does_what_the_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"maintenance-event": "NONE", "preempted": "FALSE"}

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(values[self.path.rpartition("/")[2]].encode())

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.05)
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
        with PreemptionNotice() as notice:
            time.sleep(0.5)
            assert not notice.reached()
            values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
            deadline = time.monotonic() + 20
            while not notice.reached() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert notice.reached()
        server.shutdown()


def test_a_metadata_server_that_does_not_answer_says_nothing() -> None:
    assert read_metadata("127.0.0.1:9", "preempted") is None
