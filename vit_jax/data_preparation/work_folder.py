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

from vit_jax.checksums import read_manifest
from vit_jax.data_preparation.shards import UNFINISHED, write_atomically
from vit_jax.errors import UserError


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
        (work / "lock").touch()
    except OSError as error:
        raise UserError(f"{work}: cannot be written ({error.strerror}); see --data_dir.") from None
    with open(work / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{work}: another process is at work there.") from None
        for stale in list(work.rglob(f"*{UNFINISHED}")):
            if stale.is_dir():
                shutil.rmtree(stale)
            else:
                stale.unlink(missing_ok=True)
        yield work
        shutil.rmtree(work)


def begin(work: Path, plan: dict[str, Any]) -> None:
    """Writes the plan, or compares it with the one by which shards were begun."""
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
