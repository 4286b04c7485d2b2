"""A run that is disturbed at random, compared bit for bit with the same run left in peace.

The disturbances are real: processes are killed (also while they save), stopped, asked to end;
checkpoints on disk are damaged. After each, everything that is left of the run has to end by
itself; then the same command is given again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

_CONTINUES = re.compile(r"Resuming from the checkpoint of step (\d+)")
_STEP = re.compile(r"step (\d+)/\d+ ")
_GRACE_SECONDS = 300.0  # in which what is left of a disturbed run has to end
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_WEIGHTS = {"kill": 5, "kill while saving": 3, "stop": 2, "term": 2}


@dataclasses.dataclass
class Report:
    """What a disturbed run went through."""

    events: Counter[str] = dataclasses.field(default_factory=Counter)
    exit_codes: Counter[int] = dataclasses.field(default_factory=Counter)
    steps_lost: int = 0
    sessions: int = 0
    seconds: float = 0.0
    differing: list[str] = dataclasses.field(default_factory=list)
    unnamed: int = 0  # sessions that lost a process without naming it

    def lines(self) -> list[str]:
        return [
            f"sessions: {self.sessions}, in {self.seconds / 60:.1f} minutes",
            "disturbances: " + ", ".join(f"{n} x {name}" for name, n in self.events.most_common()),
            "exit codes of processes that were left: "
            + ", ".join(f"{n} x {code}" for code, n in self.exit_codes.most_common()),
            f"updates that had to be computed again: {self.steps_lost}",
            f"lost processes that the others did not name: {self.unnamed}",
            "final parameters: "
            + ("bit-identical" if not self.differing else f"DIFFER in {', '.join(self.differing)}"),
        ]


class Session:
    """All processes of a run, from start to end; as a context, they do not outlive it."""

    def __init__(self, command: list[str], folder: Path, num_processes: int, num_devices: int):
        folder.mkdir(parents=True)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{server.getsockname()[1]}"
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "PYTHONUNBUFFERED": "1",
            # Each session compiles the same programs.
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.logs = [folder / f"{i}.log" for i in range(num_processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            flags = [f"--coordinator_address={address}", f"--num_processes={num_processes}"]
            with open(log, "w") as file:
                process = subprocess.Popen(
                    [*command, *flags, f"--process_id={i}"],
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def output(self, process_id: int) -> str:
        return self.logs[process_id].read_text(errors="replace")

    def step(self) -> int:
        found = [int(s) for i in range(len(self.logs)) for s in _STEP.findall(self.output(i))]
        return max(found, default=0)

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self, seconds: float) -> None:
        """Until a process has ended, or so long."""
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.1)

    def exit_codes(self, without: int | None = None) -> list[int]:
        """Of all processes but one; -999 for those that do not end by themselves."""
        codes = []
        deadline = time.monotonic() + _GRACE_SECONDS
        for i, process in enumerate(self.processes):
            if i == without:
                continue
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                logging.error("process %d did not end:\n%s", i, self.output(i)[-2000:])
                codes.append(-999)
        return codes

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
    num_devices: int,
    seed: int,
    pause_seconds: tuple[float, float],
    damage_probability: float,
) -> Report:
    """Runs `command` twice, undisturbed and disturbed, and compares the parameters.

    Args:
      command: a training, without --workdir and the flags of several processes.
      folder: new; gets `undisturbed/` and `disturbed/`, and the logs of every session. One with a
        finished `undisturbed/` alone saves making that again; it has to be of the same command.
      num_processes: of both runs.
      num_devices: virtual CPU devices per process.
      seed: of the disturbances.
      pause_seconds: shortest and longest time from a start to the disturbance.
      damage_probability: how often the newest checkpoint is damaged between two sessions.

    Raises:
      UserError: `folder` is not empty, or the undisturbed run fails.
    """
    calm, disturbed = folder / "undisturbed", folder / "disturbed"
    is_there = (calm / "results.json").exists() and not disturbed.exists()
    if folder.exists() and any(folder.iterdir()) and not is_there:
        raise UserError(f"--workdir={folder} is not empty; chaos needs a folder of its own.")

    def start(workdir: Path, logs: str) -> Session:
        full = [*command, f"--workdir={workdir}"]
        return Session(full, folder / "logs" / logs, num_processes, num_devices)

    if not is_there:
        logging.info("The undisturbed run.")
        with start(calm, "undisturbed") as session:
            session.wait(math.inf)
            if any(session.exit_codes()):
                raise UserError(f"the undisturbed run failed; see {session.logs[0]}.")
    rng = random.Random(seed)
    report, begin, reached = Report(), time.monotonic(), 0
    while not (disturbed / "results.json").exists():
        report.sessions += 1
        with start(disturbed, f"{report.sessions:03}") as session:
            reached = _disturb(session, disturbed, rng, pause_seconds, report, reached)
        if set(report.exit_codes) - {0, REQUEUE_EXIT_CODE}:
            raise UserError(f"a session ended as it should not; see {session.logs[0].parent}.")
        if rng.random() < damage_probability:
            _damage(disturbed, rng, report)
    report.seconds = time.monotonic() - begin
    report.differing = _differing(calm, disturbed)
    # Not asdict, which takes the pairs of a Counter for things to count.
    (folder / "report.json").write_text(json.dumps(vars(report), indent=2) + "\n")
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
    session.wait(rng.uniform(*pause_seconds))
    if event == "kill while saving":
        deadline = time.monotonic() + pause_seconds[1]
        saving = workdir / "checkpoints"
        while session.is_running() and time.monotonic() < deadline:
            if any(saving.glob("*.orbax-checkpoint-tmp*")):
                break
            time.sleep(0.005)
        else:
            event = "kill"  # none was seen
    step, disturbed = session.step(), session.is_running()
    if disturbed:
        logging.info("Session %d: %s process %d at step %d.", report.sessions, event, victim, step)
        report.events[event] += 1
        session.processes[victim].send_signal(_SIGNALS[event.partition(" ")[0]])
    spares_victim = disturbed and event != "term"
    codes = session.exit_codes(victim if spares_victim else None)
    report.exit_codes.update(codes)
    started_at = [int(s) for s in _CONTINUES.findall(session.output(0))]
    if not started_at and not session.step():
        return reached  # it did not get that far
    report.steps_lost += max(0, reached - (started_at or [0])[0])
    if spares_victim and REQUEUE_EXIT_CODE in codes:
        others = [session.output(i) for i in range(len(session.logs)) if i != victim]
        report.unnamed += not all(f"process {victim} (" in output for output in others)
    return max(session.step(), step)


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


def _differing(one: Path, other: Path) -> list[str]:
    """Names of parameters whose bytes differ."""
    with np.load(one / "params.npz") as a, np.load(other / "params.npz") as b:
        if set(a) != set(b):
            return sorted(set(a) ^ set(b))
        return [name for name in a if a[name].tobytes() != b[name].tobytes()]


def train_command(config: str, *overrides: str) -> list[str]:
    """The command line of a training."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
    return [sys.executable, str(script), f"--config={config}", *overrides]
