"""Being asked to stop: a signal, or the notice of a machine of Google's."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vit_jax.multihost import agreement
from vit_jax.multihost.agreement import PreemptionNotice, metadata_server, read_metadata


def test_sigterm_is_noticed_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with PreemptionNotice() as notice:
        assert not notice.reached()
        for _ in range(2):  # a machine that shuts down sends several
            os.kill(os.getpid(), signal.SIGTERM)
            assert notice.reached()
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_machines_of_google_have_a_metadata_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_metadata("127.0.0.1:9", "preempted") is None  # one that does not answer
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(agreement, "_PRODUCT", tmp_path / "product")
    assert metadata_server() == ""
    (tmp_path / "product").write_text("Google Compute Engine\n")
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
