"""What a run was made with: code, packages, devices, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

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


def _git(*args: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git on this machine
    return result.stdout.strip()


def collect_provenance() -> dict[str, Any]:
    """Commit, versions, devices, command line and time of this process."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
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


def write_provenance(workdir: str, *, start_step: int) -> None:
    """Appends one line to `WORKDIR/provenance.jsonl` for this start of the run; process 0 only."""
    if jax.process_index() == 0:
        with open(Path(workdir) / PROVENANCE_FILE, "a") as file:
            file.write(json.dumps({"start_step": start_step, **collect_provenance()}) + "\n")
