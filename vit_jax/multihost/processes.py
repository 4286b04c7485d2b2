"""How the processes of a run find each other: flags, or what the cluster says."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from typing import Any

import jax
from jax._src.distributed import global_state

from vit_jax.errors import UserError, one_line
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE
from vit_jax.multihost.watchdog import watchdog

_LOG = logging.getLogger(__name__)


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

    Ends this process with status 75 if they have not all arrived in time.

    Args:
      distributed: `auto` joins where the flags or a cluster that JAX knows (Cloud TPU, GKE, SLURM,
        Open MPI, Kubernetes jobs) say how; `on` insists on it; `off` runs alone.
      coordinator_address, num_processes, process_id: host:port of process 0, how many there are,
        and which one this is, where they were started by hand.
      arrival_timeout_seconds: how long to wait for all of them.
      timeouts: of `Watchdog.start`.

    Raises:
      UserError: flags that contradict each other, or `on` without a cluster.
      TimeoutError: the cluster does not answer, or the coordinator's port is still taken.
    """
    flags = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    given = any(value is not None for value in flags.values())
    if distributed == "off" and given:
        raise UserError("--distributed=off contradicts the flags of the processes; drop one.")
    if coordinator_address and not coordinator_address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address={coordinator_address} is no HOST:PORT.")
    for key, value in {"arrival_timeout_seconds": arrival_timeout_seconds, **timeouts}.items():
        has_zero = key in ("step_timeout_seconds", "start_timeout_seconds")
        if not (0 < value < math.inf or (has_zero and value == 0)):
            or_zero = " or 0 (no limit)" if has_zero else ""
            raise UserError(f"processes.{key}={value} must be positive{or_zero}.")
    if distributed != "off":
        try:
            _initialize(arrival_timeout_seconds, timeouts["heartbeat_timeout_seconds"], flags)
        except ValueError as error:
            names = f"--{', --'.join(flags)}"
            if given:
                raise UserError(f"{names} go together: {one_line(error)}") from error
            if "defined" not in str(error):
                raise
            if distributed == "on":
                raise UserError(
                    "--distributed=on, but no cluster was found that says who the other processes "
                    f"are (Cloud TPU, GKE, SLURM, Open MPI); give {names}."
                ) from error
    watchdog.start(**timeouts)


def _initialize(arrival_timeout: int, heartbeat_timeout: float, flags: dict[str, Any]) -> None:
    """Calls jax.distributed.initialize.

    Its own timeouts come after ours, which can say more: XLA would abort the process.

    Raises:
      ValueError: flags that contradict each other; none ("defined"), and no cluster was found.
      TimeoutError: see `start_processes`.
    """

    def give_up() -> None:
        message = (
            f"error: not all processes arrived within {arrival_timeout} s "
            "(config.processes.arrival_timeout_seconds).\n"
        )
        os.write(2, message.encode())
        os._exit(REQUEUE_EXIT_CODE)

    # Read only on CPU, where the default would not let processes talk to each other.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(arrival_timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings():
            # JAX warns where it sees Kubernetes without the package that would tell it more.
            warnings.simplefilter("ignore")
            jax.distributed.initialize(
                **flags,
                initialization_timeout=arrival_timeout + 60,
                heartbeat_timeout_seconds=int(3 * heartbeat_timeout) + 10,
            )
    except (jax.errors.JaxRuntimeError, OSError) as error:
        raise TimeoutError(f"the processes did not find each other: {one_line(error)}") from error
    finally:
        timer.cancel()
    process = f"Process {global_state.process_id} of {global_state.num_processes}"
    _LOG.info("%s, coordinator %s.", process, global_state.coordinator_address)
