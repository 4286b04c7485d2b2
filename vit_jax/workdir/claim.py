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
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from vit_jax.errors import PassingError, UserError, explained
from vit_jax.files.json import read_json, write_json
from vit_jax.multihost.first_process import run_on_first_process

_LOG = logging.getLogger(__name__)
_CONFIG = "config.json"
_DATASET = "dataset.json"
_LOCK = ".lock"
_MARK = ".session"  # that all processes of a run have to see
# What a run leaves behind that another run must not mix with its own.
_RESULTS = ("checkpoints", "params.npz", "metrics.jsonl")
# What says that the run has ended.
_FINISHED = ("results.json", "params.npz")
# Locked by this process: workdir -> open file. The kernel drops the lock when the process dies.
_HELD: dict[Path, int] = {}
_LOST_HOST_SECONDS = 120.0
_POLL_SECONDS = 2.0
_ABSENT = object()


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
        `config.<n>.json`, its finished results likewise, and goes on with this one.
      runtime_keys: dotted keys of the config that may change between restarts. One that ends in
        a dot stands for the section (`mesh.`).
      local_keys: likewise those that may differ between the processes of a run.

    Raises:
      UserError: the folder cannot be created or written, another process works in it, it belongs
        to another run, or this process was given another config or other data than process 0.
    """
    if resume not in ("auto", "force"):
        raise UserError(f"--resume={resume} is not known. Known: auto, force.")
    if "://" in str(workdir):
        raise UserError(f"--workdir={workdir}: a work directory is a folder of the file system.")

    def claim() -> None:
        folder = Path(workdir).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
            try:
                _take_over(folder, config, dataset_fingerprint, resume, runtime_keys)
            except BaseException:
                _unlock(folder)
                raise
        except OSError as error:
            raise explained(
                f"Workdir {workdir} cannot be written: {error.strerror or error} "
                f"({error.filename or folder}). Choose another --workdir.",
                error,
            ) from error

    _check_same(config, dataset_fingerprint, local_keys)
    run_on_first_process(claim)
    # Not touched before it is there: a network file system would remember for a while that it is
    # not.
    _check_shared(Path(workdir).resolve())


def _check_same(
    config: dict[str, Any], fingerprint: dict[str, Any], local_keys: tuple[str, ...]
) -> None:
    """Raises UserError on a process that was given another config or other data than process 0."""
    if jax.process_count() == 1:
        return
    first_config, first_data = run_on_first_process(lambda: [config, fingerprint])
    for what, first, own, may_differ in (
        ("another config", first_config, config, local_keys),
        ("other data", first_data, fingerprint, ()),
    ):
        found = list(_differences(first, own, may_differ))
        if found:
            shown = ", ".join(f"{key}: {there} -> {here}" for key, there, here in found[:10])
            raise UserError(
                f"Process {jax.process_index()} on {socket.gethostname()} has {what} than "
                f"process 0: {shown}. Give every process the same command and the same data."
            )


def _check_shared(folder: Path) -> None:
    """Raises UserError where another process sees another folder under the same name."""
    if jax.process_count() == 1:
        return
    mark = folder / _MARK

    def write_mark() -> str:
        mark.write_text(secrets.token_hex(8))
        return mark.read_text()

    written = run_on_first_process(write_mark)
    for _ in range(20):  # network file systems show new files late
        with contextlib.suppress(OSError):
            if mark.read_text() == written:
                break
        time.sleep(0.5)
    else:
        raise UserError(
            f"Workdir {folder} on {socket.gethostname()} is not the one that process 0 uses: give "
            "--workdir on a file system that all hosts share, at the same path."
        )


def release_workdir(workdir: str | os.PathLike[str]) -> None:
    """Lets other processes work in the workdir; harmless where it was not claimed."""
    _unlock(Path(workdir).resolve())


def _unlock(folder: Path) -> None:
    if folder in _HELD:
        os.close(_HELD.pop(folder))


def _lock(folder: Path) -> None:
    """Takes the exclusive lock; a process that has it already keeps it.

    A record lock (lockf), because it is not inherited: a worker process that outlives a killed
    parent must not keep the workdir shut, as it would with flock.
    """
    if folder in _HELD:
        if (folder / _LOCK).exists() and os.path.samestat(
            os.fstat(_HELD[folder]), os.stat(folder / _LOCK)
        ):
            return
        _unlock(folder)  # the folder was deleted meanwhile
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(lock, folder)
    except BaseException:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {_machine()}\n".encode(), 0)
    _HELD[folder] = lock


def _machine() -> str:
    """This host since it was started: Kubernetes gives a pod's name to its successor elsewhere."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{name} (boot {Path('/proc/sys/kernel/random/boot_id').read_text()[:8]})"
    return name


def _acquire(lock: int, folder: Path) -> None:
    """Locks the open file, or raises a UserError that says who has it.

    Of a host that was lost the server of a network file system keeps the lock until it gives the
    host up: NFS 4 after 90 s. So a holder on another host is waited for.
    """
    deadline = time.monotonic() + _LOST_HOST_SECONDS
    waiting = False
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
        is_elsewhere = not holder.endswith((f" on {_machine()}", "unknown"))
        if not is_elsewhere or time.monotonic() >= deadline:
            raise UserError(
                f"Workdir {folder} is in use by another process ({holder}). "
                "Wait for it, stop it, or choose another --workdir."
            )
        if not waiting:
            _LOG.warning(
                "Workdir %s is locked by another host (%s): waiting up to %.0f s, in case it is "
                "lost.",
                *(folder, holder, _LOST_HOST_SECONDS),
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
    known = (folder / _CONFIG).exists() and bool(results)
    foreign = [] if (folder / _CONFIG).exists() else results
    if foreign and resume == "auto":
        raise UserError(
            f"Workdir {folder} holds {' and '.join(foreign)} but no {_CONFIG}: it belongs "
            "to something else. Choose another --workdir, or --resume=force."
        )
    # config.json is written last: until then the workdir counts as new.
    for name, value, may_differ in ((_DATASET, fingerprint, ()), (_CONFIG, config, runtime_keys)):
        path = folder / name
        if not known or not path.exists():
            write_json(path, value)
        elif resume == "auto":
            _refuse_other_run(path, value, may_differ)
        elif not _same_file(path, value, ()):
            if not _same_file(path, value, may_differ):
                for finished in _FINISHED:  # by a run of other values
                    if (folder / finished).exists():
                        os.rename(folder / finished, _free_name(folder / finished))
            shutil.copy2(path, _free_name(path))
            write_json(path, value)


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def _same_file(path: Path, value: dict[str, Any], runtime_keys: tuple[str, ...]) -> bool:
    try:
        return not list(_differences(read_json(path), value, runtime_keys))
    except PassingError:
        raise
    except UserError:
        return False


def _free_name(path: Path) -> Path:
    """`config.<n>.json` with the first n not taken."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _refuse_other_run(path: Path, value: dict[str, Any], runtime_keys: tuple[str, ...]) -> None:
    """Raises a UserError that names the keys in which the file and `value` differ."""
    way_out = "Choose another --workdir, or --resume=force to go on with the new values."
    try:
        saved = read_json(path)
    except PassingError:
        raise
    except UserError as error:
        raise UserError(f"{error} {way_out}") from error
    if not isinstance(saved, dict):
        raise UserError(f"{path} is damaged, it holds no keys. {way_out}")
    found = list(_differences(saved, value, runtime_keys))
    if found:
        shown = ", ".join(f"{key}: {old} -> {new}" for key, old, new in found[:10])
        more = f" and {len(found) - 10} more" if len(found) > 10 else ""
        raise UserError(
            f"Workdir {path.parent} belongs to a run with another {path.stem}: "
            f"{shown}{more}. {way_out}"
        )


def _differences(
    saved: Any, value: dict[str, Any], runtime_keys: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, saved value, new value) where they differ, in the order of the keys."""
    old = dict(_flatten(saved))
    new = dict(_flatten(json.loads(json.dumps(value))))  # tuples become lists, as in the file
    absent = dict.fromkeys(sorted(old.keys() | new.keys()), _ABSENT)
    old, new = absent | old, absent | new
    for key in absent:
        runtime = any(key == k or (k.endswith(".") and key.startswith(k)) for k in runtime_keys)
        if not runtime and not _equal(old[key], new[key]):
            yield key, _show(old[key]), _show(new[key])


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value); an empty section and a list are values."""
    if isinstance(value, dict) and (value or not prefix):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _equal(a: Any, b: Any) -> bool:
    """Equality in which 1 is 1.0 but not True, and NaN is NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return a == b or (a != a and b != b)


def _show(value: Any) -> str:
    return "(absent)" if value is _ABSENT else json.dumps(value)
