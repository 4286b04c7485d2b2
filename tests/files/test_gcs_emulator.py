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
        upload = "upload/" if method in ("POST", "PUT") else ""
        address = path if path.startswith("http") else f"{bucket_server.url}/{upload}{place}{path}"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(address, body or None, names, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    return send


def test_an_object_and_its_resource(ask: Any, bucket: str) -> None:
    status, _, content = ask(
        "POST", "?uploadType=media&name=a/b", b"values", Content_Type="text/plain"
    )
    resource = json.loads(content)
    name = bucket.removeprefix("gs://")
    assert status == 200
    assert resource["kind"] == "storage#object"
    assert resource["id"] == f"{name}/a/b/{resource['generation']}"
    # Numbers of 64 bits are strings, hashes are base64 of big-endian bytes.
    assert (resource["size"], resource["contentType"]) == ("6", "text/plain")
    assert base64.b64decode(resource["md5Hash"]) == hashlib.md5(b"values").digest()
    assert len(base64.b64decode(resource["crc32c"])) == 4
    assert resource["updated"].endswith("Z")
    assert json.loads(ask("GET", "/a%2Fb")[2]) == resource
    assert ask("GET", "/a%2Fb?alt=media")[2] == b"values"
    assert ask("GET", "/nothing")[0] == 404


@pytest.mark.parametrize(
    ("wanted", "status", "content", "range"),
    [
        ("bytes=1-3", 206, b"alu", "bytes 1-3/6"),
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


def test_lists(ask: Any) -> None:
    for name in ("a", "b/1", "b/2", "b/c/3", "d"):
        ask("POST", f"?uploadType=media&name={name}", b"1")

    def listed(query: str) -> tuple[list[str], list[str]]:
        names, prefixes, page = [], [], ""
        while True:
            answer = json.loads(ask("GET", f"?{query}{page}")[2])
            assert answer["kind"] == "storage#objects"
            names += [each["name"] for each in answer.get("items", [])]
            prefixes += answer.get("prefixes", [])
            if "nextPageToken" not in answer:
                return names, prefixes
            page = f"&pageToken={answer['nextPageToken']}"

    assert listed("") == (["a", "b/1", "b/2", "b/c/3", "d"], [])
    assert listed("maxResults=2") == listed("")
    assert listed("delimiter=/") == (["a", "d"], ["b/"])
    assert listed("prefix=b/&delimiter=/") == (["b/1", "b/2"], ["b/c/"])
    assert listed("startOffset=b/2&endOffset=d") == (["b/2", "b/c/3"], [])


def test_a_resumable_upload(ask: Any) -> None:
    """Parts are confirmed by 308 and the bytes that are there; the last one gives the resource."""
    status, headers, _ = ask("POST", "?uploadType=resumable", b'{"name": "a"}')
    session = headers["Location"]
    assert status == 200
    status, headers, _ = ask("PUT", session, b"val", Content_Range="bytes 0-2/*")
    assert (status, headers["Range"]) == (308, "bytes=0-2")
    status, headers, _ = ask("PUT", session, Content_Range="bytes */6")
    assert (status, headers["Range"]) == (308, "bytes=0-2")
    status, _, content = ask("PUT", session, b"ues", Content_Range="bytes 3-5/6")
    assert (status, json.loads(content)["size"]) == (200, "6")
    assert ask("GET", "/a?alt=media")[2] == b"values"


def test_a_multipart_upload(ask: Any) -> None:
    parts = (
        b'--x\r\nContent-Type: application/json\r\n\r\n{"name": "a"}\r\n'
        b"--x\r\nContent-Type: text/plain\r\n\r\none\r\n\r\ntwo\r\n--x--"
    )
    status, _, content = ask(
        "POST", "?uploadType=multipart", parts, Content_Type="multipart/related; boundary=x"
    )
    assert (status, json.loads(content)["contentType"]) == (200, "text/plain")
    assert ask("GET", "/a?alt=media")[2] == b"one\r\n\r\ntwo"
