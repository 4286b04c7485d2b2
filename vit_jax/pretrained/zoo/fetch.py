"""One attempt at the bytes of a file, from where the last attempt ended."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import shutil
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.pretrained.zoo.download_bar import Bar, mebibytes
from vit_jax.pretrained.zoo.remote_file import (
    RemoteFile,
    forget,
    http_address,
    remember,
    remembered,
)

_CHUNK = 2**20


class TryAgain(Exception):
    """A fault that may pass.

    `pause` is what the server asked for, in seconds; `advice` is what to do if it does not pass.
    """

    def __init__(self, reason: str, *, pause: float | None = None, advice: str = ""):
        super().__init__(reason)
        self.pause = pause
        self.advice = advice


def fetch(
    url: str, part: BufferedRandom, size: tuple[int, int] | None, timeout: float
) -> RemoteFile:
    """Appends to `part` what it lacks of the file, or starts anew where that is not possible.

    Args: as of `download`; `part` is open for appending.

    Raises:
      TryAgain: the file is not complete, and another attempt may help.
      UserError: it cannot be had.
    """
    address = http_address(url)
    known = remembered(Path(part.name), address)
    if known is None or not known.validator or (known.length or 0) < length_of(part):
        empty(part)
        known = None
    if known is not None and known.length == length_of(part):
        return known  # the process was killed before it could look
    headers = {"User-Agent": "vit_jax"}
    if known is not None and length_of(part):
        headers |= {"Range": f"bytes={length_of(part)}-", "If-Range": known.validator}
    with _answer(url, urllib.request.Request(address, headers=headers), part, timeout) as response:
        remote = RemoteFile.of(response)
        if response.status == 206:
            if known is None or not known.continues_with(remote, at=length_of(part)):
                raise _changed(part)
            remote = known
        else:
            empty(part)
            if size and remote.length is not None and not size[0] <= remote.length <= size[1]:
                raise UserError(
                    f"{url} has {remote.length} bytes and should have {between(size)}; it is not "
                    "the file that the zoo describes."
                )
            remember(Path(part.name), address, remote)
        if remote.length is not None and remote.length - length_of(part) > _free(part):
            raise UserError(_no_space(url, part, remote))
        _copy(url, response, part, remote)
    return remote


def _changed(part: BufferedRandom) -> TryAgain:
    empty(part)
    return TryAgain("the file has changed on the server", pause=0.0)


@contextlib.contextmanager
def _answer(
    url: str, request: urllib.request.Request, part: BufferedRandom, timeout: float
) -> Iterator[http.client.HTTPResponse]:
    """The server's answer, once it has said that it sends the file."""
    host = urllib.parse.urlsplit(request.full_url).hostname
    try:
        # A new opener looks at the proxies in the environment anew.
        response = urllib.request.build_opener().open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # what we have is no part of what the server has
                raise _changed(part) from None
            if error.code in (408, 429) or error.code >= 500:
                pause = error.headers.get("Retry-After", "")
                seconds = float(pause) if pause.isdecimal() else None
                raise TryAgain(
                    f"the server says {error.code} {error.reason}", pause=seconds
                ) from None
            raise UserError(_refused(url, error.code, error.reason)) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise UserError(
                f"{url}: the certificate of {host} is not trusted ({reason.verify_message}); "
                "behind a proxy that inspects traffic set SSL_CERT_FILE to its certificate."
            ) from error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise TryAgain(
            f"no connection to {host} ({text})",
            advice=" Check the network, and HTTPS_PROXY if there is a proxy; or fetch the file "
            "elsewhere and give its path.",
        ) from error
    with response:
        yield response


def _refused(url: str, code: int, reason: str) -> str:
    if code in (404, 410):
        return f"{url} does not exist ({code} {reason})."
    if code in (401, 403) and url.startswith("gs://"):
        return (
            f"{url} may not be read without credentials ({code} {reason}); if you have access, "
            f"copy it with `gcloud storage cp {url} .` and give the path of the file."
        )
    return f"{url}: the server refuses it ({code} {reason})."


def _copy(
    url: str, response: http.client.HTTPResponse, part: BufferedRandom, remote: RemoteFile
) -> None:
    with Bar(url.rpartition("/")[2], have=length_of(part), length=remote.length) as bar:
        while True:
            try:
                chunk = response.read1(_CHUNK)
            except (http.client.HTTPException, OSError) as error:
                text = str(error) or type(error).__name__
                raise TryAgain(f"the connection broke ({text})") from error
            if not chunk:
                break
            try:
                part.write(chunk)
                part.flush()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise UserError(_no_space(url, part, remote)) from error
            bar.add(len(chunk))
    if remote.length is not None and length_of(part) < remote.length:
        raise TryAgain(f"the connection broke after {length_of(part)} of {remote.length} bytes")


def _free(part: BufferedRandom) -> int:
    return shutil.disk_usage(Path(part.name).parent).free


def _no_space(url: str, part: BufferedRandom, remote: RemoteFile) -> str:
    need = "" if remote.length is None else f" of {mebibytes(remote.length)}"
    return (
        f"the disk is full: {url}{need} does not fit into {Path(part.name).parent} "
        f"({mebibytes(_free(part))} free); make room, or set VIT_JAX_CACHE to a folder on another "
        "disk."
    )


def between(size: tuple[int, int]) -> str:
    return f"{size[0]}" if size[0] == size[1] else f"{size[0]} to {size[1]}"


def length_of(file: BufferedRandom) -> int:
    return os.fstat(file.fileno()).st_size


def empty(file: BufferedRandom) -> None:
    forget(Path(file.name))
    file.truncate(0)
