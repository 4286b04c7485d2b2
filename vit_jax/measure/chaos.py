"""A run that is disturbed at random, compared bit for bit with the same run left in peace.

The disturbances are real: processes are killed (also while they save), stopped, asked to end;
checkpoints on disk are damaged. After each, everything that is left of the run has to end by
itself; then the same command is given again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

Process = subprocess.Popen[bytes]

_GRACE_SECONDS = 300.0  # in which what is left of a disturbed run has to end
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_WEIGHTS = {"kill": 5, "kill while saving": 3, "stop": 2, "term": 2}
_SAVING = "*.orbax-checkpoint-tmp*"  # in the folder of checkpoints
_DAMAGE_PROBABILITY = 0.2  # of the newest checkpoint, between two sessions


@contextlib.contextmanager
def _session(command: list[str], logs: Path, num_processes: int) -> Iterator[list[Process]]:
    """All processes of a run, which do not outlive the context."""
    logs.mkdir(parents=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        # Each session compiles the same programs.
        "JAX_COMPILATION_CACHE_DIR": str(logs.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    flags = [f"--coordinator_address={address}", f"--num_processes={num_processes}"]
    processes: list[Process] = []
    try:
        for i in range(num_processes):
            full = [*command, *flags, f"--process_id={i}"]
            with open(logs / f"{i}.log", "w") as file:
                options: Any = {"stdout": file, "stderr": subprocess.STDOUT, "env": env}
                processes.append(subprocess.Popen(full, start_new_session=True, **options))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(processes: list[Process], seconds: float, saving: Path | None = None) -> bool:
    """Until a process has ended, a checkpoint is written, or so long; whether all still run."""
    deadline = time.monotonic() + seconds
    while running := all(process.poll() is None for process in processes):
        if time.monotonic() > deadline or (saving and any(saving.glob(_SAVING))):
            break
        time.sleep(0.005 if saving else 0.1)
    return running


def _exit_codes(processes: list[Process]) -> set[int]:
    """Of processes that have to end by themselves."""
    deadline = time.monotonic() + _GRACE_SECONDS
    return {process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes}


def run_chaos(
    command: list[str],
    folder: Path,
    *,
    num_processes: int,
    seed: int,
    pause_seconds: tuple[float, float],
) -> tuple[Counter[str], list[str]]:
    """Runs `command` twice, undisturbed and disturbed, and compares the parameters.

    Args:
      command: a training, without --workdir and the flags of several processes.
      folder: new; gets `undisturbed/` and `disturbed/`, and the logs of every session.
      num_processes: of both runs.
      seed: of the disturbances.
      pause_seconds: shortest and longest time from a start to the disturbance.

    Returns:
      How often each disturbance happened, and the names of the parameters whose bytes differ.

    Raises:
      UserError: `folder` is not empty, or a session ends as it should not.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--workdir={folder} is not empty; chaos needs a folder of its own.")
    calm, disturbed, logs = folder / "undisturbed", folder / "disturbed", folder / "logs"
    logging.info("The undisturbed run.")
    with _session([*command, f"--workdir={calm}"], logs / "undisturbed", num_processes) as calmly:
        _wait(calmly, math.inf)
        if any(_exit_codes(calmly)):
            raise UserError(f"the undisturbed run failed; see {logs}.")
    rng, events = random.Random(seed), Counter[str]()
    while not (disturbed / "results.json").exists():
        full, number = [*command, f"--workdir={disturbed}"], f"{events.total():03}"
        with _session(full, logs / number, num_processes) as session:
            events[_disturb(session, disturbed / "checkpoints", rng, pause_seconds)] += 1
        if rng.random() < _DAMAGE_PROBABILITY:
            events[_damage(disturbed / "checkpoints", rng)] += 1
    with np.load(calm / "params.npz") as a, np.load(disturbed / "params.npz") as b:
        return events, [name for name in a if a[name].tobytes() != b[name].tobytes()]


def _disturb(
    session: list[Process], checkpoints: Path, rng: random.Random, pause: tuple[float, float]
) -> str:
    """Disturbs a session once and waits for its end; returns what was done to it."""
    event = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    victim = rng.randrange(len(session))
    running = _wait(session, rng.uniform(*pause))
    if event == "kill while saving":
        running = _wait(session, pause[1], checkpoints)
        event = event if any(checkpoints.glob(_SAVING)) else "kill"  # none was seen
    event = event if running else "nothing"  # it has come to its end
    logging.info("%s, process %d.", event, victim)
    if running:
        session[victim].send_signal(_SIGNALS[event.partition(" ")[0]])
    spared = event in ("term", "nothing")
    codes = _exit_codes([each for i, each in enumerate(session) if spared or i != victim])
    if codes - {0, REQUEUE_EXIT_CODE}:
        raise UserError(f"after {event!r} the processes ended with {codes}; see their logs.")
    return event


def _damage(checkpoints: Path, rng: random.Random) -> str:
    """Damages the newest checkpoint, if there is another one before it; returns how."""
    steps = sorted(int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal())
    if len(steps) < 2:
        return "nothing"
    files = [p for p in (checkpoints / str(steps[-1]) / "state").rglob("*") if p.is_file()]
    path = rng.choice([p for p in files if p.stat().st_size])
    content = bytearray(path.read_bytes())
    damage, position = rng.choice(["flip a bit", "truncate a file"]), rng.randrange(len(content))
    if damage == "flip a bit":
        content[position] ^= 1 << rng.randrange(8)
    else:
        del content[position:]
    path.write_bytes(content)
    logging.info("%s of %s.", damage, path)
    return damage
