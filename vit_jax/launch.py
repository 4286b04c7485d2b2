"""How a script starts: flags, config, processes, logging, and errors in one line."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from vit_jax.errors import PreemptedError, UserError, is_network_error, may_pass, one_line
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, may_be_caused_by_peer

ROOT = Path(__file__).resolve().parent.parent
FLAGS = flags.FLAGS
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def main(
    run: Callable[[Any, str], Any],
    *,
    doc: str | None,
    default_config: str | None = None,
    workdir: bool = True,
) -> None:
    """Parses the command line and calls `run(config, workdir)`.

    Args:
      run: the script's work.
      doc: the script's docstring, shown by --help.
      default_config: recipe that is used when --config is not given.
      workdir: whether the script needs --workdir.

    A `UserError` ends the process with one line on stderr and status 2, a diverged training with
    status 1, Ctrl-C with 130. Status 75 means that the same command resumes from the last
    checkpoint: the run was asked to stop, or lost a process. Anything else is a bug and shows its
    traceback. The end of one process ends the run on all of them.
    """
    use_huge_pages()
    # Tracing makes millions of objects that stay. Looking through them after every 700 new ones
    # took 7 % of a start.
    gc.set_threshold(50_000, 10, 10)
    from vit_jax import command_line

    command_line.define_flags()
    with one_line_errors(resumes=workdir):
        if command_line.asks_for_help():
            print(command_line.help_text(doc, run=workdir))
            return
        command_line.parse_flags(default_config)
        for name in ("config", "workdir") if workdir else ("config",):
            if not getattr(FLAGS, name):  # None, or "" from an unset shell variable
                raise UserError(f"--{name} is missing; see --help.")
        if FLAGS.profile_steps is not None:
            FLAGS.config.log.profile_steps = command_line.step_range(FLAGS.profile_steps)
        start_logging(FLAGS.process_id)
        join_processes(FLAGS.config.processes)
        run(FLAGS.config, FLAGS.workdir)
        leave_processes()


def use_huge_pages() -> None:
    """Starts this program again with huge pages for large arrays, where Linux has them on request.

    On a CPU, XLA takes the memory of every update from the kernel and gives it back. In pages of
    4 KiB that alone is a fifth of the update or more (docs/performance.md). glibc (2.35 on) reads
    the setting when a process starts; a GLIBC_TUNABLES of the user's, an empty one too, is kept.
    """
    if "GLIBC_TUNABLES" in os.environ or sys.gettrace() is not None:  # a debugger is attached
        return
    with contextlib.suppress(OSError):
        if "[madvise]" in HUGE_PAGES.read_text():
            os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def one_line_errors(*, resumes: bool = False) -> Iterator[None]:
    """Ends the process on an error, without a traceback for errors that the user can put right.

    `resumes`: whether the same command resumes an interrupted run.
    """
    try:
        yield
    except TimeoutError as error:  # a barrier that others did not reach, no cluster that answers
        _wait_for_verdict(error)
        _end(f"error: {one_line(error)}", REQUEUE_EXIT_CODE)
    except (UserError, OSError) as error:  # OSError: a full disk, a folder that went away
        _end(f"error: {error}", REQUEUE_EXIT_CODE if may_pass(error) else 2)
    except PreemptedError as error:
        print(error, file=sys.stderr)
        leave_processes()
        sys.exit(REQUEUE_EXIT_CODE)
    except KeyboardInterrupt:
        way_on = " The same command resumes from the last checkpoint." if resumes else ""
        _end(f"Interrupted.{way_on}", 130)
    except Exception as error:
        kind = type(error).__name__
        if kind == "TrainingDivergedError":
            _end(f"error: {error}", 1)
        if _has_peers() and may_be_caused_by_peer(error):
            _wait_for_verdict(error)
        if is_network_error(error) or may_pass(error):  # a bucket is out of reach
            _end(f"error: {one_line(error)}", REQUEUE_EXIT_CODE if may_pass(error) else 2)
        if not _has_peers():
            raise
        _end("".join(traceback.format_exception(error)), 1)


def _has_peers() -> bool:
    if "vit_jax.multihost.watchdog" not in sys.modules:
        return False
    from vit_jax.multihost.watchdog import watchdog

    return watchdog.num_processes > 1


def _wait_for_verdict(error: Exception) -> None:
    """Ends the process if another one is to blame; the watchdog says which."""
    if _has_peers():
        from vit_jax.multihost.watchdog import watchdog

        print(f"{one_line(error)} (looking for the cause)", file=sys.stderr, flush=True)
        watchdog.wait_for_verdict()


def _end(message: str, exit_code: int) -> NoReturn:
    """Ends this process and the others of the run, which would wait for it."""
    with contextlib.suppress(OSError):  # the log may be on the full disk
        print(message, file=sys.stderr, flush=True)
    if not _has_peers():
        sys.exit(exit_code)
    from vit_jax.multihost.watchdog import watchdog

    watchdog.fail(message.strip().splitlines()[-1].removeprefix("error: "), exit_code)
    logging.shutdown()
    os._exit(exit_code)  # JAX's exit handlers would wait for all processes


def start_logging(process_id: int | None = None, *, to_stderr: bool = False) -> None:
    """Logs progress to stdout, or to stderr when stdout is for the result; libraries only warn."""
    process = "" if process_id is None else f"[{process_id}] "
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {process}%(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr if to_stderr else sys.stdout,
        force=True,
    )
    for name in ("absl", "orbax", "jax", "fsspec", "google", "grain", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of what it raises


def join_processes(timeouts: Any) -> None:
    """Joins the other processes of this run, if any; see `processes.start_processes`."""
    from vit_jax.multihost.processes import start_processes
    from vit_jax.multihost.watchdog import watchdog

    start_processes(
        distributed=FLAGS.distributed,
        coordinator_address=FLAGS.coordinator_address,
        num_processes=FLAGS.num_processes,
        process_id=FLAGS.process_id,
        **timeouts,
    )
    if watchdog.num_processes > 1:
        start_logging(watchdog.process_id)


def leave_processes() -> None:
    """Tells the other processes that this one is done and may leave."""
    from vit_jax.multihost.watchdog import watchdog

    watchdog.leave()
