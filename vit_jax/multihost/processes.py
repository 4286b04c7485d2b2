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
from vit_jax.multihost import coordination
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, STOPPING
from vit_jax.multihost.watchdog import watchdog

_LOG = logging.getLogger(__name__)
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
    **timeouts: float,
) -> None:
    """Joins the other processes of this run, if there are any, and begins to watch over them.

    Args:
      distributed: `auto` joins where the flags or a cluster that JAX knows (Cloud TPU, GKE, SLURM,
        Open MPI, Kubernetes jobs) say how; `on` insists on it; `off` runs alone.
      coordinator_address, num_processes, process_id: host:port of process 0, how many there are,
        and which one this is, where they were started by hand.
      arrival_timeout_seconds: how long to wait for all of them.
      timeouts: of `Watchdog.start`.

    Raises:
      UserError: flags that contradict each other, or `on` without a cluster.
      PeersMissingError: a process did not arrive.
    """
    flags = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    _check_flags(distributed, flags)
    for key, value in {"arrival_timeout_seconds": arrival_timeout_seconds, **timeouts}.items():
        has_zero = key in ("step_timeout_seconds", "start_timeout_seconds")
        if not (0 < value < math.inf or (has_zero and value == 0)):
            or_zero = " or 0 (no limit)" if has_zero else ""
            raise UserError(f"processes.{key}={value} must be positive{or_zero}.")
    if distributed != "off":
        # JAX's own heartbeats speak up after ours, which can say more.
        heartbeat_timeout = int(3 * timeouts["heartbeat_timeout_seconds"]) + 10
        found = _initialize(
            arrival_timeout_seconds, heartbeat_timeout_seconds=heartbeat_timeout, **flags
        )
        if distributed == "on" and not found:
            raise UserError(
                "--distributed=on, but no cluster was found that says who the other processes are "
                f"(Cloud TPU, GKE, SLURM, Open MPI); give --{', --'.join(flags)}."
            )
    watchdog.start(**timeouts)


def _check_flags(distributed: str, flags: dict[str, Any]) -> None:
    address, num_processes, process_id = flags.values()
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return
    if distributed == "off":
        raise UserError("--distributed=off contradicts the flags of the processes; drop one.")
    if missing:
        raise UserError(f"--{missing[0]} is missing; give all of --{', --'.join(flags)}, or none.")
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
    _on_abort(lambda: (f"error: {missing}\n", REQUEUE_EXIT_CODE))
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
        is_bug = not isinstance(error, (jax.errors.JaxRuntimeError, OSError))
        if is_bug and not any(text in str(error) for text in _NOT_THERE_YET):
            raise
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PeersMissingError(f"{missing} {first_line}") from error
    address, count = coordination.coordinator_address(), coordination.num_processes()
    process = f"Process {coordination.process_id()} of {count}"
    _LOG.info("%s, coordinator %s.", process, address)
    _on_abort(lambda: _why_aborted(address))
    return True


def _on_abort(reason: Callable[[], tuple[str, int] | None]) -> None:
    """Ends the process with the text and the status of `reason` where XLA would abort it.

    When processes do not arrive, or process 0 and with it the coordination service goes away, XLA
    aborts the process within milliseconds. JAX has no setting that prevents it: the client's
    callback for it cannot be called from Python (std::bad_cast in jaxlib 0.10.2), and a handler
    set by Python's `signal` would run after the abort. So SIGABRT is caught from C. Where `reason`
    gives None, the abort takes its course.
    """
    global _abort_handler

    def handle(_: int) -> None:
        if found := reason():
            os.write(2, found[0].encode())
            os._exit(found[1])

    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(_abort_handler, ctypes.c_void_p))


def _why_aborted(address: str) -> tuple[str, int] | None:
    if verdict := watchdog.verdict:  # process 0 ends by the same one, and was faster
        return "", verdict[1]
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        return None
    text = watchdog.coordinator_is_lost(f"{address} does not answer")
    return f"{text}\n{STOPPING}\n", REQUEUE_EXIT_CODE
