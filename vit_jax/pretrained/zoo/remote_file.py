"""A file on a server: its address, and what the server says of it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import http.client
import json
import os
import re
import urllib.parse
from pathlib import Path

from vit_jax.errors import UserError

_GOOGLE = "https://storage.googleapis.com"


def http_address(url: str) -> str:
    """Where a gs:// object is read without credentials; https:// and http:// stay as they are.

    STORAGE_EMULATOR_HOST, the variable of Google's clients, puts another server in the place of
    Google's.

    Raises:
      UserError: none of these, or no file in it.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    if scheme not in ("gs", "https", "http") or not bucket or not name or name.endswith("/"):
        raise UserError(f"{url!r} is no address of a file, such as gs://BUCKET/NAME.")
    if scheme != "gs":
        return urllib.parse.quote(url, safe="%/:?&=+@,;~!$'()*[]")
    server = os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    if "://" not in server:
        server = f"http://{server}"
    return f"{server.rstrip('/')}/{bucket}/{urllib.parse.quote(name)}"


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """
    Attributes:
      length: bytes of the whole file, None if the server does not say.
      validator: strong ETag, or else the date of the last change; changes with the file. "" where
        the server gives neither, so that a part of the file cannot be continued.
      md5: in hex, "" if unknown.
      start: first byte that this answer sends.
    """

    length: int | None
    validator: str
    md5: str
    start: int = 0

    @classmethod
    def of(cls, response: http.client.HTTPResponse) -> RemoteFile:
        """Reads the headers of an answer, to a request for all or for the rest."""
        headers = response.headers
        etag = headers.get("ETag", "")
        validator = etag if etag.startswith('"') else headers.get("Last-Modified", "")
        length = headers.get("Content-Length", "")
        start, total = 0, int(length) if length.isdecimal() else None
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
            start = int(match[1]) if match else -1
            total = int(match[2]) if match and match[2] != "*" else None
        return cls(total, validator, _md5(headers.get_all("x-goog-hash") or []), start)

    def continues_with(self, rest: RemoteFile, *, at: int) -> bool:
        """Whether `rest` is the answer that goes on with this very file at byte `at`."""
        return (
            rest.start == at
            and rest.length in (None, self.length)
            and rest.validator in ("", self.validator)
        )


def _md5(values: list[str]) -> str:
    """Of `crc32c=..., md5=...`, in one header or several; base64 there, hex here."""
    for item in ",".join(values).split(","):
        name, _, value = item.strip().partition("=")
        if name == "md5":
            try:
                return base64.b64decode(value, validate=True).hex()
            except (binascii.Error, ValueError):
                return ""
    return ""


def _state(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def remember(part: Path, address: str, remote: RemoteFile) -> None:
    """Notes what the beginning in `part` is the beginning of."""
    content = {**dataclasses.asdict(remote), "address": address}
    _state(part).write_text(json.dumps(content) + "\n", encoding="utf-8")


def remembered(part: Path, address: str) -> RemoteFile | None:
    """The file that `part` is the beginning of; None where that is unknown or another address."""
    try:
        content = json.loads(_state(part).read_bytes())
        if content.pop("address") != address:
            return None
        return RemoteFile(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def forget(part: Path) -> None:
    _state(part).unlink(missing_ok=True)
