"""The emulated bucket does what the lock of a run rests on, as the JSON API's reference says.

https://cloud.google.com/storage/docs/request-preconditions. Reads, lists and uploads are those
that gcsfs, TensorStore and array_record understand: the tests of runs in a bucket.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.error
import urllib.request

from tests.gcs_emulator import Server


def test_preconditions(bucket: str, bucket_server: Server) -> None:
    """0 stands for no object; a change that does not hold is 412, a read of the same is 304."""
    place = f"storage/v1/b/{bucket.removeprefix('gs://')}/o"

    def ask(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        upload = "upload/" if method == "POST" else ""
        address = f"{bucket_server.url}/{upload}{place}{path}"
        request = urllib.request.Request(address, body or None, method=method)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    put = "?uploadType=media&name=a/b&ifGenerationMatch="
    status, content = ask("POST", f"{put}0", b"values")
    resource = json.loads(content)
    assert status == 200
    # Numbers of 64 bits are strings, hashes are base64.
    assert resource["size"] == "6"
    assert base64.b64decode(resource["md5Hash"]) == hashlib.md5(b"values").digest()
    assert json.loads(ask("GET", "/a%2Fb")[1]) == resource
    generation = int(resource["generation"])
    assert ask("POST", f"{put}0", b"2")[0] == 412
    assert ask("POST", f"{put}{generation + 1}", b"2")[0] == 412
    assert ask("GET", f"/a%2Fb?alt=media&ifGenerationNotMatch={generation}") == (304, b"")
    assert ask("GET", f"/a%2Fb?ifGenerationMatch={generation + 1}")[0] == 412
    status, content = ask("POST", f"{put}{generation}", b"2")
    assert status == 200
    assert int(json.loads(content)["generation"]) > generation
    assert ask("DELETE", f"/a%2Fb?ifGenerationMatch={generation}")[0] == 412
    assert ask("DELETE", "/a%2Fb")[0] == 204
    assert ask("DELETE", "/a%2Fb")[0] == 404
