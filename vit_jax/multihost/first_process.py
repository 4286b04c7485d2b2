"""Work that one process does for all of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

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
    result: T | None = None
    failure: Exception | None = None
    told: Exception | None = None  # what the other processes raise
    if jax.process_index() == 0:
        try:
            result = function()
        except UserError as error:
            failure = told = error
        except OSError as error:
            failure = error
            name = None if error.filename is None else os.fsdecode(error.filename)
            told = OSError(error.errno, f"{error.strerror} (on process 0)", name)
        except Exception as error:
            failure, told = error, RuntimeError(f"process 0 failed: {error!r}")
    result, told = pickle.loads(_broadcast(pickle.dumps((result, told))))
    if failure or told:
        raise failure or told  # type: ignore[misc]
    return result  # type: ignore[return-value]


def _broadcast(content: bytes) -> bytes:
    """The bytes of process 0. Every process must know their number before it can receive them."""
    sent = np.frombuffer(content, np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(sent.size)))
    buffer = sent if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8).tobytes()
