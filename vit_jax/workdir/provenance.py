"""What a run was made with: code, packages, devices, command."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

from vit_jax.files.atomic import write_atomically
from vit_jax.files.paths import to_path

PROVENANCE_FILE = "provenance.jsonl"
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "opencv-python-headless",
    "numpy",
)


def collect_provenance() -> dict[str, Any]:
    """Commit, versions, devices, command line and time of this process."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changed = _git("status", "--porcelain")
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        # An image has no history: the Dockerfile leaves a note.
        "commit": _git("rev-parse", "HEAD") or os.environ.get("VIT_JAX_COMMIT"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "packages": versions,
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "host": platform.platform(),
    }


def _git(*args: str) -> str | None:
    """Its answer; None without a checkout, or without git on this machine."""
    command = ["git", "-C", os.path.dirname(__file__), *args]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
        return subprocess.check_output(command, **options).strip()
    return None


def first_start(workdir: str) -> float | None:
    """When a run began, in s since 1970; None for a new one, and where the file does not say."""
    path = to_path(workdir) / PROVENANCE_FILE
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        text = path.read_text() if path.exists() else ""
        return datetime.datetime.fromisoformat(json.loads(text.splitlines()[0])["time"]).timestamp()
    return None


def write_provenance(workdir: str, *, start_step: int) -> None:
    """Appends one line to `WORKDIR/provenance.jsonl` for this start of the run; process 0 only."""
    if jax.process_index() == 0:
        path = to_path(workdir) / PROVENANCE_FILE
        known = path.read_text() if path.exists() else ""
        line = json.dumps({"start_step": start_step, **collect_provenance()})
        write_atomically(path, f"{known}{line}\n")
