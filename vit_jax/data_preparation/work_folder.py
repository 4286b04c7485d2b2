"""The folder of a preparation that is not finished; prepare.py says what is in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files.atomic import UNFINISHED, write_atomically
from vit_jax.files.manifest import read_manifest


def check_finished(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether a set is prepared already; UserError if it was made by another plan."""
    if not folder.exists():
        return False
    manifest = read_manifest(folder)
    if manifest is None or manifest["note"].get("plan") != plan:
        raise UserError(
            f"{folder} is there already, made of something else or with other options; delete it, "
            "or give another --name or --data_dir."
        )
    shutil.rmtree(_incomplete(folder), ignore_errors=True)  # killed between renaming and cleaning
    logging.info("%s is prepared already; --check verifies it", folder)
    return True


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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"{work}: another process is at work there.") from None
        except OSError as error:  # not every file system has locks
            logging.warning("%s: cannot be locked (%s); prepare it once at a time", work, error)
        yield work
    # NFS keeps a deleted file that is open under another name, so the lock is closed before.
    shutil.rmtree(work, ignore_errors=True)


def begin(work: Path, plan: dict[str, Any]) -> None:
    """Removes what a kill left half-written, and writes the plan, or compares it with the old one.

    Raises:
      UserError: the folder was begun with another plan.
    """
    for stale in work.rglob(f"*{UNFINISHED}"):
        stale.unlink()
    path = work / "plan.json"
    begun = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if begun is None or not (work / "listing.npz").exists():
        write_atomically(path, json.dumps(plan))
        return
    for key, value in plan.items():
        if value != begun[key]:
            raise UserError(
                f"{work} was begun with {key}={begun[key]!r}, not {value!r}; give the same, or "
                "delete it to begin again."
            )
