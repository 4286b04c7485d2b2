"""Whether a server answers at all, in seconds: looking up a name has no timeout, clients retry."""

from __future__ import annotations

import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from vit_jax.errors import TransientError, one_line

PATIENCE = 8.0  # seconds, for the head of an answer
PAUSE = 1.0  # seconds before the second and last attempt
_answered: set[str] = set()  # servers that have


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """`urlopen`, whose timeout is of each read; TimeoutError if it takes longer than PATIENCE."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    given_up = threading.Event()

    def ask() -> None:
        try:  # not urlopen, which would keep the first proxy
            answer = urllib.request.build_opener().open(request, timeout=timeout)
        except Exception as error:
            answer = error
        answers.put(answer)
        if given_up.is_set() and hasattr(answer, "close"):
            answer.close()

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE)
    except queue.Empty:
        given_up.set()
        raise TimeoutError(f"no answer within {PATIENCE:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def is_unanswered(error: BaseException) -> bool:
    """Whether an error of `open_url` means that no server, or no way to it, was found."""
    if isinstance(error, urllib.error.HTTPError):
        return False
    is_failure = isinstance(error, urllib.error.URLError | TimeoutError)
    return is_failure and not isinstance(getattr(error, "reason", None), ssl.SSLError)


def check_reachable(what: str, server: str) -> None:
    """Raises TransientError if nothing answers at the address of the server that `what` is on."""
    if server in _answered or "all" in urllib.request.getproxies():  # SOCKS: only clients know it
        return
    for pause in (PAUSE, 0.0):
        try:
            open_url(urllib.request.Request(server, method="HEAD"), PATIENCE).close()
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, HTTPException) as error:
            if is_unanswered(error):
                reason = one_line(cause_of(error))
                time.sleep(pause)
                continue
        _answered.add(server)
        return
    raise TransientError(
        f"{what}: {server} cannot be reached ({reason}); check the network and HTTPS_PROXY, or use "
        "a local copy."
    )


def cause_of(error: Exception) -> Exception:
    """What urllib has wrapped."""
    cause = getattr(error, "reason", error)
    return cause if isinstance(cause, Exception) else error
