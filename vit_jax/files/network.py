"""Whether a server answers at all, in seconds: looking up a name has no timeout, clients retry."""

import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from http.client import HTTPException
from typing import Any

from vit_jax.errors import TransientError, one_line

PATIENCE = 8.0  # seconds for an answer
PAUSE = 1.0  # seconds before the second and last attempt
_answered: set[str] = set()  # servers that have


def check_reachable(what: str, server: str) -> None:
    """Raises TransientError if nothing answers at the address of the server that `what` is on."""
    if server in _answered or "all" in urllib.request.getproxies():  # SOCKS: only clients know it
        return
    for pause in (0.0, PAUSE):
        time.sleep(pause)
        try:
            problem = within(PATIENCE, lambda: _problem(server))
        except TimeoutError:
            problem = TimeoutError(f"no answer within {PATIENCE:g} s")
        if problem is None:
            _answered.add(server)
            return
        if isinstance(problem, socket.gaierror):  # there is no such host
            break
    raise TransientError(
        f"{what}: {server} cannot be reached ({one_line(problem)}); check the address, the network "
        "and HTTPS_PROXY, or use a local copy."
    )


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of `call`; TimeoutError if it takes longer: names and headers have no limit."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    def discard(late: Future[Any]) -> None:
        if late.exception() is None and hasattr(late.result(), "close"):
            late.result().close()

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if not result.done():  # else it is what the call raised
            result.add_done_callback(discard)
        raise


def _problem(server: str) -> Exception | None:
    """Why there is no server, or no way to it; None if one answers, whatever it says."""
    request = urllib.request.Request(server, method="HEAD")
    try:  # not urlopen, which would keep the first proxy
        urllib.request.build_opener().open(request).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (urllib.error.URLError, TimeoutError) as error:
        cause = cause_of(error)
        return None if isinstance(cause, ssl.SSLError) else cause
    except (OSError, HTTPException):
        pass
    return None


def cause_of(error: Exception) -> Exception:
    """What urllib has wrapped."""
    cause = getattr(error, "reason", error)
    return cause if isinstance(cause, Exception) else error
