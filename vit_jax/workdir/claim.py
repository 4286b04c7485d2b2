"""One workdir, one run: nothing in a workdir is overwritten by a different run.

`config.json` and `dataset.json` say whose workdir it is; of the processes of this and other
machines the one that works in it holds its `.lock`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
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
    list_names,
    one_line,
)
from vit_jax.files import paths
from vit_jax.files.paths import full_path, is_bucket, read_object, write_json
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.workdir import buckets
from vit_jax.workdir.description import CHECKPOINTS, CONFIG_FILE, PARAMS_FILE, RESULTS_FILE

_LOG = logging.getLogger(__name__)
_DATASET = "dataset.json"
# What a run leaves behind that another run must not mix with its own.
_RESULTS = (CHECKPOINTS, PARAMS_FILE, "metrics.jsonl")
_HELD: dict[Path, Callable[[], None]] = {}  # locked by this process -> what gives it back
_ABSENT = object()
# Keys of the config; one that ends in a dot stands for the section. The processes of a run may
# differ in these: where the data lie, how a host works.
LOCAL_KEYS = ("dataset.data_dir", "loader.", "log.")
# A resumed run may change these too: they say how it runs, not what it computes.
RUNTIME_KEYS = (
    *LOCAL_KEYS,
    "mesh.",
    "checkpoint.",
    "processes.",
    "model.remat",
    "sweep.",
    "pretrained.keep",
)


def claim_workdir(
    workdir: str | os.PathLike[str],
    config: dict[str, Any],
    dataset_fingerprint: dict[str, Any],
    *,
    resume: str,
) -> None:
    """Makes the workdir ours until the process ends or calls `release_workdir`.

    Called by every process. Creates the folder, locks it, and compares `config.json` and
    `dataset.json` in it with this run's; writes them into a new one.

    Args:
      config: plain nested dict.
      dataset_fingerprint: what the order and content of the data depend on.
      resume: `auto` refuses the workdir of another config; `force` keeps its `config.json` as
        `config.<n>.json`, its finished results likewise, and takes this one.

    Raises:
      UserError: the folder cannot be created or written, another process works in it, it belongs
        to another run, or this process was given another config or other data than process 0.
    """
    check_known("--resume", resume, ("auto", "force"))
    folder = full_path(workdir)

    def claim() -> None:
        release_workdir(folder)  # where this process has it: it may have been deleted since
        try:
            paths.make_folder(folder)
            _HELD[folder] = _lock_folder(folder)
            _take_over(folder, config, dataset_fingerprint, resume)
        except BaseException as error:
            release_workdir(folder)
            refused = isinstance(error, OSError | ValueError) or is_network_error(error)
            if not refused or isinstance(error, UserError):
                raise
            message = f"{one_line(error)} ({getattr(error, 'filename', None) or folder})"
            raise as_user_error(
                f"Workdir {workdir} cannot be written: {message}. Choose another --workdir.", error
            ) from error

    if jax.process_count() == 1:
        claim()
        return
    check_same(config, dataset_fingerprint)
    run_on_first_process(claim)
    # Not touched before it is there: a network file system would remember that it is not.
    check_shared(folder)


def release_workdir(workdir: str | os.PathLike[str]) -> None:
    """Lets other processes work in the workdir; harmless where it was not claimed."""
    if release := _HELD.pop(full_path(workdir), None):
        release()


def check_same(config: dict[str, Any], fingerprint: dict[str, Any]) -> None:
    """Raises UserError on a process that was given another config or other data than process 0."""
    mine = {**config, "data": fingerprint}
    if found := _differences(run_on_first_process(lambda: mine), mine, LOCAL_KEYS):
        raise UserError(
            f"Process {jax.process_index()} on {socket.gethostname()} has another config or other "
            f"data than process 0: {found}. Give every process the same command and the same data."
        )


def check_shared(folder: Path) -> None:
    """Raises UserError where another process sees another folder under the same name."""
    mark = folder / ".session"

    def write_mark() -> str:
        mark.write_text(text := secrets.token_hex(8))
        return text

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


def _take_over(
    folder: Path, config: dict[str, Any], fingerprint: dict[str, Any], resume: str
) -> None:
    """Compares what the workdir says it is with this run; writes the files where it may.

    After a start that failed before its first update, the next may bring another config.
    """
    results = [name for name in _RESULTS if _holds_something(folder / name)]
    known = (folder / CONFIG_FILE).exists()
    if results and not known and resume == "auto":
        raise UserError(
            f"Workdir {folder} holds {' and '.join(results)} but no {CONFIG_FILE}: it belongs "
            "to something else. Choose another --workdir, or --resume=force."
        )
    # config.json is written last: until then the workdir counts as new.
    files = (_DATASET, fingerprint, ()), (CONFIG_FILE, config, RUNTIME_KEYS)
    for name, value, may_differ in files:
        path = folder / name
        if not (known and results and path.exists()):
            write_json(path, value)
            continue
        problem = another_run(path, value, may_differ)
        if problem and resume == "auto":
            raise UserError(f"{problem} Choose another --workdir, or --resume=force.")
        if resume == "force" and another_run(path, value, ()):
            for finished in (RESULTS_FILE, PARAMS_FILE) if problem else ():  # of other values
                if (old := folder / finished).exists():
                    paths.move(old, kept := paths.free_name(old))
                    _LOG.warning("%s is of other values: moved to %s.", old, kept.name)
            paths.free_name(path).write_bytes(path.read_bytes())
            write_json(path, value)


def _holds_something(path: Path) -> bool:
    if is_bucket(path):
        return bool(paths.names_below(path))
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def another_run(path: Path, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """Says what is wrong with the file of a run that is to have this value; "" if nothing is."""
    try:
        found = _differences(read_object(path), value, may_differ)
    except PassingError:
        raise
    except UserError as error:
        return str(error)
    what = f"Workdir {path.parent} belongs to a run with another {path.stem}"
    return f"{what}: {found}." if found else ""


def _differences(saved: Any, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """`key: saved -> new` of the first ten dotted keys in which they differ."""
    old, new = _flatten(saved), _flatten(value)
    sections = tuple(key for key in may_differ if key.endswith("."))
    found = [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
        and key not in may_differ
        and not key.startswith(sections)
    ]
    return list_names(found, 10)


def _flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value as JSON has it; an empty section and a list are values."""
    return flatten_dict(json.loads(json.dumps(tree)), sep=".", keep_empty_nodes=True)


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key], default=lambda _: {}) if key in flat else "(absent)"


def _lock_folder(folder: Path) -> Callable[[], None]:
    """Takes the exclusive lock of a work directory; returns what gives it back.

    On a disk it is a record lock, which the kernel drops when the process dies and a worker that
    outlives it does not inherit. A holder on another host is waited for, in case that host is lost.

    Raises:
      UserError: another process works in it.
      OSError, ValueError: the file system or the bucket refuses.
    """
    if is_bucket(folder):
        bucket_lock = buckets.BucketLock(folder, _machine())
        bucket_lock.acquire()
        return bucket_lock.release
    lock = os.open(folder / buckets.LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait_for_lock(lock, folder)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {_machine()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return functools.partial(os.close, lock)


def _wait_for_lock(lock: int, folder: Path) -> None:
    deadline = 0.0
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
        if holder.endswith((f" on {_machine()}", "unknown")) or 0 < deadline <= time.monotonic():
            raise buckets.in_use(folder, holder)
        if not deadline:
            deadline = buckets.start_waiting(folder, holder)
        time.sleep(buckets.POLL_SECONDS)


def _machine() -> str:
    """This host since its start (a pod's name goes to its successor) and the container's pids."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        ids = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
        return f"{name} (boot {boot}, ids {ids})"
    return name
