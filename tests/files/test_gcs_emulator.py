"""The emulated bucket answers as the reference of the JSON API says that Google's does.

https://cloud.google.com/storage/docs/json_api/v1, with the pages on preconditions and uploads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.gcs_emulator import Server


@pytest.fixture
def ask(bucket: str, bucket_server: Server) -> Any:
    """Sends a request about the bucket; returns status, headers and content."""
    place = f"storage/v1/b/{bucket.removeprefix('gs://')}/o"

    def send(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, bytes]:
        upload = "upload/" if method == "POST" else ""
        address = path if path.startswith("http") else f"{bucket_server.url}/{upload}{place}{path}"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(address, body or None, names, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    return send


def test_objects_and_lists(ask: Any, bucket: str) -> None:
    status, _, content = ask("POST", "?uploadType=media&name=a/b", b"values")
    resource = json.loads(content)
    assert status == 200
    assert (resource["bucket"], resource["name"]) == (bucket.removeprefix("gs://"), "a/b")
    # Numbers of 64 bits are strings, hashes are base64 of big-endian bytes.
    assert resource["size"] == "6"
    assert base64.b64decode(resource["md5Hash"]) == hashlib.md5(b"values").digest()
    assert resource["updated"].endswith("Z")
    assert json.loads(ask("GET", "/a%2Fb")[2]) == resource
    assert ask("GET", "/a%2Fb?alt=media")[2] == b"values"
    assert ask("GET", "/nothing")[0] == 404
    for name in ("a/c/d", "e"):
        ask("POST", f"?uploadType=media&name={name}", b"1")
    for query, names, prefixes in (
        ("", ["a/b", "a/c/d", "e"], []),
        ("?delimiter=/", ["e"], ["a/"]),
        ("?prefix=a/&delimiter=/", ["a/b"], ["a/c/"]),
    ):
        answer = json.loads(ask("GET", query)[2])
        assert [each["name"] for each in answer["items"]] == names
        assert answer["prefixes"] == prefixes


@pytest.mark.parametrize(
    ("wanted", "status", "content", "range"),
    [
        ("bytes=4-99", 206, b"es", "bytes 4-5/6"),
        ("bytes=2-", 206, b"lues", "bytes 2-5/6"),
        ("bytes=-2", 206, b"es", "bytes 4-5/6"),
        ("bytes=6-9", 416, b"", "bytes */6"),
    ],
)
def test_ranges(ask: Any, wanted: str, status: int, content: bytes, range: str) -> None:
    ask("POST", "?uploadType=media&name=a", b"values")
    found = ask("GET", "/a?alt=media", Range=wanted)
    assert (found[0], found[2], found[1]["Content-Range"]) == (status, content, range)


def test_preconditions(ask: Any) -> None:
    """0 stands for no object; a change that does not hold is 412, a read of the same is 304."""
    put = "?uploadType=media&name=a&ifGenerationMatch="
    status, _, content = ask("POST", f"{put}0", b"1")
    generation = int(json.loads(content)["generation"])
    assert status == 200
    assert ask("POST", f"{put}0", b"2")[0] == 412
    assert ask("POST", f"{put}{generation + 1}", b"2")[0] == 412
    assert ask("GET", f"/a?alt=media&ifGenerationNotMatch={generation}")[::2] == (304, b"")
    assert ask("GET", f"/a?ifGenerationMatch={generation + 1}")[0] == 412
    status, _, content = ask("POST", f"{put}{generation}", b"2")
    assert status == 200
    assert int(json.loads(content)["generation"]) > generation
    assert ask("DELETE", f"/a?ifGenerationMatch={generation}")[0] == 412
    assert ask("DELETE", "/a")[0] == 204
    assert ask("DELETE", "/a")[0] == 404


def test_uploads_in_parts(ask: Any) -> None:
    """Parts are confirmed by 308 and the bytes that are there; the last one gives the resource."""
    session = ask("POST", "?uploadType=resumable", b'{"name": "a"}')[1]["Location"]
    for body, range in ((b"val", "bytes 0-2/*"), (b"", "bytes */6")):
        status, headers, _ = ask("POST", session, body, Content_Range=range)
        assert (status, headers["Range"]) == (308, "bytes=0-2")
    status, _, content = ask("POST", session, b"ues", Content_Range="bytes 3-5/6")
    assert (status, json.loads(content)["size"]) == (200, "6")
    assert ask("GET", "/a?alt=media")[2] == b"values"
    parts = (
        b'--x\r\nContent-Type: application/json\r\n\r\n{"name": "b"}\r\n'
        b"--x\r\nContent-Type: text/plain\r\n\r\none\r\n\r\ntwo\r\n--x--"
    )
    kind = "multipart/related; boundary=x"
    assert ask("POST", "?uploadType=multipart", parts, Content_Type=kind)[0] == 200
    assert ask("GET", "/b?alt=media")[2] == b"one\r\n\r\ntwo"
