"""Start of a script: its command line, logging, other processes, and one-line errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from vit_jax.console import start_logging
from vit_jax.errors import (
    REQUEUE_EXIT_CODE,
    PreemptedError,
    TrainingDivergedError,
    UserError,
    is_network_error,
    is_transient,
    may_be_caused_by_peer,
    one_line,
)
from vit_jax.wording import as_called, escaped

if TYPE_CHECKING:  # it imports JAX, which not all scripts need
    from vit_jax.multihost.watchdog import Watchdog


def main(
    run: Callable[[Namespace, Watchdog], Any],
    doc: str | None,
    add_arguments: Callable[[ArgumentParser], Any] = lambda _: None,
) -> None:
    """Parses the command line and calls `run(arguments, watchdog)`, in every process of a training.

    `run` gets the flags of `command_line.run_parser`, those of `add_arguments`, and `config`.

    A `UserError` ends the process with one line on stderr and status 2, a diverged training with
    status 1, Ctrl-C with 130. Status 75 means that the same command resumes from the last
    checkpoint: the run was asked to stop, or lost a process. Anything else is a bug and shows its
    traceback. If one process ends, the run ends on all of them.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
    # Tracing creates millions of long-lived objects: scanning them took 7 % of the start.
    gc.set_threshold(50_000, 10, 10)
    from vit_jax import command_line
    from vit_jax.multihost.watchdog import Watchdog

    watchdog = Watchdog()
    with one_line_errors(watchdog, resumes=True):
        parser = command_line.run_parser(doc)
        add_arguments(parser)
        arguments = command_line.parse(parser)
        start_logging(arguments.process_id)
        names = ("coordinator_address", "num_processes", "process_id")
        start_processes(
            watchdog,
            distributed=arguments.distributed,
            flags_of_process={name: getattr(arguments, name) for name in names},
            **arguments.config.processes,
        )
        run(arguments, watchdog)
        watchdog.leave()


def _exit_on_sigterm(*_: object) -> NoReturn:
    """Before and after the training loop there is nothing to save."""
    os.write(2, b"Stopped by SIGTERM; the same command resumes from the last checkpoint.\n")
    os._exit(REQUEUE_EXIT_CODE)


@contextlib.contextmanager
def one_line_errors(watchdog: Watchdog | None = None, *, resumes: bool = False) -> Iterator[None]:
    """Ends the process, and those it watches, without a traceback for what the user can fix.

    `resumes`: whether the same command resumes an interrupted run.
    """

    def has_peers() -> bool:
        return watchdog is not None and watchdog.num_processes > 1

    def end(message: str, exit_code: int) -> NoReturn:
        """Ends this process and the others of the run, which would wait for it."""
        message = as_called(message)
        with contextlib.suppress(OSError):  # the log may be on the full disk
            print(message, file=sys.stderr, flush=True)
        if watchdog is not None and has_peers():
            watchdog.fail(message.strip().splitlines()[-1].removeprefix("error: "), exit_code)
            logging.shutdown()
            os._exit(exit_code)  # JAX's exit handlers would wait for all processes
        sys.exit(exit_code)

    try:
        yield
    except PreemptedError as error:
        print(error, file=sys.stderr)
        if watchdog is not None:
            watchdog.leave()
        sys.exit(REQUEUE_EXIT_CODE)
    except KeyboardInterrupt:
        resume_hint = " The same command resumes from the last checkpoint." if resumes else ""
        end(f"Interrupted.{resume_hint}", 130)
    except TrainingDivergedError as error:
        end(f"error: {error}", 1)
    except Exception as error:
        # A barrier not reached by others, a failed collective; the watchdog finds out by whom.
        caused_by_peer = isinstance(error, TimeoutError) or may_be_caused_by_peer(error)
        if watchdog is not None and has_peers() and caused_by_peer:
            print(f"{one_line(error)} (looking for the cause)", file=sys.stderr, flush=True)
            watchdog.wait_for_verdict()
        status = REQUEUE_EXIT_CODE if is_transient(error) else 2
        if isinstance(error, UserError | OSError) and not isinstance(error, TimeoutError):
            end(f"error: {escaped(str(error))}", status)
        if isinstance(error, TimeoutError) or is_network_error(error) or is_transient(error):
            end(f"error: {one_line(error)}", status)
        if "RESOURCE_EXHAUSTED" in str(error):
            end(f'error: {one_line(error)} See "Make it fit" in docs/speed.md.', 2)
        if not has_peers():
            raise
        end("".join(traceback.format_exception(error)), 1)


def start_processes(
    watchdog: Watchdog,
    *,
    distributed: str,
    flags_of_process: dict[str, Any],
    arrival_timeout_seconds: int,
    **timeouts: float,
) -> None:
    """Connects to the other processes of this run, if any, and starts the watchdog.

    Ends this process with status 75 if not all arrive in time.

    Args:
      distributed: see `command_line.run_parser`; `on` without a cluster is a UserError.
      flags_of_process: their values are None unless processes are started by hand.
      timeouts: of `Watchdog.start`.

    Raises TimeoutError if the cluster does not answer, or the coordinator's port is still in use.
    """
    has_flags = any(value is not None for value in flags_of_process.values())
    address = flags_of_process["coordinator_address"]
    if distributed == "off" and has_flags:
        raise UserError("--distributed=off contradicts the process flags; drop one of them.")
    if address and not address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address={address} must be HOST:PORT.")
    try:
        if distributed != "off":
            heartbeat = timeouts["heartbeat_timeout_seconds"]
            _connect(arrival_timeout_seconds, heartbeat, flags_of_process)
    except ValueError as error:
        names = f"--{', --'.join(flags_of_process)}"
        if has_flags:
            raise UserError(f"{names} must be given together: {one_line(error)}") from error
        if "defined" not in str(error):
            raise
        if distributed == "on":
            text = "--distributed=on, but no cluster was found that lists the other processes"
            raise UserError(f"{text} (Cloud TPU, GKE, SLURM, Open MPI); give {names}.") from error
    from vit_jax.hardware.devices import quiet_libtpu

    quiet_libtpu()
    watchdog.start(**timeouts)
    if watchdog.num_processes > 1:
        start_logging(watchdog.process_id)


def _connect(arrival_timeout: int, heartbeat_timeout: float, flags: dict[str, Any]) -> None:
    """Calls jax.distributed.initialize, whose own timeouts abort silently: ours come first.

    A ValueError means that flags contradict each other or, without flags, that there is no cluster.
    """
    import jax
    from jax._src.distributed import global_state

    def give_up() -> None:
        what = f"not all processes arrived within {arrival_timeout} s"
        os.write(2, f"error: {what} (config.processes.arrival_timeout_seconds).\n".encode())
        os._exit(REQUEUE_EXIT_CODE)

    # Used only on CPU, where by default processes cannot communicate.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(arrival_timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings(action="ignore"):  # that Kubernetes cannot be asked
            jax.distributed.initialize(
                **flags,
                initialization_timeout=arrival_timeout + 60,
                heartbeat_timeout_seconds=int(3 * heartbeat_timeout) + 10,
            )
    except (jax.errors.JaxRuntimeError, OSError) as error:
        raise TimeoutError(f"the processes could not connect: {one_line(error)}") from error
    finally:
        timer.cancel()
    process = f"Process {global_state.process_id} of {global_state.num_processes}"
    logging.info("%s, coordinator %s.", process, global_state.coordinator_address)
