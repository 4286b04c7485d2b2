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
from typing import Any

from vit_jax.errors import UserError
from vit_jax.multihost import coordination, liveness
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

MODES = ("auto", "on", "off")
_LOG = logging.getLogger(__name__)
# JAX's own heartbeats speak up after ours, which can say more.
_JAX_HEARTBEAT_FACTOR = 3
# What JAX says, as a plain RuntimeError, when a pod or machine of a TPU run has no name so far.
_NOT_THERE_YET = ("Failed to recognize coordinator address", "Getting metadata")

# What the handler of SIGABRT needs to know; it is kept alive, since C holds a pointer to it.
_abort_handler: Any = None
_arriving = ""  # what to say while not all processes are there
_coordinator = ""  # address, once they are


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
    flags = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if given and distributed == "off":
        raise UserError(f"--distributed=off and {given[0]} contradict each other; drop one.")
    if given and len(given) < len(flags):
        missing = next(flag for flag in flags if flag not in given)
        raise UserError(
            f"--coordinator_address, --num_processes and --process_id belong together: {missing} "
            "is missing; give all three or none."
        )
    if num_processes is not None and num_processes < 1:
        raise UserError(f"--num_processes={num_processes} must be at least 1.")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise UserError(f"--process_id={process_id} must be from 0 to {num_processes - 1}.")
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address={coordinator_address} is no HOST:PORT.")
    for key, value, zero in (
        ("arrival_timeout_seconds", arrival_timeout_seconds, False),
        ("heartbeat_timeout_seconds", heartbeat_timeout_seconds, False),
        ("step_timeout_seconds", step_timeout_seconds, True),
        ("start_timeout_seconds", start_timeout_seconds, True),
    ):
        if not (0 < value < math.inf or (zero and value == 0)):
            or_zero = " or 0 (no limit)" if zero else ""
            raise UserError(f"processes.{key}={value} must be positive{or_zero}.")
    if distributed != "off":
        _initialize(
            *(distributed, coordinator_address, num_processes, process_id),
            arrival_timeout_seconds,
            int(_JAX_HEARTBEAT_FACTOR * heartbeat_timeout_seconds) + 10,
        )
    liveness.start(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        step_timeout_seconds=step_timeout_seconds,
        start_timeout_seconds=start_timeout_seconds,
    )


def _initialize(
    distributed: str,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    arrival_timeout_seconds: int,
    jax_heartbeat_timeout_seconds: int,
) -> None:
    """Calls jax.distributed.initialize, and says in our words why it failed."""
    global _arriving, _coordinator
    import jax

    _arriving = (
        f"not all processes arrived within {arrival_timeout_seconds} s "
        "(config.processes.arrival_timeout_seconds); the log above may name those that are missing."
    )
    # Read only on CPU, where the default would not let processes talk to each other.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM; preemption.py does.
    jax.config.update("jax_enable_preemption_service", False)
    _explain_aborts()
    try:
        with warnings.catch_warnings():
            # JAX warns where it sees Kubernetes without the package that would tell it more.
            warnings.simplefilter("ignore")
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                initialization_timeout=arrival_timeout_seconds,
                heartbeat_timeout_seconds=jax_heartbeat_timeout_seconds,
            )
    except ValueError as error:
        # Nothing was given and no cluster was found.
        if coordinator_address is None and "defined" in str(error):
            if distributed == "auto":
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                return
            raise UserError(
                "--distributed=on, but no cluster was found that says who the other processes are "
                "(Cloud TPU, GKE, SLURM, Open MPI); give --coordinator_address, --num_processes "
                "and --process_id."
            ) from error
        raise
    except (jax.errors.JaxRuntimeError, OSError) as error:  # OSError: no metadata server answers
        raise PeersMissingError(f"{_arriving} {_first_line(error)}") from error
    except RuntimeError as error:
        if any(text in str(error) for text in _NOT_THERE_YET):
            raise PeersMissingError(f"{_arriving} {_first_line(error)}") from error
        raise
    finally:
        _arriving = ""
    from jax._src import distributed as jax_distributed  # knows what was detected

    address = jax_distributed.global_state.coordinator_address
    if coordination.num_processes() > 1 or distributed == "on":
        _LOG.info(
            "Process %d of %d, coordinator %s.",
            *(coordination.process_id(), coordination.num_processes(), address),
        )
    if coordination.num_processes() > 1:
        _coordinator = address or ""


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _explain_aborts() -> None:
    """Replaces the crashes that JAX makes of missing processes by a line and status 75.

    When processes do not arrive, or when process 0 and with it the coordination service goes away,
    XLA aborts the process within milliseconds; nothing in JAX's interface prevents that. So SIGABRT
    is caught, from C. Where neither was the reason, the abort takes its course.
    """
    global _abort_handler

    def on_abort(_: int) -> None:
        known = liveness.exit_code()
        if known is not None:  # process 0 ends by the same verdict, and was faster
            os._exit(known)
        if _arriving:
            line = f"error: {_arriving}\n"
        elif _coordinator and not _answers(_coordinator):
            line = (
                f"process 0 (the coordinator, {_coordinator}) is lost: it does not answer.\n"
                "Stopping; the same command goes on from the last checkpoint.\n"
            )
        else:
            return
        os.write(2, line.encode())
        os._exit(REQUEUE_EXIT_CODE)

    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(_abort_handler, ctypes.c_void_p))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        return True
    return False
