"""Google Cloud Storage on this machine: the part of its JSON API that a run of ours uses.

    python tests/gcs_emulator.py --port=8099 --faults=0.02 &
    export STORAGE_EMULATOR_HOST=http://127.0.0.1:8099
    export TENSORSTORE_GCS_HTTP_URL=http://127.0.0.1:8099
    export CLOUD_STORAGE_EMULATOR_ENDPOINT=http://127.0.0.1:8099
    python scripts/train.py --workdir=gs://bucket/run ...

Objects are in memory, in buckets that exist once they are named. Each change gives an object a new
generation; `ifGenerationMatch` and `ifGenerationNotMatch` hold, since a lock is built on them (the
emulators in the package index lack them). `tests/workdir/test_buckets.py` compares its answers with
the resource representations of the API's reference.

With `faults`, that part of the requests fails in a way that Google's do: 429, 503, a slow reply, a
connection cut before the request is done or within its reply, a reply lost after the write.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import datetime
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

import google_crc32c

FAULTS = ("429", "503", "slow", "cut before", "cut within", "reply lost")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)")
_COPY = re.compile(_OBJECT.pattern + r"/(?:rewrite|copy)To/b/(?P<to>[^/]+)/o/(?P<to_name>[^/]+)")
_LIST = re.compile(r"/storage/v1/b/(?P<bucket>[^/]+)/o/?")
_BUCKET = re.compile(r"/storage/v1/b/(?P<bucket>[^/]+)")
_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/(?P<bucket>[^/]+)/o")
_PART = re.compile(rb"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/1.1")


class ApiError(Exception):
    """An answer that is none of 2xx."""


@dataclasses.dataclass(frozen=True)
class Stored:
    bucket: str
    name: str
    data: bytes
    generation: int
    content_type: str
    updated: str

    def resource(self) -> dict[str, str]:
        """https://cloud.google.com/storage/docs/json_api/v1/objects#resource"""
        crc32c = google_crc32c.value(self.data).to_bytes(4, "big")
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "bucket": self.bucket,
            "name": self.name,
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "crc32c": base64.b64encode(crc32c).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
            "etag": f"etag-{self.generation}",
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
        found = self.objects.get((bucket, name))
        _check(query, found)
        if found is None:
            raise ApiError(404, f"No such object: {bucket}/{name}")
        return found

    def put(
        self, bucket: str, name: str, data: bytes, query: dict[str, str], kind: str = ""
    ) -> Stored:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._lock:
            _check(query, self.objects.get((bucket, name)))
            self._generation += 1
            stored = Stored(
                bucket=bucket,
                name=name,
                data=bytes(data),
                generation=self._generation,
                content_type=kind or "application/octet-stream",
                updated=now.replace("+00:00", "Z"),
            )
            self.objects[bucket, name] = stored
        return stored

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self._lock:
            self.get(bucket, name, query)
            del self.objects[bucket, name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items: list[Stored] = []
        prefixes: dict[str, None] = {}
        limit = int(query.get("maxResults", 1000))
        with self._lock:
            mine = sorted(name for b, name in self.objects if b == bucket)
            for name in mine:
                after = query.get("startOffset", "") <= name > query.get("pageToken", "")
                if not after or not name.startswith(prefix):
                    continue
                if query.get("endOffset") and name >= query["endOffset"]:
                    continue
                rest, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if delimiter and found and (rest or query.get("includeTrailingDelimiter")):
                    prefixes[prefix + rest + delimiter] = None
                    continue
                if len(items) == limit:
                    break
                items.append(self.objects[bucket, name])
            more = {"nextPageToken": items[-1].name} if len(items) == limit < len(mine) else {}
        answer = {"kind": "storage#objects", "items": [each.resource() for each in items], **more}
        return {**answer, "prefixes": list(prefixes)} if prefixes else answer


def _check(query: dict[str, str], found: Stored | None) -> None:
    """Preconditions: https://cloud.google.com/storage/docs/request-preconditions"""
    generation = found.generation if found else 0
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
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(chunks)
        self.server.wait_until_it_speaks()
        if status := self.server.answers:
            return self._send(status, b'{"error": {"code": %d}}' % status, {})
        fault = self.server.draw_fault()
        if fault in ("429", "503"):
            return self._send(int(fault), b'{"error": {"code": %s}}' % fault.encode(), {})
        if fault == "slow":
            time.sleep(self.server.slow_seconds)
        if fault == "cut before":
            return self._cut()
        status, content, headers = self.server.answer(
            self.command, self.path, dict(self.headers), body
        )
        if fault == "reply lost" or self.server.loses_reply(self.command):
            return self._cut()
        self._send(status, content, headers, whole=fault != "cut within")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

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

    def __init__(self, port: int = 0, faults: float = 0.0, seed: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.bucket = Bucket()
        self.faults = faults
        self.slow_seconds = 2.0
        self.lost_replies = 0  # so many of the next writes are done, and not answered
        self.refused = ""  # a bucket that nobody may touch
        self.answers = 0  # a status, to every request
        self._speaks = threading.Event()
        self._speaks.set()
        self.missing = ""  # one that does not exist; all others do
        self.requests: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._rng = random.Random(seed)

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

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Answers nobody within the context."""
        self._speaks.clear()
        try:
            yield
        finally:
            self._speaks.set()

    def wait_until_it_speaks(self) -> None:
        self._speaks.wait()

    def loses_reply(self, method: str) -> bool:
        lost = method != "GET" and self.lost_replies > 0
        self.lost_replies -= lost
        return lost

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, content and headers."""
        address, _, text = path.partition("?")
        query = dict(urllib.parse.parse_qsl(text))
        self.requests[f"{method} {address.split('/b/')[0]}"] += 1
        try:
            if address.startswith("/batch/"):
                return self._batch(headers, body)
            answer = self._answer(method, address, query, headers, body)
        except ApiError as error:
            status, message = error.args
            content = json.dumps({"error": {"code": status, "message": message}}).encode()
            return status, b"" if status == 304 else content, {}
        if not isinstance(answer, tuple):
            content = json.dumps(answer).encode()
            return 200, content, {"Content-Type": "application/json; charset=UTF-8"}
        return answer

    def _answer(
        self, method: str, address: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Any:
        unquote = urllib.parse.unquote
        if self.refused and f"/b/{self.refused}" in address:
            raise ApiError(403, "anonymous caller does not have storage.objects access.")
        lowered = {name.lower(): value for name, value in headers.items()}
        if self.missing and f"/b/{self.missing}" in address:
            raise ApiError(404, "The specified bucket does not exist.")
        if match := _COPY.fullmatch(address):
            found = self.bucket.get(match["bucket"], unquote(match["name"]), {})
            to = match["to"], unquote(match["to_name"])
            copy = self.bucket.put(*to, found.data, query, found.content_type).resource()
            size = {"totalBytesRewritten": copy["size"], "objectSize": copy["size"], "done": True}
            return {"kind": "storage#rewriteResponse", **size, "resource": copy}
        if match := _OBJECT.fullmatch(address):
            bucket, name = match["bucket"], unquote(match["name"])
            if method == "DELETE":
                self.bucket.delete(bucket, name, query)
                return 204, b"", {}
            stored = self.bucket.get(bucket, name, query)
            return _media(stored, lowered.get("range")) if _is_media(query) else stored.resource()
        if match := _LIST.fullmatch(address):
            return self.bucket.list(match["bucket"], query)
        if match := _UPLOAD.fullmatch(address):
            return self._upload(match["bucket"], query, lowered, body)
        if match := _BUCKET.fullmatch(address):
            return {"kind": "storage#bucket", "name": match["bucket"], "location": "US"}
        raise ApiError(404, f"{method} {address} is not emulated")

    def _upload(
        self, bucket: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Any:
        """https://cloud.google.com/storage/docs/uploads-downloads: simple, multipart, resumable."""
        kind = query["uploadType"]
        if kind == "media":
            content_type = headers.get("content-type", "")
            return self.bucket.put(bucket, query["name"], body, query, content_type).resource()
        if kind == "multipart":
            described, kind, data = _two_parts(body, headers["content-type"])
            return self.bucket.put(bucket, described["name"], data, query, kind).resource()
        if "upload_id" not in query:
            described = json.loads(body or b"{}")
            session = f"session-{len(self.bucket.uploads)}"
            name = described.get("name") or query["name"]
            self.bucket.uploads[session] = {**query, "name": name}, bytearray()
            place = f"{self.url}/upload/storage/v1/b/{bucket}/o"
            return 200, b"", {"Location": f"{place}?uploadType=resumable&upload_id={session}"}
        started, received = self.bucket.uploads[query["upload_id"]]
        first, total = _content_range(headers.get("content-range", f"bytes 0-/{len(body)}"))
        if first is not None:
            del received[first:]  # a part sent again
            received += body
        if total is None or len(received) < total:
            known = {"Range": f"bytes=0-{len(received) - 1}"} if received else {}
            return 308, b"", known
        return self.bucket.put(bucket, started["name"], bytes(received), started).resource()

    def _batch(self, headers: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """https://cloud.google.com/storage/docs/batch"""
        kind = next(value for name, value in headers.items() if name.lower() == "content-type")
        boundary = kind.partition("boundary=")[2].strip('"').encode()
        parts = []
        for number, part in enumerate(body.split(b"--" + boundary)[1:-1]):
            request = _PART.search(part)
            assert request is not None
            path = urllib.parse.urlsplit(request["path"].decode())
            status, content, _ = self.answer(
                request["method"].decode(), f"{path.path}?{path.query}", {}, b""
            )
            known = re.search(rb"(?i)content-id: *<?([^>\r\n]*)>?", part)
            identity = known[1].decode() if known else str(number)
            head = f"Content-Type: application/http\r\nContent-ID: <response-{identity}>\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 {status} -\r\n\r\n".encode() + content)
        reply = b"".join(b"--reply\r\n" + part + b"\r\n" for part in parts) + b"--reply--\r\n"
        return 200, reply, {"Content-Type": "multipart/mixed; boundary=reply"}


def _is_media(query: dict[str, str]) -> bool:
    return query.get("alt") == "media"


def _media(stored: Stored, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
    """Content, or a range of it."""
    resource, size = stored.resource(), len(stored.data)
    headers = {
        "Content-Type": stored.content_type,
        "x-goog-generation": str(stored.generation),
        "x-goog-hash": f"crc32c={resource['crc32c']}",
        "ETag": resource["etag"],
    }
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


def _two_parts(body: bytes, content_type: str) -> tuple[dict[str, Any], str, bytes]:
    """Resource, content type and content of a multipart upload."""
    match = re.search(r"boundary=\"?([^\";]+)", content_type)
    assert match is not None
    delimiter = b"--" + match[1].encode()
    described, rest = body.split(delimiter, 2)[1:]
    head, data = re.split(rb"\r?\n\r?\n", rest.rpartition(delimiter)[0], maxsplit=1)
    kind = re.search(rb"(?i)content-type: *(\S+)", head)
    resource = json.loads(re.split(rb"\r?\n\r?\n", described, maxsplit=1)[1])
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    return resource, kind[1].decode() if kind else "", data


def _content_range(text: str) -> tuple[int | None, int | None]:
    """First byte and total size of `bytes 0-99/100`, `bytes 0-99/*` or `bytes */100`."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    return (
        None if span == "*" else int(span.partition("-")[0]),
        None if total == "*" else int(total),
    )


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
    with Server(arguments.port, arguments.faults) as server:
        print(" ".join(f"{key}={value}" for key, value in server.environment.items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        print("faults:", dict(server.failed))


if __name__ == "__main__":
    main()
