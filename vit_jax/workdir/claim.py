"""One workdir, one run: nothing in a workdir is overwritten by a different run.

`config.json` and `dataset.json` say whose workdir it is, `.lock` says who works in it now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from vit_jax.errors import (
    PassingError,
    UserError,
    as_user_error,
    check_known,
    is_network_error,
    one_line,
)
from vit_jax.files.atomic import free_name, read_object, set_aside, write_json
from vit_jax.files.paths import copy, full_path, is_bucket, make_folder, names_below
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.watchdog import watchdog
from vit_jax.workdir.description import CHECKPOINTS, PARAMS_FILE, RESULTS_FILE

_LOG = logging.getLogger(__name__)
_CONFIG = "config.json"
_DATASET = "dataset.json"
_LOCK = ".lock"
# What a run leaves behind that another run must not mix with its own.
_RESULTS = (CHECKPOINTS, PARAMS_FILE, "metrics.jsonl")
# Locked by this process: workdir -> open file, whose lock the kernel drops when the process dies;
# or a BucketLock.
_HELD: dict[Path, Any] = {}
_LOST_HOST_SECONDS = 120.0
_POLL_SECONDS = 2.0


def claim_workdir(
    workdir: str | os.PathLike[str],
    config: dict[str, Any],
    dataset_fingerprint: dict[str, Any],
    *,
    resume: str,
    runtime_keys: tuple[str, ...],
    local_keys: tuple[str, ...] = (),
) -> None:
    """Makes the workdir ours until the process ends or calls `release_workdir`.

    Called by every process; the work is done on process 0. Creates the folder, locks it, and
    compares `config.json` and `dataset.json` in it with this run's; writes them into a new one.

    Args:
      config: plain nested dict of int, float, str, bool, None, list and tuple.
      dataset_fingerprint: what the order and content of the data depend on.
      resume: `auto` refuses the workdir of another config; `force` keeps its `config.json` as
        `config.<n>.json`, its finished results likewise, and takes this one.
      runtime_keys: dotted keys of the config that may change between restarts. One that ends in
        a dot stands for the section (`mesh.`).
      local_keys: likewise those that may differ between the processes of a run.

    Raises:
      UserError: the folder cannot be created or written, another process works in it, it belongs
        to another run, or this process was given another config or other data than process 0.
    """
    check_known("--resume", resume, ("auto", "force"))
    folder = full_path(workdir)

    def claim() -> None:
        try:
            make_folder(folder)
            _lock(folder)
            _take_over(folder, config, dataset_fingerprint, resume, runtime_keys)
        except BaseException as error:
            release_workdir(folder)
            if not isinstance(error, OSError) and not is_network_error(error):
                raise
            message = f"{one_line(error)} ({getattr(error, 'filename', None) or folder})"
            raise as_user_error(
                f"Workdir {workdir} cannot be written: {message}. Choose another --workdir.", error
            ) from error

    _check_same(config, dataset_fingerprint, local_keys)
    run_on_first_process(claim)
    # Not touched before it is there: a network file system would remember that it is not.
    _check_shared(folder)


def release_workdir(workdir: str | os.PathLike[str]) -> None:
    """Lets other processes work in the workdir; harmless where it was not claimed."""
    lock = _HELD.pop(full_path(workdir), None)
    if isinstance(lock, int):
        os.close(lock)
    elif lock is not None:
        lock.release()


def _check_same(
    config: dict[str, Any], fingerprint: dict[str, Any], local_keys: tuple[str, ...]
) -> None:
    """Raises UserError on a process that was given another config or other data than process 0."""
    if jax.process_count() == 1:
        return
    first_config, first_data = run_on_first_process(lambda: (config, fingerprint))
    for what, found in (
        ("another config", _differences(first_config, config, local_keys)),
        ("other data", _differences(first_data, fingerprint, ())),
    ):
        if found:
            raise UserError(
                f"Process {jax.process_index()} on {socket.gethostname()} has {what} than "
                f"process 0: {found}. Give every process the same command and the same data."
            )


def _check_shared(folder: Path) -> None:
    """Raises UserError where another process sees another folder under the same name."""
    if jax.process_count() == 1:
        return
    mark = folder / ".session"

    def write_mark() -> str:
        mark.write_text(secrets.token_hex(8))
        return mark.read_text()

    written = run_on_first_process(write_mark)
    for _ in range(20):  # network file systems show new files late
        with contextlib.suppress(OSError):
            if mark.read_text() == written:
                return
        time.sleep(0.5)
    raise UserError(
        f"Workdir {folder} on {socket.gethostname()} is not the one that process 0 uses: give "
        "--workdir on a file system that all hosts share, at the same path."
    )


def _lock(folder: Path) -> None:
    """Takes the exclusive lock, anew where this process has it: the folder may have been deleted.

    A record lock (lockf), because it is not inherited: a worker process that outlives a killed
    parent must not keep the workdir shut, as it would with flock.
    """
    release_workdir(folder)
    if is_bucket(folder):
        from vit_jax.workdir.bucket_lock import BucketLock

        bucket_lock = BucketLock(folder / _LOCK, machine=_machine(), on_lost=_end)
        bucket_lock.acquire()
        _HELD[folder] = bucket_lock
        return
    lock = _HELD[folder] = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    _acquire(lock, folder)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {_machine()}\n".encode(), 0)


def _machine() -> str:
    """This host since it was started: Kubernetes gives a pod's name to its successor elsewhere.

    And its process ids, of which each container has its own.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        ids = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
        return f"{name} (boot {boot}, ids {ids})"
    return name


def _end(message: str, exit_code: int) -> None:
    """Ends this process, and the others of its run, from any thread."""
    _LOG.error("error: %s", message)
    watchdog.fail(message, exit_code)
    logging.shutdown()
    os._exit(exit_code)


def _acquire(lock: int, folder: Path) -> None:
    """Locks the open file, or raises a UserError that says who has it.

    The server of a network file system keeps a lost host's lock until it gives the host up: NFS 4
    after 90 s. So a holder on another host is waited for.
    """
    deadline, waiting = time.monotonic() + _LOST_HOST_SECONDS, False
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                _LOG.warning("%s: this file system has no locks; start one run at a time.", folder)
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown"
        if holder.endswith((f" on {_machine()}", "unknown")) or time.monotonic() >= deadline:
            raise UserError(
                f"Workdir {folder} is in use by another process ({holder}). "
                "Wait for it, stop it, or choose another --workdir."
            )
        if not waiting:
            _LOG.warning(
                f"Workdir {folder} is locked by another host ({holder}): waiting up to "
                f"{_LOST_HOST_SECONDS:.0f} s, in case it is lost."
            )
        waiting = True
        time.sleep(_POLL_SECONDS)


def _take_over(
    folder: Path,
    config: dict[str, Any],
    fingerprint: dict[str, Any],
    resume: str,
    runtime_keys: tuple[str, ...],
) -> None:
    """Compares what the workdir says it is with this run; writes the files where it may.

    A start that failed before its first update left a config but nothing to lose: the next start
    may bring another config.
    """
    results = [name for name in _RESULTS if _holds_something(folder / name)]
    known = (folder / _CONFIG).exists()
    if results and not known and resume == "auto":
        raise UserError(
            f"Workdir {folder} holds {' and '.join(results)} but no {_CONFIG}: it belongs "
            "to something else. Choose another --workdir, or --resume=force."
        )
    # config.json is written last: until then the workdir counts as new.
    for name, value, may_differ in ((_DATASET, fingerprint, ()), (_CONFIG, config, runtime_keys)):
        path = folder / name
        if not (known and results and path.exists()):
            write_json(path, value)
            continue
        problem = _another_run(path, value, may_differ)
        if problem and resume == "auto":
            raise UserError(f"{problem} Choose another --workdir, or --resume=force.")
        if resume == "force" and _another_run(path, value, ()):
            for finished in (RESULTS_FILE, PARAMS_FILE) if problem else ():  # of other values
                if (folder / finished).exists():
                    set_aside(folder / finished, "is of other values")
            copy(path, free_name(path))
            write_json(path, value)


def _holds_something(path: Path) -> bool:
    if is_bucket(path):
        return bool(names_below(path))
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def _another_run(path: Path, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """Says what is wrong with the file of a run that is to have this value; "" if nothing is."""
    try:
        saved = read_object(path)
    except PassingError:
        raise
    except UserError as error:
        return str(error)
    found = _differences(saved, value, may_differ)
    what = f"Workdir {path.parent} belongs to a run with another {path.stem}"
    return f"{what}: {found}." if found else ""


def _differences(saved: Any, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """`key: saved -> new` of the first ten dotted keys in which they differ."""
    old, new = _flatten(saved), _flatten(value)
    sections = tuple(key for key in may_differ if key.endswith("."))
    found = [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in sorted(old.keys() | new.keys())
        if _canonical(old.get(key)) != _canonical(new.get(key))
        and key not in may_differ
        and not key.startswith(sections)
    ]
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


def _flatten(tree: dict[str, Any]) -> dict[str, str]:
    """Dotted key -> JSON of the value; an empty section and a list are values."""
    flat = flatten_dict(tree, sep=".", keep_empty_nodes=True)
    return {key: json.dumps(value, default=lambda _: {}) for key, value in flat.items()}


def _canonical(text: str | None) -> str | None:
    """JSON in which 1 is 1.0 (but not true), and the order of the keys does not count."""
    return text and json.dumps(json.loads(text, parse_int=float), sort_keys=True)
