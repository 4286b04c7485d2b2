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
                    log = workdir / f"{name}.log"
                    log.parent.mkdir(parents=True, exist_ok=True)
                    logging.info("Starting %s; its output goes to %s.", name, log)
                    with open(log, "w") as file:
                        process = subprocess.Popen(
                            [*command, f"--only={name}"],
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, **device_share(os.environ, slot, processes)},
                        )
                    running[slot] = name, process
            for slot, (name, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    logging.info("%s ended with status %d.", name, process.returncode)
                    if process.returncode:
                        log = workdir / f"{name}.log"
                        text = log.read_text(errors="replace").strip() or "it printed nothing"
                        failed[name] = f"{text.splitlines()[-1][:300]} ({log})"
            time.sleep(0.1)
    finally:
        for _, process in running.values():
            process.terminate()
    return failed


def device_share(environ: Mapping[str, str], slot: int, processes: int) -> dict[str, str]:
    """This slot's part of CUDA_VISIBLE_DEVICES; nothing to change where there are too few."""
    devices = [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(devices) < processes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::processes])}
