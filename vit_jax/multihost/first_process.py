"""Work that one process does for all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import UserError

T = TypeVar("T")


def run_on_first_process(function: Callable[[], T]) -> T:
    """Runs `function` on process 0 and gives its result, or its error, to every process.

    Every process must call it. A UserError and an OSError are raised everywhere, the latter with
    "(on process 0)"; any other error is raised on process 0, and as a RuntimeError on the others,
    so that nobody waits for a process that has stopped.
    """
    if jax.process_count() == 1:
        return function()
    outcome: tuple[Any, Exception | None] = None, None
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            outcome = function(), None
        except Exception as error:
            outcome, failure = (None, _for_others(error)), error
    result, remote_failure = pickle.loads(_broadcast(pickle.dumps(outcome)))
    if failure or remote_failure:
        raise failure or remote_failure
    return result


def _for_others(error: Exception) -> Exception:
    """What the other processes raise."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror} (on process 0)", error.filename)
    return RuntimeError(f"process 0 failed: {error!r}")


def _broadcast(content: bytes) -> bytes:
    """The bytes of process 0. Every process must know their number before it can receive them."""
    sent = np.frombuffer(content, np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(sent.size)))
    buffer = sent if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8).tobytes()
