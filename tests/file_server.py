"""A web server of this machine that can be made to fail in all the ways that real ones do."""

import dataclasses
import http.server
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@dataclasses.dataclass
class Served:
    """A file of the server, with one of `faults` per request.

    `status=500` (and `headers` of that answer), `break_after=10` bytes, `stall_after=10` bytes,
    `wait` (for `release`), `location=/other`, `without_length` (ends where the connection ends),
    `chunked` (break_after cuts it), `endless`, `drip=0.01` (seconds between its bytes), `whole`
    (even if a part is asked for).
    """

    body: bytes
    headers: dict[str, str] = dataclasses.field(default_factory=lambda: {"ETag": '"one"'})
    faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class FileServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Served] = {}
        self.requests: list[str] = []  # their paths
        self.bytes_sent = 0  # of bodies that were answered whole
        self.release = threading.Event()  # ends stalls and waits

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def serve_files() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


def pose_as_hub(server: FileServer, monkeypatch: Any, cache: Any) -> None:
    """The server answers for Hugging Face's hub, whose files are kept in `cache`."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def do_GET(self, with_body: bool = True) -> None:
        self.server.requests.append(self.path)
        file = self.server.files.get(self.path)
        if file is None:
            self.send_error(404)
            return
        fault = file.faults.pop(0) if file.faults else {}
        if fault.get("wait"):
            self.server.release.wait(20)
        if "status" in fault:
            self._answer(fault["status"], fault.get("headers", {}))
            return
        if self.headers.get("If-Match", known := file.headers.get("ETag")) != known:
            self._answer(412, {})
            return
        if "location" in fault:
            self._answer(302, {"Location": fault["location"]})
            return
        self._send(file, fault, with_body)

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, file: Served, fault: dict[str, Any], with_body: bool) -> None:
        rest, status = file.body, 200
        headers = {**file.headers}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part and "whole" not in fault:
            start, last = int(part[1]), min(int(part[2]), len(rest) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(rest)}"
            rest, status = rest[start : last + 1], 206
        headers["Content-Length"] = str(len(rest))
        if fault.keys() & {"without_length", "chunked", "endless"}:
            del headers["Content-Length"]
        if fault.keys() & {"chunked", "endless"}:
            headers["Transfer-Encoding"] = "chunked"
        self._answer(status, headers)
        if not with_body:
            return
        for kind in ("break_after", "stall_after"):
            if kind in fault:
                rest = rest[: fault[kind]]
        if "chunked" in fault:
            end = b"" if "break_after" in fault else b"0\r\n\r\n"
            # An empty chunk is the end: two of them are an error, if the client still reads.
            rest = (b"%x\r\n%s\r\n" % (len(rest), rest) if rest else b"") + end
        if "drip" in fault:
            for byte in rest:
                self.wfile.write(bytes([byte]))
                time.sleep(fault["drip"])
        while "endless" in fault and not self.server.release.is_set():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(rest), rest))
        self.wfile.write(rest)
        self.server.bytes_sent += len(rest)
        if "stall_after" in fault:
            self.wfile.flush()
            self.server.release.wait(20)
