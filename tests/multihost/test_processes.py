from __future__ import annotations

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import pytest

from vit_jax.errors import UserError
from vit_jax.multihost import agreement
from vit_jax.multihost.agreement import PreemptionNotice, metadata_server, read_metadata
from vit_jax.multihost.processes import start_processes

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
        ({"num_processes": 2}, "go together: coordinator_address should be defined"),
        ({"coordinator_address": "a:1", "num_processes": 2}, "process id .* must be defined"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "Got process_id=2, num_processes=2",
        ),
        (
            {"coordinator_address": "a", "num_processes": 2, "process_id": 0},
            "--coordinator_address=a is no HOST:PORT",
        ),
        ({"arrival_timeout_seconds": 0}, "arrival_timeout_seconds=0 must be positive."),
        ({"heartbeat_timeout_seconds": float("nan")}, "heartbeat_timeout_seconds=nan must be"),
        ({"start_timeout_seconds": -1.0}, r"seconds=-1.0 must be positive or 0 \(no limit\)"),
        ({"distributed": "off", "process_id": 0}, "--distributed=off contradicts the flags"),
        ({"distributed": "on"}, "no cluster was found"),
    ],
)
def test_flags_that_cannot_be_meant(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a new process: tests before this one may have started JAX in this one.
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    arguments = {"distributed": "auto", **ALONE, **TIMEOUTS, **changes}
    with pytest.raises(UserError, match=message):
        start_processes(**arguments)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ConnectionError("metadata.google.internal does not answer"), TimeoutError),
        (jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server"), TimeoutError),
        (RuntimeError("initialize must be called before any computations"), RuntimeError),
    ],
)
def test_a_cluster_that_does_not_answer_may_do_so_later(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher starts it again after a TimeoutError; see `launch.one_line_errors`."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("jax.distributed.initialize", fails)
    with pytest.raises(raised, match=str(error)):
        start_processes(**{"distributed": "auto", **ALONE, **TIMEOUTS})


def test_sigterm_is_noticed_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionNotice() as notice:
        assert not notice.reached()
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.reached()
        os.kill(os.getpid(), signal.SIGTERM)  # a machine that shuts down sends several
        assert notice.reached()
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_machines_of_google_have_a_metadata_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_metadata("127.0.0.1:9", "preempted") is None  # one that does not answer
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(agreement, "_PRODUCT", tmp_path / "absent")
    assert metadata_server() == ""
    (tmp_path / "product").write_text("Google Compute Engine\n")
    monkeypatch.setattr(agreement, "_PRODUCT", tmp_path / "product")
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

    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.05)
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
