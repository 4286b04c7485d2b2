"""How the processes of a run find each other: flags, or what the cluster says."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import warnings
from collections.abc import Callable
from typing import Any

from vit_jax.errors import UserError
from vit_jax.multihost import coordination, liveness
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

_LOG = logging.getLogger(__name__)
# JAX's own heartbeats speak up after ours, which can say more.
_JAX_HEARTBEAT_FACTOR = 3
# What JAX says, as a plain RuntimeError, when a pod or machine of a TPU run has no name yet.
_NOT_THERE_YET = ("Failed to recognize coordinator address", "Getting metadata")
_abort_handler: Any = None  # kept alive: C holds a pointer to it


class PeersMissingError(RuntimeError):
    """Not all processes arrived in time; starting again may help."""


def start_processes(
    *,
    distributed: str,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    arrival_timeout_seconds: int,
    heartbeat_timeout_seconds: float,
    step_timeout_seconds: float,
    start_timeout_seconds: float,
) -> None:
    """Joins the other processes of this run, if there are any, and begins to watch over them.

    Args:
      distributed: `auto` joins where the flags or a cluster that JAX knows (Cloud TPU, GKE, SLURM,
        Open MPI, Kubernetes jobs) say how; `on` insists on it; `off` runs alone.
      coordinator_address: host:port of process 0; with the next two, for processes that were
        started by hand.
      num_processes: of the run.
      process_id: this one's.
      arrival_timeout_seconds: how long to wait for all processes.
      heartbeat_timeout_seconds, step_timeout_seconds, start_timeout_seconds: see
        `watchdog.Watchdog`.

    Raises:
      UserError: flags that contradict each other, or `on` without a cluster.
      PeersMissingError: a process did not arrive.
    """
    _check_flags(distributed, coordinator_address, num_processes, process_id)
    timeouts = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "step_timeout_seconds": step_timeout_seconds,
        "start_timeout_seconds": start_timeout_seconds,
    }
    for key, value in {"arrival_timeout_seconds": arrival_timeout_seconds, **timeouts}.items():
        may_be_zero = key in ("step_timeout_seconds", "start_timeout_seconds")
        if not (0 < value < math.inf or (may_be_zero and value == 0)):
            or_zero = " or 0 (no limit)" if may_be_zero else ""
            raise UserError(f"processes.{key}={value} must be positive{or_zero}.")
    if distributed != "off":
        found = _initialize(
            arrival_timeout_seconds,
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
            heartbeat_timeout_seconds=int(_JAX_HEARTBEAT_FACTOR * heartbeat_timeout_seconds) + 10,
        )
        if distributed == "on" and not found:
            raise UserError(
                "--distributed=on, but no cluster was found that says who the other processes are "
                "(Cloud TPU, GKE, SLURM, Open MPI); give --coordinator_address, --num_processes "
                "and --process_id."
            )
    liveness.start(**timeouts)


def _check_flags(
    distributed: str, address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    values = {
        "--coordinator_address": address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    given = [flag for flag, value in values.items() if value is not None]
    if given and distributed == "off":
        raise UserError(f"--distributed=off and {given[0]} contradict each other; drop one.")
    if not given:
        return
    if address is None or num_processes is None or process_id is None:
        missing = next(flag for flag in values if flag not in given)
        raise UserError(f"{missing} is missing; give all three of {', '.join(values)}, or none.")
    if num_processes < 1:
        raise UserError(f"--num_processes={num_processes} must be at least 1.")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} must be from 0 to {num_processes - 1}.")
    if not address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address={address} is no HOST:PORT.")


def _initialize(arrival_timeout_seconds: int, **arguments: Any) -> bool:
    """Calls jax.distributed.initialize; whether a cluster was given or found.

    Raises:
      PeersMissingError: a process did not arrive.
    """
    import jax

    missing = (
        f"not all processes arrived within {arrival_timeout_seconds} s "
        "(config.processes.arrival_timeout_seconds); the log above may name those that are missing."
    )
    # Read only on CPU, where the default would not let processes talk to each other.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _explain_aborts(lambda: (f"error: {missing}\n", REQUEUE_EXIT_CODE))
    try:
        with warnings.catch_warnings():
            # JAX warns where it sees Kubernetes without the package that would tell it more.
            warnings.simplefilter("ignore")
            jax.distributed.initialize(initialization_timeout=arrival_timeout_seconds, **arguments)
    except ValueError as error:
        if arguments["coordinator_address"] is not None or "defined" not in str(error):
            raise
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        return False  # nothing was given and no cluster was found
    except (RuntimeError, OSError) as error:  # OSError: no metadata server answers
        plain = not isinstance(error, (jax.errors.JaxRuntimeError, OSError))
        if plain and not any(text in str(error) for text in _NOT_THERE_YET):
            raise
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PeersMissingError(f"{missing} {first_line}") from error
    address, count = coordination.coordinator_address(), coordination.num_processes()
    process = f"Process {coordination.process_id()} of {count}"
    _LOG.info("%s, coordinator %s.", process, address)
    _explain_aborts(lambda: _why_aborted(address))
    return True


def _explain_aborts(reason: Callable[[], tuple[str, int] | None]) -> None:
    """Ends the process with a line and a status where XLA aborts it for want of its peers.

    When processes do not arrive, or process 0 and with it the coordination service goes away, XLA
    aborts the process within milliseconds. JAX has no setting that prevents it: the client's
    callback for it cannot be called from Python (std::bad_cast in jaxlib 0.10.2), and a handler
    set by Python's `signal` would run after the abort. So SIGABRT is caught from C.

    Args:
      reason: gives the text and the status; None lets the abort take its course.
    """
    global _abort_handler

    def on_abort(_: int) -> None:
        found = reason()
        if found is not None:
            os.write(2, found[0].encode())
            os._exit(found[1])

    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(_abort_handler, ctypes.c_void_p))


def _why_aborted(address: str) -> tuple[str, int] | None:
    verdict = liveness.watchdog.verdict
    if verdict is not None:  # process 0 ends by the same one, and was faster
        return "", verdict[1]
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        return None
    text = liveness.watchdog.coordinator_is_lost(f"{address} does not answer")
    going_on = "Stopping; the same command resumes from the last checkpoint."
    return f"{text}\n{going_on}\n", REQUEUE_EXIT_CODE
