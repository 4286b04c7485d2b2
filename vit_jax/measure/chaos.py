"""A run that is disturbed at random, compared bit for bit with the same run left in peace.

The disturbances are real: processes are killed (also while they save), stopped, asked to end;
checkpoints on disk are damaged. After each, everything that is left of the run has to end by
itself; then the same command is given again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

_RESUMES = re.compile(r"Resuming from the checkpoint of step (\d+)")
_STEP = re.compile(r"step (\d+)/\d+ ")
_GRACE_SECONDS = 300.0  # in which what is left of a disturbed run has to end
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_WEIGHTS = {"kill": 5, "kill while saving": 3, "stop": 2, "term": 2}
_DAMAGE_PROBABILITY = 0.2  # of the newest checkpoint, between two sessions


@dataclasses.dataclass
class Report:
    """What a disturbed run went through."""

    events: Counter[str] = dataclasses.field(default_factory=Counter)
    sessions: int = 0
    steps_lost: int = 0
    differing: list[str] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        events = ", ".join(f"{n} x {name}" for name, n in self.events.most_common())
        differing = f"DIFFER in {', '.join(self.differing)}"
        return [
            f"sessions: {self.sessions}",
            f"disturbances: {events}",
            f"updates that had to be computed again: {self.steps_lost}",
            f"final parameters: {differing if self.differing else 'bit-identical'}",
        ]


class Session:
    """All processes of a run, from start to end; as a context, they do not outlive it."""

    def __init__(self, command: list[str], folder: Path, num_processes: int):
        folder.mkdir(parents=True)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{server.getsockname()[1]}"
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            # Each session compiles the same programs.
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        flags = [f"--coordinator_address={address}", f"--num_processes={num_processes}"]
        self.logs = [folder / f"{i}.log" for i in range(num_processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            with open(log, "w") as file:
                process = subprocess.Popen(
                    [*command, *flags, f"--process_id={i}"],
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def steps(self, pattern: re.Pattern[str] = _STEP) -> list[int]:
        """The steps that the logs tell of."""
        return [int(s) for log in self.logs for s in pattern.findall(log.read_text())]

    def wait(self, seconds: float, until: Path | None = None, glob: str = "") -> bool:
        """Until a process has ended, a file has appeared, or so long; whether all still run."""
        deadline = time.monotonic() + seconds
        while running := all(process.poll() is None for process in self.processes):
            if time.monotonic() > deadline or (until and any(until.glob(glob))):
                break
            time.sleep(0.005 if until else 0.1)
        return running

    def exit_codes(self, without: int | None = None) -> set[int]:
        """Of all processes but one, which have to end by themselves."""
        deadline = time.monotonic() + _GRACE_SECONDS
        left = [process for i, process in enumerate(self.processes) if i != without]
        return {process.wait(max(deadline - time.monotonic(), 0.1)) for process in left}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_chaos(
    command: list[str],
    folder: Path,
    *,
    num_processes: int,
    seed: int,
    pause_seconds: tuple[float, float],
) -> Report:
    """Runs `command` twice, undisturbed and disturbed, and compares the parameters.

    Args:
      command: a training, without --workdir and the flags of several processes.
      folder: new; gets `undisturbed/` and `disturbed/`, and the logs of every session.
      num_processes: of both runs.
      seed: of the disturbances.
      pause_seconds: shortest and longest time from a start to the disturbance.

    Raises:
      UserError: `folder` is not empty, or a session ends as it should not.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--workdir={folder} is not empty; chaos needs a folder of its own.")
    calm, disturbed, logs = folder / "undisturbed", folder / "disturbed", folder / "logs"
    logging.info("The undisturbed run.")
    with Session([*command, f"--workdir={calm}"], logs / "undisturbed", num_processes) as session:
        session.wait(math.inf)
        if any(session.exit_codes()):
            raise UserError(f"the undisturbed run failed; see {session.logs[0]}.")
    rng, report, reached = random.Random(seed), Report(), 0
    while not (disturbed / "results.json").exists():
        report.sessions += 1
        logs_of = logs / f"{report.sessions:03}"
        with Session([*command, f"--workdir={disturbed}"], logs_of, num_processes) as session:
            reached = _disturb(session, disturbed, rng, pause_seconds, report, reached)
        if rng.random() < _DAMAGE_PROBABILITY:
            _damage(disturbed, rng, report)
    with np.load(calm / "params.npz") as a, np.load(disturbed / "params.npz") as b:
        report.differing = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    return report


def _disturb(
    session: Session,
    workdir: Path,
    rng: random.Random,
    pause_seconds: tuple[float, float],
    report: Report,
    reached: int,
) -> int:
    """Disturbs a session once and waits for its end; returns the step that it got to."""
    event = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    victim = rng.randrange(len(session.processes))
    running = session.wait(rng.uniform(*pause_seconds))
    if event == "kill while saving":
        saving = workdir / "checkpoints"
        running = session.wait(pause_seconds[1], saving, "*.orbax-checkpoint-tmp*")
    if running:
        logging.info("Session %d: %s process %d.", report.sessions, event, victim)
        report.events[event] += 1
        session.processes[victim].send_signal(_SIGNALS[event.partition(" ")[0]])
    codes = session.exit_codes(victim if running and event != "term" else None)
    if codes - {0, REQUEUE_EXIT_CODE}:
        raise UserError(f"a session ended as it should not; see {session.logs[0].parent}.")
    steps, started = session.steps(), session.steps(_RESUMES)
    if steps or started:  # else it did not get that far
        report.steps_lost += max(0, reached - max(started, default=0))
    return max(steps, default=reached)


def _damage(workdir: Path, rng: random.Random, report: Report) -> None:
    """Damages the newest checkpoint, if there is another one before it."""
    folder = workdir / "checkpoints"
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal())
    if len(steps) < 2:
        return
    files = [p for p in (folder / str(steps[-1]) / "state").rglob("*") if p.is_file()]
    path = rng.choice([p for p in files if p.stat().st_size])
    content = bytearray(path.read_bytes())
    damage = rng.choice(["flip a byte", "truncate a file"])
    if damage == "flip a byte":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    path.write_bytes(content)
    report.events[damage] += 1
    logging.info("Damaged %s (%s).", path, damage)
