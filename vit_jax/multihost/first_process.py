"""Work that one process does for all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import PassingError, UserError

T = TypeVar("T")


def run_on_first_process(function: Callable[[], T]) -> T:
    """Runs `function` on process 0 and gives its result, or its error, to every process.

    Every process must call it. The result has to survive JSON. A UserError and an OSError are
    raised with the same text everywhere; any other error is raised on process 0, and as a
    RuntimeError on the others, so that nobody waits for a process that has stopped.
    """
    if jax.process_count() == 1:
        return function()
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            outcome = {"result": function()}
        except UserError as error:
            failure = error
            outcome = {"user_error": str(error), "passing": isinstance(error, PassingError)}
        except OSError as error:
            failure = error
            outcome = {"os_error": [error.errno, f"{error.strerror} (on process 0)"]}
            outcome["os_error"] += [] if error.filename is None else [os.fsdecode(error.filename)]
        except Exception as error:
            failure = error
            outcome = {"error": f"process 0 failed: {error!r}"}
    outcome = json.loads(_broadcast(json.dumps(outcome)))
    if failure is not None:
        raise failure
    if "user_error" in outcome:
        raise (PassingError if outcome["passing"] else UserError)(outcome["user_error"])
    if "os_error" in outcome:
        raise OSError(*outcome["os_error"])
    if "error" in outcome:
        raise RuntimeError(outcome["error"])
    return outcome["result"]


def _broadcast(text: str) -> str:
    """The text of process 0. Every process must know the size before it can receive."""
    sent = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(sent.size)))
    buffer = sent if jax.process_index() == 0 else np.zeros(size, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
    return received.astype(np.uint8).tobytes().decode()
