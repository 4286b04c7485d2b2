"""Downloads: a file over HTTP, whole and verified, or not at all."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import re
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files.paths import sync

ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled before each later one
DEADLINE = 3600.0  # seconds for one attempt, from looking up the host to the last byte
SILENCE = 30.0  # seconds without a byte
LARGEST = 64 * 2**30  # bytes, where the size is not known beforehand


def download(
    url: str,
    destination: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    sha256: str = "",
) -> Path:
    """Downloads a file, unless it is there, and returns its path.

    Several processes may do so at the same time: each has a file of its own, renamed when whole.

    Args:
      url: https:// or http://. Proxies are those of the environment.
      destination: path of the file; folders are made.
      size: least and most bytes it may have; None: from 1 to 64 GiB.
      sha256: in hex; the beginning is enough. "" checks nothing. The MD5 that Google's servers
        send (x-goog-hash) is always checked.

    Raises:
      UserError: no such file, no permission, no network, no space, or not the file that was asked
        for; the message says which.
    """
    destination, (low, high) = Path(destination), size or (1, LARGEST)
    if destination.is_file() and low <= destination.stat().st_size <= high:
        return destination
    logging.info("Downloading %s to %s.", url, destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".part-") as folder:
            path = Path(folder) / destination.name
            md5 = _fetch_patiently(url, path, low, high)
            _verify(path, url, low, {"sha256": sha256.lower(), "md5": md5})
            sync(path)
            path.replace(destination)
    except OSError as error:
        text = f"cannot write to {destination.parent} ({error.strerror}); make room, or set "
        raise as_user_error(f"{text}VIT_JAX_CACHE to another folder.", error) from error
    return destination


def _fetch_patiently(url: str, path: Path, low: int, high: int) -> str:
    """As `_fetch`, in several attempts if need be; UserError where they fail."""
    import aiohttp
    from fsspec.asyn import get_loop

    way_out = "copy the file by other means (`gcloud storage cp`) and give its path."
    for attempt in range(1, ATTEMPTS + 1):
        # On fsspec's thread: a notebook has a loop of its own running on this one.
        future = asyncio.run_coroutine_threadsafe(_fetch(url, path, low, high), get_loop())
        try:
            return future.result()
        except aiohttp.ClientError as error:
            reason = f"the connection failed ({one_line(error)})"
            permanent = (aiohttp.ClientConnectorCertificateError, aiohttp.RedirectClientError)
            may_pass = not isinstance(error, permanent)
            if isinstance(error, aiohttp.ClientResponseError):
                text = error.message or type(error).__name__
                reason = f"the server answers {error.status} {text}"
                may_pass = error.status in (408, 429) or error.status >= 500
            if not may_pass or attempt == ATTEMPTS:
                raise UserError(
                    f"{url}: {reason}, at attempt {attempt}; check the address, the network, "
                    f"HTTPS_PROXY and SSL_CERT_FILE, or {way_out}"
                ) from error
            logging.warning("%s: %s; trying again.", url, reason)
            time.sleep(PAUSE * 2 ** (attempt - 1))
        except TimeoutError as error:
            raise UserError(f"{url}: not complete after {DEADLINE:g} s; {way_out}") from error
        finally:
            future.cancel()  # also by Ctrl-C
    raise AssertionError("the last attempt returns or raises")


async def _fetch(url: str, path: Path, low: int, high: int) -> str:
    """Writes `path`, in one attempt; returns the MD5 in hex, "" where the server sends none."""
    import aiohttp

    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=DEADLINE, sock_connect=SILENCE, sock_read=SILENCE),
        headers={"User-Agent": "vit_jax", "Accept-Encoding": "identity"},
        trust_env=True,
        raise_for_status=True,
    )
    async with session, session.get(url) as response:
        total = response.content_length
        if total is None and "Transfer-Encoding" not in response.headers:
            raise UserError(f"{url}: the answer does not tell its length; give a path.")
        if total is not None and not low <= total <= high:
            raise UserError(f"{url} has {total:,} bytes and should have {low:,} to {high:,}.")
        # disable=None: on terminals only.
        bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)
        with bar, open(path, "wb") as file:
            async for chunk in response.content.iter_any():
                bar.update(file.write(chunk))
                if file.tell() > high:
                    raise UserError(f"{url} has more than {high:,} bytes; it is not kept.")
        hashes = ",".join(response.headers.getall("x-goog-hash", []))
        md5 = re.search(r"md5=([A-Za-z0-9+/]{22}==)", hashes)
        return base64.b64decode(md5[1]).hex() if md5 else ""


def _verify(path: Path, url: str, low: int, hashes: dict[str, str]) -> None:
    """Raises UserError where a file is not what was asked for."""
    with open(path, "rb") as file:
        begin = file.read(512).lstrip().lower()
        is_page = begin.startswith((b"<!doctype", b"<html", b"<?xml"))
        wrong = "it is a web page" if is_page else ""
        for name, wanted in hashes.items():
            file.seek(0)
            if wanted and not (found := hashlib.file_digest(file, name).hexdigest()).startswith(
                wanted
            ):
                wrong = f"its {name} is {found} and should be {wanted}"
    if path.stat().st_size < low:
        wrong = "it is too short"
    if wrong:
        raise UserError(f"{url}: {wrong}; the file is not kept.")
