"""Runs of a sweep as processes of this machine."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(processes):
        slots.put(slot)

    def run(name: str) -> str:
        slot, log = slots.get(), workdir / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        logging.info("Starting %s; its output goes to %s.", name, log)
        env = {**os.environ, **device_share(os.environ, slot, processes)}
        with open(log, "w") as file:
            status = subprocess.call(
                [*command, f"--only={name}"], stdout=file, stderr=subprocess.STDOUT, env=env
            )
        slots.put(slot)
        logging.info("%s ended with status %d.", name, status)
        text = log.read_text(errors="replace").strip() or "it printed nothing"
        return f"{text.splitlines()[-1][:300]} ({log})" if status else ""

    with ThreadPoolExecutor(processes) as pool:
        failures = zip(names, pool.map(run, names), strict=True)
        return {name: failure for name, failure in failures if failure}


def device_share(environ: Mapping[str, str], slot: int, processes: int) -> dict[str, str]:
    """This slot's part of CUDA_VISIBLE_DEVICES; nothing to change where there are too few."""
    devices = [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(devices) < processes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::processes])}
