"""Downloads: a file over HTTP, whole and verified, or not at all.

Bytes go to NAME.part, which becomes NAME once its size and hashes are right. NAME.part.version
holds what the server calls this version of the file (its ETag or its date): a later attempt, of
this process or another, asks for the rest of that version only (RFC 9110, section 13.1.5). Of
several processes that want a file one downloads it while the others wait.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import http.client
import logging
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from io import BufferedRandom
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vit_jax.errors import UserError, as_user_error

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 7  # with pauses of 1, 2, 4, ... seconds
_TIMEOUT = 30.0  # seconds without a byte
_SLOWEST = 4096  # bytes per second, after four timeouts
_LARGEST = 64 * 2**30  # bytes, where the size is not known beforehand


class _TryAgainError(Exception):
    """A fault that may pass."""


class _NoFtp(urllib.request.FTPHandler):
    def ftp_open(self, _: urllib.request.Request) -> Any:
        raise urllib.error.URLError("it redirects to FTP")


def download(
    url: str,
    destination: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    sha256: str = "",
) -> Path:
    """Downloads a file, unless it is there, and returns its path.

    Args:
      url: https:// or http://. Proxies are those of the environment.
      destination: path of the file; folders are made.
      size: least and most bytes it may have; None: from 1 to 64 GiB.
      sha256: in hex; the beginning is enough. "" checks nothing. The MD5 that Google's servers
        send (x-goog-hash) is always checked.

    Raises:
      UserError: no such file, no permission, no network, no space, or not the file that was asked
        for; the message says which. What a broken connection left is continued by the next call.
    """
    destination = Path(destination)
    path = destination.with_name(destination.name + ".part")
    low, high = size or (1, _LARGEST)
    try:
        while not (destination.is_file() and low <= destination.stat().st_size <= high):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b") as part:
                _lock(part)
                if not _is_at(path, part):
                    continue  # whoever held it before has renamed or removed it
                try:
                    _LOG.info("Downloading %s to %s.", url, destination)
                    md5 = _complete(part, url, low, high)
                    _verify(part, url, low, {"sha256": sha256.lower(), "md5": md5})
                    os.fsync(part.fileno())
                    os.replace(path, destination)
                    _version(part).unlink(missing_ok=True)
                finally:
                    if not _length(part):
                        _version(part).unlink(missing_ok=True)
                        path.unlink(missing_ok=True)
    except OSError as error:
        text = f"cannot write to {path.parent} ({error.strerror}); make room, or set VIT_JAX_CACHE"
        raise as_user_error(f"{text} to another folder.", error) from error
    return destination


def _lock(part: BufferedRandom) -> None:
    """The kernel drops the lock when the file is closed or the process dies."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _LOG.info("Another process is downloading %s; waiting for it.", part.name)
        fcntl.flock(part, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems cannot
        _LOG.warning("%s cannot be locked (%s).", part.name, error.strerror)


def _is_at(path: Path, part: BufferedRandom) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(part.fileno()))
    except FileNotFoundError:
        return False


def _length(part: BufferedRandom) -> int:
    return os.fstat(part.fileno()).st_size


def _version(part: BufferedRandom) -> Path:
    return Path(f"{part.name}.version")


def _complete(part: BufferedRandom, url: str, low: int, high: int) -> str:
    """Downloads what `part` lacks, in several attempts if need be; returns as `_attempt`."""
    faults = 0
    while True:
        try:
            return _attempt(part, url, low, high)
        except _TryAgainError as error:
            faults += 1
            if faults == _ATTEMPTS:
                have = _length(part)
                raise UserError(
                    f"{url}: gave up after {faults} attempts: {error}. Check the network, "
                    "HTTPS_PROXY and SSL_CERT_FILE, or copy the file by other means and give its "
                    f"path.{f' The same command continues at {have:,} bytes.' if have else ''}"
                ) from error.__cause__
            _LOG.warning("%s: %s; again in %d s.", url, error, 2 ** (faults - 1))
            time.sleep(2 ** (faults - 1))


def _attempt(part: BufferedRandom, url: str, low: int, high: int) -> str:
    """Appends to `part` what it lacks, or starts anew where the server cannot continue.

    Returns the file's MD5 in hex, "" where the server does not send it.
    """
    version, have = _version(part), _length(part)
    known = version.read_text(errors="replace") if have and version.exists() else ""
    known = known if known.isascii() and known.isprintable() else ""  # a damaged file
    start = have - 1 if known else 0  # one byte again, so that there is always one to ask for
    condition = {"Range": f"bytes={start}-", "If-Range": known} if known else {}
    request = urllib.request.Request(url, headers={"User-Agent": "vit_jax", **condition})
    with _open(part, request) as response:
        headers, total = response.headers, response.length
        found = headers.get("ETag", "")
        if not found.startswith('"'):  # a weak one is not of these very bytes
            found = headers.get("Last-Modified", "")
        if response.status == 206:
            sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
            if sent is None or int(sent[1]) != start or found not in ("", known):
                raise _changed(part)
            total = int(sent[2])
        else:
            start = 0
            version.write_text(found)
        part.truncate(start)
        if total is not None and not low <= total <= high:
            raise UserError(f"{url} has {total:,} bytes and should have {low:,} to {high:,}.")
        compressed = headers.get("Content-Encoding", "identity") != "identity"
        if compressed or (total is None and not response.chunked):
            raise UserError(f"{url}: the answer is compressed or of unknown length; give a path.")
        room = start + shutil.disk_usage(Path(part.name).parent).free
        if total is not None and total > room:
            raise OSError(errno.ENOSPC, f"no space for the {total:,} bytes of {url}")
        _copy(part, response, total, min(high, room))
    hashes = re.search(r"md5=([A-Za-z0-9+/]{22}==)", str(headers.get_all("x-goog-hash")))
    return base64.b64decode(hashes[1]).hex() if hashes else ""


def _changed(part: BufferedRandom) -> _TryAgainError:
    part.truncate(0)
    return _TryAgainError("the file has changed on the server")


def _open(part: BufferedRandom, request: urllib.request.Request) -> http.client.HTTPResponse:
    try:
        # A new opener reads the proxies of the environment anew.
        return urllib.request.build_opener(_NoFtp).open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            answer = f"the server answers {error.code} {_reason(error)}"
        if error.code == 416:
            raise _changed(part) from None
        if error.code in (408, 429) or error.code >= 500:
            raise _TryAgainError(answer) from None
        raise UserError(
            f"{request.full_url}: {answer}; check the address, or if it asks for a login, copy the "
            "file by other means (`gcloud storage cp`) and give its path."
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise UserError(
                f"{request.full_url}: the certificate of {request.host} is not trusted "
                f"({reason.verify_message}); set SSL_CERT_FILE to the one of your proxy, or "
                "copy the file by other means and give its path."
            ) from error
        raise _TryAgainError(f"no connection to {request.host} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """One line."""
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(text.split())


def _copy(
    part: BufferedRandom, response: http.client.HTTPResponse, total: int | None, limit: int
) -> None:
    start, began = _length(part), time.monotonic()
    # disable=None: on terminals only.
    with tqdm(initial=start, total=total, unit="B", unit_scale=True, disable=None) as bar:
        while True:
            try:
                chunk = response.read1(2**20)
            except (http.client.HTTPException, OSError) as error:
                raise _TryAgainError(f"the connection broke ({_reason(error)})") from error
            if not chunk:
                break
            part.write(chunk)
            part.flush()
            bar.update(len(chunk))
            length, seconds = _length(part), time.monotonic() - began
            if length > limit:
                part.truncate(0)
                raise UserError(f"{response.url} has more than {limit:,} bytes; it is not kept.")
            if seconds > 4 * _TIMEOUT and length - start < seconds * _SLOWEST:
                raise _TryAgainError(f"the server sends less than {_SLOWEST} bytes per second")
    if total is not None and _length(part) < total:
        raise _TryAgainError(f"the connection broke after {_length(part)} of {total} bytes")


def _verify(part: BufferedRandom, url: str, low: int, hashes: dict[str, str]) -> None:
    part.seek(0)
    is_page = part.read(512).lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml"))
    wrong = "it is a web page" if is_page else "" if _length(part) >= low else "it is too short"
    for name, wanted in hashes.items():
        part.seek(0)
        if wanted and not (found := hashlib.file_digest(part, name).hexdigest()).startswith(wanted):
            wrong = f"its {name} is {found} and should be {wanted}"
    if wrong:
        part.truncate(0)
        raise UserError(f"{url}: {wrong}; the file is not kept.")
