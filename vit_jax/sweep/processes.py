"""Runs of a sweep as processes of this machine."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_in_processes(
    names: Sequence[str], command: Sequence[str], workdir: Path, processes: int
) -> dict[str, str]:
    """Runs `command --only=NAME` for each name, so many at a time; all get their turn.

    What a process prints goes to `workdir/NAME.log`. The devices in CUDA_VISIBLE_DEVICES are
    dealt out to the processes, where there are enough of them.

    Returns:
      Those that failed: the last line of their output, and where the rest of it is.
    """
    waiting = list(names)
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    failed: dict[str, str] = {}
    try:
        while waiting or running:
            for slot in range(processes):
                if slot not in running and waiting:
                    name = waiting.pop(0)
                    running[slot] = (name, _start(name, command, workdir, slot, processes))
            for slot, (name, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    logging.info("%s ended with status %d.", name, process.returncode)
                    if process.returncode:
                        failed[name] = f"{_last_line(_log(name, workdir))} ({_log(name, workdir)})"
            time.sleep(0.1)
    finally:
        for _, process in running.values():
            process.terminate()
    return failed


def _start(
    name: str, command: Sequence[str], workdir: Path, slot: int, processes: int
) -> subprocess.Popen[bytes]:
    log = _log(name, workdir)
    log.parent.mkdir(parents=True, exist_ok=True)
    logging.info("Starting %s; its output goes to %s.", name, log)
    with open(log, "wb") as file:
        return subprocess.Popen(
            [*command, f"--only={name}"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **device_share(os.environ, slot, processes)},
        )


def device_share(environ: Mapping[str, str], slot: int, processes: int) -> dict[str, str]:
    """This slot's part of CUDA_VISIBLE_DEVICES; nothing to change where there are too few."""
    devices = [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(devices) < processes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::processes])}


def _log(name: str, workdir: Path) -> Path:
    return workdir / f"{name}.log"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
