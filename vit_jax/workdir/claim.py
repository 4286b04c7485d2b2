"""One workdir per run: a different run never overwrites anything in it.

`config.json` and `dataset.json` identify the run; the process that is using the workdir, among
those of this and other machines, holds its `.lock`.
"""

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

from vit_jax.errors import TransientError, UserError, as_user_error, is_network_error, one_line
from vit_jax.files import paths
from vit_jax.files.paths import full_path, is_bucket, read_object, write_json
from vit_jax.kinds import check_known
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.wording import list_names
from vit_jax.workdir import buckets
from vit_jax.workdir.description import CHECKPOINTS, CONFIG_FILE, PARAMS_FILE, RESULTS_FILE

_LOG = logging.getLogger(__name__)
_DATASET = "dataset.json"
# Results of a run that another run must not mix with its own.
_RESULTS = (CHECKPOINTS, PARAMS_FILE, "metrics.jsonl")
_HELD: dict[Path, Callable[[], None]] = {}  # folders locked by this process -> release function
_ABSENT: tuple[()] = ()  # of a key; no value in JSON
# Config keys; one that ends in a dot stands for its section. The processes of a run may
# differ in these: where the data are stored, how a host works.
LOCAL_KEYS = ("dataset.data_dir", "loader.", "log.")
# A resumed run may also change these: they do not affect its results, or no longer.
RUNTIME_KEYS = (
    *LOCAL_KEYS,
    "mesh.",
    "checkpoint.",
    "processes.",
    "model.remat",
    "sweep.",
    "pretrained.keep",
    "pretrained.posemb",
)


def check_name(workdir: str) -> None:
    """Raises a UserError for a name of a work directory that no checkpoint can have."""
    if not workdir:
        raise UserError("workdir='' is not a folder; give one for this run.")
    paths.check_utf8("workdir", workdir)


def claim_workdir(
    workdir: str | os.PathLike[str],
    config: dict[str, Any],
    dataset_fingerprint: dict[str, Any],
    *,
    resume: str,
    on_loss: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Claims the workdir until the process ends or calls `release_workdir`; in every process.

    Creates the folder, locks it, and compares `config.json` and `dataset.json` in it with this
    run's; writes them if they are missing.

    Args:
      config: plain nested dict.
      dataset_fingerprint: identifies content and order of the data.
      resume: `auto` rejects the workdir of another config; `force` renames its `config.json` to
        `config.<n>.json`, its final results likewise, and writes this run's.
      on_loss: called from a thread, with a message and an exit status, before this process ends
        because another run has taken its workdir.

    UserError if the folder cannot be written, another process uses it, it belongs to another run,
    or the config or the data of this process differ from those of process 0.
    """
    check_known("--resume", resume, ("auto", "force"))
    folder = full_path(workdir)

    def claim() -> None:
        release_workdir(folder)  # if this process holds it: it may have been deleted since
        try:
            paths.make_folder(folder)
            _HELD[folder] = _lock_folder(folder, on_loss)
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

    check_same(config, dataset_fingerprint)
    run_on_first_process(claim)
    if jax.process_count() > 1:  # not before it exists: network file systems cache an absence
        check_shared(folder)


def release_workdir(workdir: str | os.PathLike[str]) -> None:
    """Lets other processes use the workdir; does nothing if it is not claimed."""
    if release := _HELD.pop(full_path(workdir), None):
        release()


def check_same(config: dict[str, Any], fingerprint: dict[str, Any]) -> None:
    """Raises UserError if config or data of this process differ from those of process 0."""
    mine = {**config, "data": fingerprint}
    if differences := _differences(run_on_first_process(lambda: mine), mine, LOCAL_KEYS):
        raise UserError(
            f"Process {jax.process_index()} on {socket.gethostname()} has another config or other "
            f"data than process 0: {differences}. Give every process the same command and the same "
            "data."
        )


def check_shared(folder: Path) -> None:
    """Raises UserError if the path is a different folder on another process."""
    mark = folder / ".session"

    def write_mark() -> str:
        mark.write_text(text := secrets.token_hex(8))
        return text

    written = run_on_first_process(write_mark)
    for _ in range(20):  # network file systems show new files with a delay
        with contextlib.suppress(OSError):
            if mark.read_text() == written:
                return
        time.sleep(0.5)
    raise UserError(
        f"Workdir {folder} on {socket.gethostname()} is not the one that process 0 uses: put "
        "--workdir on a file system that all hosts share, at the same path."
    )


def _take_over(folder: Path, config: dict[str, Any], data: dict[str, Any], resume: str) -> None:
    """Compares the workdir's files with this run and writes them if allowed or without results."""
    results = [name for name in _RESULTS if _is_nonempty(folder / name)]
    known = (folder / CONFIG_FILE).exists()
    if results and not known and resume == "auto":
        raise UserError(
            f"Workdir {folder} contains {' and '.join(results)} but no {CONFIG_FILE}: it belongs "
            "to something else. Choose another --workdir, or --resume=force."
        )
    # config.json is written last: until then the workdir counts as new.
    files = (_DATASET, data, ()), (CONFIG_FILE, config, RUNTIME_KEYS)
    for name, value, may_differ in files:
        path = folder / name
        if not (known and results and path.exists()):
            write_json(path, value)
            continue
        problem = another_run(path, value, may_differ)
        if problem and resume == "auto":
            raise UserError(f"{problem} Choose another --workdir, or --resume=force.")
        if resume == "force" and another_run(path, value, ()):
            for finished in (RESULTS_FILE, PARAMS_FILE) if problem else ():  # of another config
                if (old := folder / finished).exists():
                    paths.move(old, kept := paths.free_name(old))
                    _LOG.warning("%s belongs to another config: moved to %s.", old, kept.name)
            paths.free_name(path).write_bytes(path.read_bytes())
            write_json(path, value)


def _is_nonempty(path: Path) -> bool:
    if is_bucket(path):
        return bool(paths.names_below(path))
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def another_run(path: Path, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """How a run's file contradicts this value; "" if it does not."""
    try:
        differences = _differences(read_object(path), value, may_differ)
    except TransientError:
        raise
    except UserError as error:
        return str(error)
    what = f"Workdir {path.parent} belongs to a run with another {path.stem}"
    return f"{what}: {differences}." if differences else ""


def _differences(saved: Any, value: dict[str, Any], may_differ: tuple[str, ...]) -> str:
    """`key: saved -> new` for the first ten dotted keys that differ.

    A key that only one version has differs unless it is off there (False, None, 0, empty).
    """

    def flatten(tree: Any) -> dict[str, Any]:  # values as in JSON; an empty section is one
        return flatten_dict(json.loads(json.dumps(tree)), sep=".", keep_empty_nodes=True)

    def shown(flat: dict[str, Any], key: str) -> str:
        return json.dumps(flat[key], default=lambda _: {}) if key in flat else "(absent)"

    old, new = flatten(saved), flatten(value)
    sections = tuple(key for key in may_differ if key.endswith("."))
    texts = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        is_off = _ABSENT in (before, after) and not (before or after)
        if before == after or is_off or key in may_differ or key.startswith(sections):
            continue
        texts.append(f"{key}: {shown(old, key)} -> {shown(new, key)}")
    return list_names(texts, 10)


def _lock_folder(folder: Path, on_loss: Callable[[str, int], None]) -> Callable[[], None]:
    """Locks a work directory; returns the function that releases it.

    On a disk it is a record lock, which the kernel releases when the process dies and which workers
    that outlive it do not inherit. Raises UserError if another process holds it, OSError or
    ValueError if the file system or the bucket refuses.
    """
    if is_bucket(folder):
        bucket_lock = buckets.BucketLock(folder, _machine(), on_loss)
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
    """Waits for a holder on another host, which may be lost."""
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
    """Identifies this host's boot (a new pod may reuse the name) and the container's pids."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        ids = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
        return f"{name} (boot {boot}, ids {ids})"
    return name
