"""Start of a script: flags, config, logging, other processes, and one-line errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from vit_jax.console import start_logging
from vit_jax.errors import (
    REQUEUE_EXIT_CODE,
    PreemptedError,
    TrainingDivergedError,
    UserError,
    escaped,
    is_network_error,
    is_transient,
    may_be_caused_by_peer,
    one_line,
)
from vit_jax.errors import ROOT as ROOT

FLAGS = flags.FLAGS
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def main(
    run: Callable[[Any, str], Any],
    *,
    doc: str | None,
    default_config: str | None = None,
    workdir: bool = True,
) -> None:
    """Parses the command line and calls `run(config, workdir)`; --help shows `doc`.

    A `UserError` ends the process with one line on stderr and status 2, a diverged training with
    status 1, Ctrl-C with 130. Status 75 means that the same command resumes from the last
    checkpoint: the run was asked to stop, or lost a process. Anything else is a bug and shows its
    traceback. If one process ends, the run ends on all of them.
    """
    use_huge_pages()
    if workdir and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
    # Tracing creates millions of long-lived objects: scanning them took 7 % of the start.
    gc.set_threshold(50_000, 10, 10)
    from vit_jax import command_line

    command_line.define_flags()
    with one_line_errors(resumes=workdir):
        if command_line.help_requested():
            print(command_line.help_text(doc, run=workdir))
            return
        command_line.parse_flags(default_config)
        for name in ("config", "workdir") if workdir else ("config",):
            if not getattr(FLAGS, name):  # None, or "" from an unset shell variable
                raise UserError(f"--{name} is missing; see --help.")
        if FLAGS.profile_steps is not None:
            FLAGS.config.log.profile_steps = command_line.step_range(FLAGS.profile_steps)
        start_logging(FLAGS.process_id)
        names = ("coordinator_address", "num_processes", "process_id")
        start_processes(
            distributed=FLAGS.distributed,
            flags_of_process={name: FLAGS[name].value for name in names},
            **FLAGS.config.processes,
        )
        run(FLAGS.config, FLAGS.workdir)
        from vit_jax.multihost.watchdog import watchdog

        watchdog.leave()


def _exit_on_sigterm(*_: object) -> NoReturn:
    """Before and after the training loop there is nothing to save."""
    os.write(2, b"Stopped by SIGTERM; the same command resumes from the last checkpoint.\n")
    os._exit(REQUEUE_EXIT_CODE)


def use_huge_pages() -> None:
    """Restarts this program with huge pages for large arrays, if Linux provides them on request.

    On a CPU, XLA allocates the memory of every update from the kernel and returns it. With pages of
    4 KiB that alone is a fifth of the update or more (docs/performance.md). glibc (2.35 on) reads
    the setting when a process starts; GLIBC_TUNABLES set by the user, even if empty, is kept.
    """
    if "GLIBC_TUNABLES" in os.environ or sys.gettrace() is not None:  # a debugger is attached
        return
    with contextlib.suppress(OSError):
        if "[madvise]" in HUGE_PAGES.read_text():
            os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def one_line_errors(*, resumes: bool = False) -> Iterator[None]:
    """Ends the process on an error, without a traceback for errors that the user can fix.

    `resumes`: whether the same command resumes an interrupted run.
    """
    try:
        yield
    except TimeoutError as error:  # a barrier not reached by others, a cluster that does not answer
        _wait_for_verdict(error)
        _end(f"error: {one_line(error)}", REQUEUE_EXIT_CODE)
    except (UserError, OSError) as error:  # OSError: a full disk, a folder that was removed
        _end(f"error: {escaped(str(error))}", REQUEUE_EXIT_CODE if is_transient(error) else 2)
    except PreemptedError as error:
        print(error, file=sys.stderr)
        if peers := _peers():
            peers.leave()
        sys.exit(REQUEUE_EXIT_CODE)
    except KeyboardInterrupt:
        resume_hint = " The same command resumes from the last checkpoint." if resumes else ""
        _end(f"Interrupted.{resume_hint}", 130)
    except TrainingDivergedError as error:
        _end(f"error: {error}", 1)
    except Exception as error:
        if may_be_caused_by_peer(error):
            _wait_for_verdict(error)
        if is_network_error(error) or is_transient(error):  # a bucket is unreachable
            _end(f"error: {one_line(error)}", REQUEUE_EXIT_CODE if is_transient(error) else 2)
        if "RESOURCE_EXHAUSTED" in str(error):
            _end(f'error: {one_line(error)} See "Make it fit" in docs/speed.md.', 2)
        if not _peers():
            raise
        _end("".join(traceback.format_exception(error)), 1)


def _peers() -> Any:
    """The watchdog of a run of several processes; None for a single process."""
    module = sys.modules.get("vit_jax.multihost.watchdog")
    return module.watchdog if module and module.watchdog.num_processes > 1 else None


def _wait_for_verdict(error: Exception) -> None:
    """Ends the process if another one is to blame; the watchdog reports which."""
    if peers := _peers():
        print(f"{one_line(error)} (looking for the cause)", file=sys.stderr, flush=True)
        peers.wait_for_verdict()


def _end(message: str, exit_code: int) -> NoReturn:
    """Ends this process and the others of the run, which would wait for it."""
    with contextlib.suppress(OSError):  # the log may be on the full disk
        print(message, file=sys.stderr, flush=True)
    if peers := _peers():
        peers.fail(message.strip().splitlines()[-1].removeprefix("error: "), exit_code)
        logging.shutdown()
        os._exit(exit_code)  # JAX's exit handlers would wait for all processes
    sys.exit(exit_code)


def start_processes(
    *,
    distributed: str,
    flags_of_process: dict[str, Any],
    arrival_timeout_seconds: int,
    **timeouts: float,
) -> None:
    """Connects to the other processes of this run, if any, and starts the watchdog.

    Ends this process with status 75 if not all arrive in time.

    Args:
      distributed: `auto` connects if the flags or a cluster that JAX detects say how; `on`
        requires it; `off` runs a single process.
      flags_of_process: for processes started by hand; otherwise their values are None.
      timeouts: of `Watchdog.start`.

    Raises:
      UserError: flags that contradict each other, or `on` without a cluster.
      TimeoutError: the cluster does not answer, or the coordinator's port is still in use.
    """
    from vit_jax.multihost.watchdog import watchdog

    given = any(value is not None for value in flags_of_process.values())
    address = flags_of_process["coordinator_address"]
    if distributed == "off" and given:
        raise UserError("--distributed=off contradicts the process flags; drop one of them.")
    if address and not address.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator_address={address} must be HOST:PORT.")
    for key, value in {"arrival_timeout_seconds": arrival_timeout_seconds, **timeouts}.items():
        has_zero = key in ("step_timeout_seconds", "start_timeout_seconds")
        if not (0 < value < math.inf or (has_zero and value == 0)):
            or_zero = " or 0 (no limit)" if has_zero else ""
            raise UserError(f"processes.{key}={value} must be positive{or_zero}.")
    try:
        if distributed != "off":
            heartbeat = timeouts["heartbeat_timeout_seconds"]
            _connect(arrival_timeout_seconds, heartbeat, flags_of_process)
    except ValueError as error:
        names = f"--{', --'.join(flags_of_process)}"
        if given:
            raise UserError(f"{names} must be given together: {one_line(error)}") from error
        if "defined" not in str(error):
            raise
        if distributed == "on":
            raise UserError(
                "--distributed=on, but no cluster was found that lists the other processes "
                f"(Cloud TPU, GKE, SLURM, Open MPI); give {names}."
            ) from error
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
        os.write(
            2,
            f"error: not all processes arrived within {arrival_timeout} s "
            "(config.processes.arrival_timeout_seconds).\n".encode(),
        )
        os._exit(REQUEUE_EXIT_CODE)

    # Used only on CPU, where by default processes cannot communicate.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timer = threading.Timer(arrival_timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        with warnings.catch_warnings():
            # JAX warns if it sees Kubernetes without the package to query it.
            warnings.simplefilter("ignore")
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
