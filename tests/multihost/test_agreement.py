"""Being asked to stop: a signal, or the notice of a machine of Google's."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.distributed.cluster import cluster
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


def test_only_machines_of_google_have_a_metadata_server(monkeypatch, tmp_path):
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


SCRIPT = """
import errno
from pathlib import Path
from vit_jax import launch
from vit_jax.errors import TransientError, UserError, is_transient
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.workdir import claim

def fails(error):
    raise error

def run(options, watchdog):
    is_first = watchdog.process_id == 0
    try:
        claim.check_shared(Path(options.workdir).parent / ("" if is_first else "other"))
        assert is_first
    except UserError as error:
        assert not is_first and "is not the one that" in str(error), str(error)
    claim.claim_workdir(options.workdir, {"seed": 0}, {}, resume="auto")
    for raised in (TransientError("the disk is away"), OSError(errno.ESTALE, "Stale", "a/file")):
        try:
            run_on_first_process(lambda: fails(raised))
            raise AssertionError("nothing was raised here")
        except (TransientError, OSError) as error:
            assert type(error) is type(raised) and is_transient(error), repr(error)
            assert str(raised.args[-1]) in str(error)

launch.main(run, "")
"""


@pytest.mark.slow
def test_two_processes_share_a_workdir_and_the_errors_of_the_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with cluster(tmp_path, script=str(script), num_processes=2) as running:
        assert running.exit_codes() == [0, 0], running.output
