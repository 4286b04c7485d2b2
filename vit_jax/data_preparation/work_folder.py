"""The folder of a preparation that is not finished; prepare.py says what is in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vit_jax.errors import UserError
from vit_jax.files.manifest import UNFINISHED, read_manifest, write_atomically


def there_already(folder: Path, plan: dict[str, Any]) -> Path:
    manifest = read_manifest(folder)
    if manifest is None or manifest["note"].get("plan") != plan:
        raise UserError(
            f"{folder} is there already, made of something else or with other options; delete it, "
            "or give another --name or --data_dir."
        )
    shutil.rmtree(_incomplete(folder), ignore_errors=True)  # killed between renaming and cleaning
    logging.info("%s is prepared already; --check verifies it", folder)
    return folder


def _incomplete(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.incomplete")


@contextlib.contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """The folder of an unfinished preparation, for this process alone; removed at the end."""
    work = _incomplete(folder)
    try:
        for each in ("receipts", "prepared"):
            (work / each).mkdir(parents=True, exist_ok=True)
        # NFS locks only what is open for writing.
        lock = open(work / "lock", "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"{work}: cannot be written ({error.strerror}); see --data_dir.") from None
    with lock:
        _lock(lock, work)
        yield work
    # NFS keeps a deleted file that is open under another name, so the lock is closed before.
    shutil.rmtree(work, ignore_errors=True)
    if work.exists():
        logging.warning("%s cannot be deleted; it is of no use any more", work)


def _lock(lock: IO[str], work: Path) -> None:
    """Until the file is closed; UserError if another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"{work}: another process is at work there.") from None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UserError(f"{work}: cannot be locked ({error.strerror}).") from None
        logging.warning("%s: this file system has no locks; prepare a set once at a time", work)


def begin(work: Path, plan: dict[str, Any]) -> None:
    """Removes halves, and writes the plan or compares it with the one that shards were begun by."""
    for stale in list(work.rglob(f"*{UNFINISHED}")):
        if stale.is_dir():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)
    path = work / "plan.json"
    begun = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if begun == plan:
        return
    if begun is None or not (work / "listing").exists():
        shutil.rmtree(work / "unpacked", ignore_errors=True)
        write_atomically(path, json.dumps(plan))
        return
    for key in plan:
        if plan[key] == begun[key]:
            continue
        if key == "source_fingerprint":
            raise UserError(
                f"{plan['source']}: changed since its preparation began; delete {work} to begin "
                "again."
            )
        raise UserError(
            f"{work} was begun with {key}={begun[key]!r}, not {plan[key]!r}; give the same, or "
            "delete it to begin again."
        )
