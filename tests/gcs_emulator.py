"""Google Cloud Storage on this machine: the part of its JSON API that a run of ours uses.

    python tests/gcs_emulator.py --port=8099 --faults=0.02 &
    export STORAGE_EMULATOR_HOST=http://127.0.0.1:8099
    export TENSORSTORE_GCS_HTTP_URL=http://127.0.0.1:8099
    export CLOUD_STORAGE_EMULATOR_ENDPOINT=http://127.0.0.1:8099
    python scripts/train.py --workdir=gs://bucket/run ...

Objects are in memory, in buckets that exist once they are named. Each change gives an object a new
generation; `ifGenerationMatch` and `ifGenerationNotMatch` hold, since a lock is built on them (the
emulators in the package index lack them). Lists come in one page, and nothing is asked for in
batches.

With `faults`, that part of the requests fails in a way that Google's do: 429, 503, a slow reply, a
connection cut before the request is done or within its reply, a reply lost after the write.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import random
import re
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("429", "503", "slow", "cut before", "cut within", "reply lost")
_PART = re.compile(r"bytes (?:\*|(?P<first>\d+)-\d*)/(?P<total>\*|\d+)")  # of an upload


class ApiError(Exception):
    """An answer that is none of 2xx."""


@dataclasses.dataclass(frozen=True)
class Stored:
    bucket: str
    name: str
    data: bytes
    generation: int
    updated: str

    def resource(self) -> dict[str, str]:
        """https://cloud.google.com/storage/docs/json_api/v1/objects#resource"""
        return {
            "bucket": self.bucket,
            "name": self.name,
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
            "timeCreated": self.updated,
            "updated": self.updated,
        }


class Bucket:
    """All objects of a server, by bucket and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Stored] = {}
        self._lock = threading.Lock()
        self._generation = 1_700_000_000_000_000
        self.uploads: dict[str, tuple[dict[str, str], bytearray]] = {}

    def get(self, bucket: str, name: str, query: dict[str, str]) -> Stored:
        stored = self.objects.get((bucket, name))
        _check(query, stored)
        if stored is None:
            raise ApiError(404, f"No such object: {bucket}/{name}")
        return stored

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> Stored:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._lock:
            _check(query, self.objects.get((bucket, name)))
            self._generation += 1
            self.objects[bucket, name] = Stored(bucket, name, bytes(data), self._generation, now)
            return self.objects[bucket, name]

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self._lock:
            self.get(bucket, name, query)
            del self.objects[bucket, name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items: list[dict[str, str]] = []
        prefixes: set[str] = set()
        with self._lock:
            for (where, name), stored in sorted(self.objects.items()):
                if where != bucket or not name.startswith(prefix):
                    continue
                below, is_folder, _ = name[len(prefix) :].partition(delimiter or "\0")
                if is_folder:
                    prefixes.add(prefix + below + delimiter)
                else:
                    items.append(stored.resource())
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


def _check(query: dict[str, str], stored: Stored | None) -> None:
    """Preconditions: https://cloud.google.com/storage/docs/request-preconditions"""
    generation = stored.generation if stored else 0
    if query.get("ifGenerationMatch", str(generation)) != str(generation):
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("ifGenerationNotMatch") == str(generation):
        raise ApiError(304, "")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.speaks.wait()
        fault = self.server.draw_fault()
        if status := self.server.answers or int(fault if fault.isdecimal() else 0):
            return self._send(status, b'{"error": {"code": %d}}' % status, {})
        if fault == "slow":
            time.sleep(self.server.slow_seconds)
        if fault == "cut before":
            return self._cut()
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.answer(self.command, self.path, headers, body)
        lost = self.command != "GET" and self.server.lost_replies > 0
        self.server.lost_replies -= lost
        if lost or fault == "reply lost":
            return self._cut()
        self._send(*answer, whole=fault != "cut within")

    do_GET = do_POST = do_DELETE = _answer

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], whole: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if whole else content[: len(content) // 2])
        if not whole:
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)


class Server(ThreadingHTTPServer):
    """`faults` of the requests fail; `failed` counts how."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, faults: float = 0.0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.bucket = Bucket()
        self.faults = faults
        self.slow_seconds = 2.0
        self.lost_replies = 0  # so many of the next writes are done, and not answered
        self.refused = ""  # a bucket that nobody may touch
        self.answers = 0  # a status, to every request
        self.speaks = threading.Event()  # answers nobody while it is cleared
        self.speaks.set()
        self.missing = ""  # one that does not exist; all others do
        self.requests: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._rng = random.Random(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What gcsfs, TensorStore and array_record read; no search for credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "NO_GCE_CHECK": "true",
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that was killed is no news
            super().handle_error(request, client_address)

    def draw_fault(self) -> str:
        fault = self._rng.choice(FAULTS) if self._rng.random() < self.faults else ""
        self.failed[fault] += 1
        return fault

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, content and headers."""
        address, _, text = path.partition("?")
        query = dict(urllib.parse.parse_qsl(text))
        self.requests[f"{method} {address.split('/b/')[0]}"] += 1
        try:
            answer = self._answer(method, address, query, headers, body)
        except ApiError as error:
            status, message = error.args
            content = json.dumps({"error": {"code": status, "message": message}}).encode()
            return status, b"" if status == 304 else content, {}
        if isinstance(answer, tuple):
            return answer
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def _answer(
        self, method: str, address: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Any:
        _, _, place = address.partition("/storage/v1/b/")
        # BUCKET/o, BUCKET/o/NAME or BUCKET/o/NAME/rewriteTo/b/BUCKET/o/NAME
        bucket, *rest = (urllib.parse.unquote(part) for part in place.rstrip("/").split("/"))
        if bucket == self.refused:
            raise ApiError(403, "anonymous caller does not have storage.objects access.")
        if bucket == self.missing:
            raise ApiError(404, "The specified bucket does not exist.")
        if "/upload/" in address:
            return self._upload(bucket, query, headers, body)
        if len(rest) < 2:
            return self.bucket.list(bucket, query)
        if method == "DELETE":
            self.bucket.delete(bucket, rest[1], query)
            return 204, b"", {}
        stored = self.bucket.get(bucket, rest[1], query if len(rest) == 2 else {})
        if len(rest) == 2:
            return _media(stored, headers.get("range")) if "alt" in query else stored.resource()
        copy = self.bucket.put(rest[4], rest[6], stored.data, query)
        size = str(len(copy.data))
        answer = {"totalBytesRewritten": size, "objectSize": size, "resource": copy.resource()}
        return {"kind": "storage#rewriteResponse", "done": True, **answer}

    def _upload(
        self, bucket: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Any:
        """https://cloud.google.com/storage/docs/uploads-downloads: simple, multipart, resumable."""
        if query["uploadType"] == "media":
            return self.bucket.put(bucket, query["name"], body, query).resource()
        if query["uploadType"] == "multipart":
            described, data = _two_parts(body, headers["content-type"])
            return self.bucket.put(bucket, described["name"], data, query).resource()
        if "upload_id" not in query:
            described = json.loads(body or b"{}")
            session = f"session-{len(self.bucket.uploads)}"
            name = described.get("name") or query["name"]
            self.bucket.uploads[session] = {**query, "name": name}, bytearray()
            place = f"{self.url}/upload/storage/v1/b/{bucket}/o"
            return 200, b"", {"Location": f"{place}?uploadType=resumable&upload_id={session}"}
        started, received = self.bucket.uploads[query["upload_id"]]  # what it was begun with, bytes
        span = _PART.fullmatch(headers.get("content-range", f"bytes 0-/{len(body)}"))
        assert span is not None
        if span["first"]:
            del received[int(span["first"]) :]  # a part sent again
            received += body
        if span["total"] == "*" or len(received) < int(span["total"]):
            return 308, b"", {"Range": f"bytes=0-{len(received) - 1}"} if received else {}
        return self.bucket.put(bucket, started["name"], bytes(received), started).resource()


def _media(stored: Stored, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
    """Content, or a range of it."""
    size, headers = len(stored.data), {"x-goog-generation": str(stored.generation)}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None:
        return 200, stored.data, headers
    if match[1]:
        start, stop = int(match[1]), min(int(match[2] or size), size - 1) + 1
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= size:
        return 416, b"", {"Content-Range": f"bytes */{size}"}
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return 206, stored.data[start:stop], headers


def _two_parts(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes]:
    """Resource and content of a multipart upload."""
    match = re.search(r"boundary=\"?([^\";]+)", content_type)
    assert match is not None
    delimiter = b"--" + match[1].encode()
    _, described, rest = body.split(delimiter, 2)
    resource, data = (
        re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]
        for part in (described, rest.rpartition(delimiter)[0])
    )
    return json.loads(resource), data.removesuffix(b"\n").removesuffix(b"\r")


@contextlib.contextmanager
def emulator(**arguments: Any) -> Iterator[Server]:
    """A running server."""
    with Server(**arguments) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--faults", type=float, default=0.0, help="part of the requests, 0 to 1")
    arguments = parser.parse_args()
    with emulator(**vars(arguments)) as server, contextlib.suppress(KeyboardInterrupt):
        print(" ".join(f"{key}={value}" for key, value in server.environment.items()), flush=True)
        threading.Event().wait()
    print("faults:", dict(server.failed))


if __name__ == "__main__":
    main()
