"""Disturbs a run of several processes at random and checks that its result does not change.

    python scripts/chaos.py --workdir=/tmp/chaos --minutes=30
    python scripts/chaos.py --workdir=gs://BUCKET/chaos --minutes=30

Four processes of this machine train a small ViT; every 20 to 60 seconds one of them is killed,
killed while it saves, stopped or asked to end, and now and then the newest checkpoint is damaged.
All that is left of the run has to end by itself; then the same command is given again. The final
parameters have to be bit-identical to those of the same run left in peace, which is made first.
Prints the disturbances survived; status 1 if the parameters differ. Other flags go to train.py.
CONTRIBUTING.md says how to emulate a bucket whose requests fail.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import launch
from vit_jax.errors import UserError
from vit_jax.files.paths import COMMITTED, full_path, is_bucket, local_copy, names_below, size_of
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE
from vit_jax.workdir.orbax_parts import steps_in

STEPS_PER_MINUTE = 90  # of this model on two cores, restarts included
SETTINGS = (
    "--config.dataset.batch_size=64",
    "--config.log.every_steps=5",
    "--config.log.tensorboard=False",
    "--config.model.num_layers=2",  # most of the time goes into collectives, per array
    "--config.model.dropout_rate=0.1",
    "--config.processes.heartbeat_timeout_seconds=10",
    "--config.processes.step_timeout_seconds=120",
)


Process = subprocess.Popen[bytes]

_GRACE_SECONDS = 300.0  # in which what is left of a disturbed run has to end
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_WEIGHTS = {"kill": 5, "kill while saving": 3, "stop": 2, "term": 2}
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


def _is_saving(checkpoints: Path) -> bool:
    """Whether a step is being written."""
    if is_bucket(checkpoints):
        return any(not (step / COMMITTED).exists() for step in checkpoints.glob("[0-9]*"))
    return any(checkpoints.glob("*.orbax-checkpoint-tmp*"))


def _wait(processes: list[Process], seconds: float, saving: Path | None = None) -> bool:
    """Until a process has ended, a checkpoint is written, or so long; whether all still run."""
    deadline = time.monotonic() + seconds
    while running := all(process.poll() is None for process in processes):
        if time.monotonic() > deadline or (saving and _is_saving(saving)):
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
    logs: Path,
    *,
    num_processes: int,
    seed: int,
    pause_seconds: tuple[float, float],
) -> tuple[Counter[str], list[str]]:
    """Runs `command` twice, undisturbed and disturbed, and compares the parameters.

    Args:
      command: a training, without --workdir and the flags of several processes.
      folder: new; gets `undisturbed/` and `disturbed/`. May be in a bucket.
      logs: gets those of every session.
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
    calm, disturbed = folder / "undisturbed", folder / "disturbed"
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
    with local_copy(calm / "params.npz") as first, local_copy(disturbed / "params.npz") as second:
        a, b = np.load(first), np.load(second)
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
        event = event if _is_saving(checkpoints) else "kill"  # none was seen
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
    steps = steps_in(checkpoints)
    if len(steps) < 2:
        return "nothing"
    folder = checkpoints / str(steps[0]) / "state"
    files = [folder / name for name in names_below(folder)]
    path = rng.choice([path for path in files if size_of(path)])
    content = bytearray(path.read_bytes())
    damage, position = rng.choice(["flip a bit", "truncate a file"]), rng.randrange(len(content))
    if damage == "flip a bit":
        content[position] ^= 1 << rng.randrange(8)
    else:
        del content[position:]
    path.write_bytes(content)
    logging.info("%s of %s.", damage, path)
    return damage


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="a new folder, also gs://BUCKET/FOLDER")
    parser.add_argument("--logs", default="", help="a new folder; default: WORKDIR/logs")
    parser.add_argument("--minutes", type=float, default=30.0, help="about, of the disturbed run")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 60.0), metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    launch.start_logging()
    if not arguments.logs and is_bucket(arguments.workdir):
        parser.error("--logs=FOLDER is missing; it cannot be in a bucket")
    with launch.one_line_errors():
        # As at Ctrl-C, so that no training outlives this.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        steps = max(10, round(STEPS_PER_MINUTE * arguments.minutes))
        command = [
            sys.executable,
            f"{launch.ROOT}/scripts/train.py",
            f"--config={launch.ROOT}/configs/quickstart.py",
            f"--config.duration.steps={steps}",
            f"--config.checkpoint.every_steps={min(20, steps // 10)}",
            *SETTINGS,
            *overrides,
        ]
        events, differing = run_chaos(
            command,
            full_path(arguments.workdir),
            Path(arguments.logs or f"{arguments.workdir}/logs").absolute(),
            num_processes=arguments.processes,
            seed=arguments.seed,
            pause_seconds=tuple(arguments.pause),
        )
        print("disturbances:", ", ".join(f"{n} x {name}" for name, n in events.most_common()))
        names = ", ".join(differing)
        print("final parameters:", f"DIFFER in {names}" if differing else "bit-identical")
        sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
