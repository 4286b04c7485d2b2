"""Downloads a file over HTTP, complete and verified, or not at all."""

import base64
import hashlib
import logging
import re
import socket
import ssl
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from vit_jax.console import watched
from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files.network import cause_of, check_reachable, within
from vit_jax.files.paths import sync
from vit_jax.pretrained.arrays import looks_like_a_page
from vit_jax.wording import unsigned

ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled before each later one
SILENCE = 30.0  # seconds without a byte
# Seconds, and the bytes that must arrive in them.
WINDOW, LEAST = 60.0, 16 << 10
LARGEST = 64 * 2**30  # bytes, if the size is not known beforehand


def download(
    url: str, destination: Path, *, size: tuple[int, int] | None = None, sha256: str = ""
) -> Path:
    """Downloads a file unless it exists, and returns its path; UserError on failure.

    Several processes may do so at once: each writes its own file and renames it when complete.
    `size` is the minimum and maximum in bytes (None: from 1 to 64 GiB), `sha256` hex or a prefix of
    it. The MD5 that Google's servers send is always checked.
    """
    low, high = size or (1, LARGEST)
    try:
        if destination.is_file() and low <= destination.stat().st_size <= high:
            return destination
        logging.info("Downloading %s to %s.", unsigned(url), destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".part-") as folder:
            path = Path(folder) / destination.name
            _fetch_with_retries(url, path, low, high, sha256.lower())
            sync(path)
            path.replace(destination)
    except OSError as error:
        text = f"cannot write to {destination.parent} ({error.strerror}); make room, or set "
        raise as_user_error(f"{text}VIT_JAX_CACHE to another folder.", error) from error
    return destination


def _fetch_with_retries(url: str, *arguments: Any) -> None:
    """Calls `_fetch`, several times if needed; UserError if all attempts fail."""
    shown = unsigned(url)
    check_reachable(shown, urllib.parse.urljoin(url, "/"))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _fetch(url, *arguments)
        except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError) as error:
            cause = cause_of(error)
            reason = f"the connection failed ({one_line(cause)})"
            is_transient = not isinstance(cause, ssl.SSLCertVerificationError | socket.gaierror)
            is_transient = is_transient and "Tunnel connection failed: 4" not in str(cause)
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                reason = f"the server returned {error.code} {' '.join(error.msg.split()):.80}"
                is_transient = error.code in (408, 429) or error.code >= 500
            if not is_transient or attempt == ATTEMPTS:
                hint = "copy the file another way (`gcloud storage cp`) and use its path."
                ways = f"check the address, the network, HTTPS_PROXY and SSL_CERT_FILE, or {hint}"
                raise UserError(f"{shown}: {reason}, attempt {attempt}; {ways}") from error
            logging.warning("%s: %s; retrying.", shown, reason)
            time.sleep(PAUSE * 2 ** (attempt - 1))


def _read(response: Any) -> bytes:
    """Part of the content; ConnectionError for what must not be taken for a full disk."""
    try:
        return response.read1(1 << 20)
    except OSError as error:
        raise ConnectionError(one_line(error)) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to http, where anybody may answer."""

    def redirect_request(self, request: Any, *args: Any) -> Any:
        address = args[-1]
        if urllib.parse.urlsplit(address).scheme not in ("https", request.type):
            raise UserError(f"{unsigned(request.full_url)}: it redirects to {unsigned(address)}.")
        return super().redirect_request(request, *args)


def _fetch(url: str, path: Path, low: int, high: int, sha256: str) -> None:
    """Writes `path`, in one attempt; UserError if the content is not as expected."""
    shown = unsigned(url)
    headers = {"User-Agent": "vit_jax", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers)
    digests = {"sha256": hashlib.sha256(), "md5": hashlib.md5()}
    opener = urllib.request.build_opener(_Redirects())  # a global one would keep the first proxy
    answer = within(WINDOW, lambda: opener.open(request, timeout=SILENCE))
    with answer as response, open(path, "wb") as file:
        total = response.length
        if total is not None and not low <= total <= high:
            raise UserError(f"{shown} has {total:,} bytes instead of {low:,} to {high:,}.")
        began, before = time.monotonic(), 0
        with watched(None, "B", total, unit_scale=True) as bar:
            while chunk := _read(response):
                bar.update(file.write(chunk))
                for digest in digests.values():
                    digest.update(chunk)
                if file.tell() > high:
                    raise UserError(f"{shown} has more than {high:,} bytes; discarded.")
                if time.monotonic() - began > WINDOW:
                    if file.tell() < before + LEAST:
                        raise UserError(f"{shown}: under {LEAST} bytes in {WINDOW:g} s; given up.")
                    began, before = time.monotonic(), file.tell()
        if total is not None and file.tell() < total:
            raise ConnectionError(f"{file.tell():,} of {total:,} bytes")
        wrong = "" if file.tell() >= low else "it is too short"
    md5 = re.search(r"md5=([A-Za-z0-9+/]{22}==)", f"{response.headers.get_all('x-goog-hash')}")
    expected = {"sha256": sha256, "md5": base64.b64decode(md5[1]).hex() if md5 else ""}
    for name, digest in digests.items():
        if not digest.hexdigest().startswith(expected[name]):
            wrong = f"its {name} is {digest.hexdigest()} instead of {expected[name]}"
    with open(path, "rb") as file:
        if looks_like_a_page(file.read(4096)):
            wrong = "it is a web page"
    if wrong:
        raise UserError(f"{shown}: {wrong}; discarded.")
