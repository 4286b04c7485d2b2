"""Downloads a file over HTTP, complete and verified, or not at all."""

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
from typing import Any

from tqdm import tqdm

from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files.paths import sync

ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled before each later one
DEADLINE = 3600.0  # seconds for one attempt, from DNS lookup to the last byte
SILENCE = 30.0  # seconds without a byte
LARGEST = 64 * 2**30  # bytes, if the size is not known beforehand


def download(
    url: str,
    destination: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    sha256: str = "",
) -> Path:
    """Downloads a file unless it exists, and returns its path; UserError on failure.

    Several processes may do so at once: each writes its own file and renames it when complete.

    Args:
      url: https:// or http://. Proxies are taken from the environment.
      destination: path of the file; folders are created.
      size: minimum and maximum bytes; None: from 1 to 64 GiB.
      sha256: in hex; a prefix is enough. The MD5 that Google's servers send is always checked.
    """
    destination, (low, high) = Path(destination), size or (1, LARGEST)
    try:
        if destination.is_file() and low <= destination.stat().st_size <= high:
            return destination
        logging.info("Downloading %s to %s.", _bare_url(url), destination)
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


def _bare_url(url: str) -> str:
    """Without the query, which may hold a signature."""
    return url.partition("?")[0]


def _fetch_with_retries(url: str, *arguments: Any) -> None:
    """Calls `_fetch`, several times if needed; UserError if all attempts fail."""
    import aiohttp
    from fsspec.asyn import get_loop

    shown = _bare_url(url)
    hint = "copy the file another way (`gcloud storage cp`) and use its path."
    for attempt in range(1, ATTEMPTS + 1):
        # On fsspec's thread: a notebook already runs a loop on this one.
        future = asyncio.run_coroutine_threadsafe(_fetch(url, *arguments), get_loop())
        try:
            return future.result()
        except aiohttp.ClientError as error:
            reason = f"the connection failed ({one_line(error)})"
            is_transient = not isinstance(error, aiohttp.ClientConnectorCertificateError)
            if isinstance(error, aiohttp.TooManyRedirects):
                reason = "too many redirects"
                is_transient = False
            elif isinstance(error, aiohttp.ClientResponseError):
                reason = f"the server returned {error.status} {' '.join(error.message.split()):.80}"
                is_transient = error.status in (408, 429) or error.status >= 500
            if not is_transient or attempt == ATTEMPTS:
                raise UserError(
                    f"{shown}: {reason}, attempt {attempt}; check the address, the network, "
                    f"HTTPS_PROXY and SSL_CERT_FILE, or {hint}"
                ) from error
            logging.warning("%s: %s; retrying.", shown, reason, extra={"urgent": True})
            time.sleep(PAUSE * 2 ** (attempt - 1))
        except TimeoutError as error:
            raise UserError(f"{shown}: incomplete after {DEADLINE:g} s; {hint}") from error
        finally:
            future.cancel()  # also by Ctrl-C


async def _fetch(url: str, path: Path, low: int, high: int, sha256: str) -> None:
    """Writes `path`, in one attempt; UserError if the content is not as expected."""
    import aiohttp

    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=DEADLINE, sock_connect=SILENCE, sock_read=SILENCE),
        headers={"User-Agent": "vit_jax", "Accept-Encoding": "identity"},
        trust_env=True,
        raise_for_status=True,
    )
    digests = {"sha256": hashlib.sha256(), "md5": hashlib.md5()}
    async with session, session.get(url) as response:
        total = response.content_length
        if total is not None and not low <= total <= high:
            raise UserError(f"{_bare_url(url)} has {total:,} bytes instead of {low:,} to {high:,}.")
        # disable=None: on terminals only.
        bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)
        with bar, open(path, "wb") as file:
            async for chunk in response.content.iter_any():
                bar.update(file.write(chunk))
                for digest in digests.values():
                    digest.update(chunk)
                if file.tell() > high:
                    raise UserError(f"{_bare_url(url)} has more than {high:,} bytes; discarded.")
            wrong = "" if file.tell() >= low else "it is too short"
    hashes = ",".join(response.headers.getall("x-goog-hash", []))
    md5 = re.search(r"md5=([A-Za-z0-9+/]{22}==)", hashes)
    for name, wanted in {
        "sha256": sha256,
        "md5": base64.b64decode(md5[1]).hex() if md5 else "",
    }.items():
        if not (actual := digests[name].hexdigest()).startswith(wanted):
            wrong = f"its {name} is {actual} instead of {wanted}"
    with open(path, "rb") as file:
        if file.read(512).lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
            wrong = "it is a web page"
    if wrong:
        raise UserError(f"{_bare_url(url)}: {wrong}; discarded.")
