"""Coordination of all processes of a run: work done by one for all, and stopping on request.

A request to stop is SIGTERM (SLURM, Kubernetes, a spot machine) or Google Cloud's maintenance
notice. All processes see it at the same update; then the loop saves and exits with status 75.
"""

import http.client
import itertools
import logging
import os
import pickle
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import UserError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def run_on_first_process(function: Callable[[], T]) -> T:
    """Runs `function` on process 0 and passes its result, or its error, to every process.

    Every process must call it. A UserError and an OSError are raised everywhere; any other error
    becomes a RuntimeError on the others, so that none waits for a process that has stopped.
    """
    if jax.process_count() == 1:
        return function()
    result: Any = None
    failure: Exception | None = None
    error_for_others: Exception | None = None
    if jax.process_index() == 0:
        try:
            result = function()
        except Exception as error:
            failure = error_for_others = error
            if isinstance(error, OSError):
                reason = f"{error.strerror} (on process 0)"
                error_for_others = OSError(error.errno, reason, error.filename)
            elif not isinstance(error, UserError):
                error_for_others = RuntimeError(f"process 0 failed: {error!r}")
    # Every process must know the number of bytes to receive them.
    content = np.frombuffer(pickle.dumps((result, error_for_others)), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    buffer = content if jax.process_index() == 0 else np.zeros(size, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8)
    result, error_for_others = pickle.loads(received.tobytes())
    if failure or error_for_others:
        raise failure or error_for_others
    return result


_PRODUCT = Path("/sys/class/dmi/id/product_name")
# Metadata of a Google Cloud machine: the keys to poll, and the value that means no.
_METADATA = {"maintenance-event": "NONE", "preempted": "FALSE"}
_POLL_SECONDS = 2.0
_CALLS = itertools.count(1)  # of `reached`, in this process


class PreemptionNotice:
    """Whether this run was asked to stop; a context manager, on the main thread of every process.

    With several processes JAX's preemption service handles SIGTERM and picks the step to stop at.
    """

    def __init__(self) -> None:
        self._reached = False
        self._interrupted = False
        self._previous: dict[int, Any] = {}  # handlers by signal
        self._done = threading.Event()

    def reached(self) -> bool:
        """True in all processes from the same call on, soon after one of them was asked to stop.

        Raises the KeyboardInterrupt of Ctrl-C again, which JAX drops when it calls from C++.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        if jax.process_count() > 1 and not self._reached:
            self._reached = multihost_utils.reached_preemption_sync_point(next(_CALLS))
        return self._reached

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if jax.process_count() == 1:
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        if server := metadata_server():
            threading.Thread(target=self._poll_metadata, args=(server,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self._reached = True

    def _on_interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _poll_metadata(self, server: str) -> None:
        """Turns a notice from the machine's host into the signal."""
        at_start = {key: read_metadata(server, key) for key in _METADATA}
        while not self._done.wait(_POLL_SECONDS):
            for key, no in _METADATA.items():
                value = read_metadata(server, key)
                # An earlier notice has already had its checkpoint.
                if value not in (None, no, at_start[key]):
                    _LOG.warning("The machine's %s is %s: stopping.", key, value)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return


def metadata_server() -> str:
    """host[:port] of the Google Cloud metadata server; "" on other machines."""
    is_google = _PRODUCT.exists() and "Google" in _PRODUCT.read_text()
    default = "metadata.google.internal" if is_google else ""
    return os.environ.get("GCE_METADATA_HOST", default)  # as in Google's own libraries


def read_metadata(server: str, key: str) -> str | None:
    """Value of an instance's metadata; None if unset or if the server does not respond."""
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with without_proxy.open(request, timeout=5) as response:
            return response.read().decode().strip()
    except (OSError, http.client.HTTPException, ValueError):
        return None
