"""How a script starts: flags, config, processes, logging, and errors in one line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import flags
from ml_collections import config_flags

from vit_jax.errors import PreemptedError, UserError, may_pass, nearest
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE, may_be_of_a_peer

ROOT = Path(__file__).resolve().parent.parent
FLAGS = flags.FLAGS
OWN_FLAGS = (
    *("config", "workdir", "resume", "profile_steps"),
    *("distributed", "coordinator_address", "num_processes", "process_id"),
)


def define_flags(default_config: str | None) -> None:
    """Flags shared by the scripts that run a config."""
    # Recipes import their defaults as `configs.default`, wherever the command is given.
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    config_flags.DEFINE_config_file(
        "config", default_config, "Recipe, as configs/finetune.py:B/16,cifar10.", lock_config=True
    )
    flags.DEFINE_string("workdir", None, "Folder of this run; given again, the run goes on.")
    flags.DEFINE_enum(
        *("resume", "auto", ["auto", "force"]),
        "auto refuses a workdir that belongs to another config; force continues it all the same.",
    )
    flags.DEFINE_enum(
        *("distributed", "auto", ["auto", "on", "off"]),
        "auto joins the other processes where the flags below or the cluster (Cloud TPU, GKE, "
        "SLURM, Open MPI) say how; on insists; off runs alone.",
    )
    flags.DEFINE_string(
        "coordinator_address", None, "host:port of process 0, for a run of several processes."
    )
    flags.DEFINE_integer("num_processes", None, "How many processes, each started by hand.")
    flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
    flags.DEFINE_string(
        "profile_steps", None, "FIRST:LAST, a trace of these updates to WORKDIR/profile."
    )


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
    status 1, Ctrl-C with 130. Status 75 means that the same command goes on from the last
    checkpoint: the run was asked to stop, or a process of it was lost. Anything else is a bug and
    shows its traceback. Whatever ends one process ends all of the run.
    """
    define_flags(default_config)
    with one_line_errors(resumes=workdir):
        if asks_for_help():
            print(help_text(doc))
            return
        parse_flags()
        for name in ("config", "workdir") if workdir else ("config",):
            if not getattr(FLAGS, name):  # None, or empty as of a variable that is not set
                raise UserError(f"--{name} is missing; see --help.")
        if FLAGS.profile_steps is not None:
            FLAGS.config.log.profile_steps = step_range(FLAGS.profile_steps)
        start_logging(FLAGS.process_id)
        join_processes(FLAGS.config.processes)
        run(FLAGS.config, FLAGS.workdir)
        leave_processes()


def asks_for_help() -> bool:
    return any(argument in ("--help", "-h", "--helpfull", "-help") for argument in sys.argv[1:])


def parse_flags() -> None:
    """absl's parsing, with every mistake in a flag or a config turned into a UserError."""
    from configs import default

    unset = _unset_keys(sys.argv[1:], default.get_config())
    try:
        rest = FLAGS([each for each in sys.argv if _key_of(each) not in unset])
        if FLAGS.config is not None:
            FLAGS.config.lock()  # a missing file is noticed at the first access
            for key in unset:
                section, name = key.split(".")
                FLAGS.config[section][name] = None
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(_flag_error(error)) from error
    if len(rest) > 1:
        raise UserError(f"unexpected arguments: {' '.join(rest[1:])}; overrides are --config.x=y.")


def _key_of(argument: str) -> str:
    """`optimizer.clip_norm` of `--config.optimizer.clip_norm=1.0`; "" of another argument."""
    match = re.match(r"--?config\.([^=\[]+)", argument)
    return match[1] if match else ""


def _unset_keys(arguments: list[str], config: Any) -> set[str]:
    """Keys to set to None: those given so, and a recipe's length where another one is given."""
    lengths = {f"duration.{name}" for name in config.duration}
    optional = {key for key in _keys(config) if _value(config, key) is None}
    last = {_key_of(each): each for each in arguments}  # the last one counts
    unset = {key for key in optional if last.get(key, "").endswith("=None")}
    given = lengths & last.keys() - unset
    return unset | (lengths - given if given else set())


def _flag_error(error: BaseException) -> str:
    """One line that says what is wrong with the command line."""
    text = " ".join(str(error.args[0] if error.args else error).split())
    raised_by_recipe = re.search(r"vit_jax\.errors\.UserError: (.*)$", text)
    if raised_by_recipe:
        return raised_by_recipe[1]
    missing_recipe = re.search(r"No such file or directory: '([^']+)'", text)
    if missing_recipe:
        return f"--config: there is no recipe {missing_recipe[1]!r}."
    from configs import default

    known = _keys(default.get_config())
    for argument in sys.argv[1:]:
        given = _key_of(argument)
        # Evaluators have names of the user's choice; what they take is the same for all.
        key = re.sub(r"^evaluators\.\w+\.", "evaluators.test.", given)
        if given and key not in known:
            return (
                f"--config.{given} is no key of the config.{nearest(key, known)} "
                "--help lists all keys."
            )
    return f"{text} (see --help)"


def _keys(config: Any, prefix: str = "") -> list[str]:
    keys = []
    for key, value in config.items():
        nested = _keys(value, f"{prefix}{key}.") if hasattr(value, "items") else []
        keys += nested or [prefix + key]
    return keys


def _value(config: Any, key: str) -> Any:
    return functools.reduce(lambda node, part: node[part], key.split("."), config)


@contextlib.contextmanager
def one_line_errors(*, resumes: bool = False) -> Iterator[None]:
    """Ends the process with the message alone where the message says it all.

    `resumes`: whether the same command goes on where an interrupted one was.
    """
    try:
        yield
    except TimeoutError as error:  # of a barrier whose other processes do not come
        _wait_for_verdict(error)
        _end(f"error: {error}", REQUEUE_EXIT_CODE)
    except (UserError, OSError) as error:  # OSError: a full disk, a folder that went away
        _end(f"error: {error}", REQUEUE_EXIT_CODE if may_pass(error) else 2)
    except PreemptedError as error:
        print(error, file=sys.stderr)
        leave_processes()
        sys.exit(REQUEUE_EXIT_CODE)
    except KeyboardInterrupt:
        going_on = " The same command goes on from the last checkpoint." if resumes else ""
        _end(f"Interrupted.{going_on}", 130)
    except Exception as error:
        kind = type(error).__name__
        if kind == "TrainingDivergedError":
            _end(f"error: {error}", 1)
        if kind == "PeersMissingError":
            _end(f"error: {error}", REQUEUE_EXIT_CODE)
        if not _has_peers():
            raise
        if may_be_of_a_peer(error):
            _wait_for_verdict(error)
        _end("".join(traceback.format_exception(error)), 1)


def _has_peers() -> bool:
    if "jax" not in sys.modules:
        return False
    from vit_jax.multihost import coordination

    return coordination.num_processes() > 1


def _wait_for_verdict(error: Exception) -> None:
    """Ends the process if another one is to blame; the watch says which."""
    if _has_peers():
        from vit_jax.multihost import liveness

        print(f"{str(error).splitlines()[0]} (looking for the cause)", file=sys.stderr, flush=True)
        liveness.wait_for_verdict()


def _end(message: str, exit_code: int) -> NoReturn:
    """Ends this process, and with it the others of the run, which would wait for it."""
    with contextlib.suppress(OSError):  # the disk that is full may be that of the log
        print(message, file=sys.stderr, flush=True)
    if not _has_peers():
        sys.exit(exit_code)
    from vit_jax.multihost import liveness

    liveness.fail(message.strip().splitlines()[-1].removeprefix("error: "), exit_code)
    logging.shutdown()
    os._exit(exit_code)  # not through JAX's farewell, for which everybody would have to come


def start_logging(process_id: int | None = None, *, to_stderr: bool = False) -> None:
    """Progress goes to stdout, or to stderr where stdout is for the result alone.

    Libraries speak from warnings on.
    """
    process = "" if process_id is None else f"[{process_id}] "
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {process}%(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr if to_stderr else sys.stdout,
        force=True,
    )
    for name in ("absl", "orbax", "jax", "grain", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)


def join_processes(timeouts: Any) -> None:
    """Joins the other processes of this run, if there are any; see `processes.start_processes`."""
    from vit_jax.multihost import coordination, processes

    processes.start_processes(
        distributed=FLAGS.distributed,
        coordinator_address=FLAGS.coordinator_address,
        num_processes=FLAGS.num_processes,
        process_id=FLAGS.process_id,
        **timeouts,
    )
    if coordination.num_processes() > 1:
        start_logging(coordination.process_id())


def leave_processes() -> None:
    """The work is done: when all have said so, nobody is missed from here on."""
    from vit_jax.multihost import liveness

    liveness.leave()


def step_range(text: str) -> tuple[int, int]:
    """`100:110` as numbers."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile_steps={text!r} must be FIRST:LAST, such as 100:110.")
    return int(match[1]), int(match[2])


def help_text(doc: str | None) -> str:
    """The script's docstring, its flags, and every config key with its default and comment."""
    own = [FLAGS[name] for name in OWN_FLAGS]
    lines = [inspect.cleandoc(doc or ""), "", "Flags:"]
    lines += [f"  --{flag.name}: {flag.help} (default: {flag.default})" for flag in own]
    lines += ["", "Config keys, as --config.KEY=VALUE:"]
    comments = _comments((ROOT / "configs" / "default.py").read_text())
    from configs import default

    config = default.get_config()
    for key in _keys(config):
        comment = comments[key.rpartition(".")[2] if key.startswith("evaluators.") else key]
        lines.append(f"  {key} = {_value(config, key)!r}{comment}")
    return "\n".join(lines)


def _comments(source: str) -> dict[str, str]:
    """`section.key`, and `key` of an evaluator, to the comment on its line in default.py."""
    pattern = r"^ +(?:config\.([\w.]+) =|\"(\w+)\":) .*?(  # .*)?$"
    found = re.finditer(pattern, source, re.MULTILINE)
    return {match[1] or match[2]: match[3] or "" for match in found}
