"""Whether a server answers at all, in seconds: looking up a name has no timeout, clients retry."""

from __future__ import annotations

import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException

from vit_jax.errors import TransientError, one_line

PATIENCE = 8.0  # seconds for an answer
PAUSE = 1.0  # seconds before the second and last attempt
_answered: set[str] = set()  # servers that have


def check_reachable(what: str, server: str) -> None:
    """Raises TransientError if nothing answers at the address of the server that `what` is on."""
    if server in _answered or "all" in urllib.request.getproxies():  # SOCKS: only clients know it
        return
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    for pause in (0.0, PAUSE):
        time.sleep(pause)
        threading.Thread(target=lambda: problems.put(_problem(server)), daemon=True).start()
        try:
            problem = problems.get(timeout=PATIENCE)
        except queue.Empty:
            problem = f"no answer within {PATIENCE:g} s"
        if not problem:
            _answered.add(server)
            return
    raise TransientError(
        f"{what}: {server} cannot be reached ({problem}); check the address, the network and "
        "HTTPS_PROXY, or use a local copy."
    )


def _problem(server: str) -> str:
    """Why there is no server, or no way to it; "" if one answers, whatever it says."""
    request = urllib.request.Request(server, method="HEAD")
    try:  # not urlopen, which would keep the first proxy
        urllib.request.build_opener().open(request).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (urllib.error.URLError, TimeoutError) as error:
        cause = cause_of(error)
        return "" if isinstance(cause, ssl.SSLError) else one_line(cause)
    except (OSError, HTTPException):
        pass
    return ""


def cause_of(error: Exception) -> Exception:
    """What urllib has wrapped."""
    cause = getattr(error, "reason", error)
    return cause if isinstance(cause, Exception) else error
