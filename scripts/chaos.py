"""Disturbs a run of several processes at random and checks that its result does not change.

    python scripts/chaos.py --workdir=/tmp/chaos --minutes=30

Four processes on this machine train a small ViT; every 20 to 60 seconds one of them is killed,
killed while saving, stopped or asked to end, and sometimes the newest checkpoint is damaged.
The rest of the run has to end by itself; then the same command is run again. The final
parameters have to be bit-identical to those of an undisturbed run, which is made first.
Prints the disturbances survived; status 1 if the parameters differ. Other flags go to train.py;
CONTRIBUTING.md says how to emulate a bucket whose requests fail.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vit_jax import ROOT, launch
from vit_jax.arguments import create_parser
from vit_jax.errors import REQUEUE_EXIT_CODE, UserError
from vit_jax.files.paths import COMMITTED, full_path, is_bucket, names_below, size_of
from vit_jax.workdir.description import PARAMS_FILE
from vit_jax.workdir.orbax_parts import steps_in

NUM_PROCESSES = 4
SETTINGS = (
    "--config.dataset.batch_size=64",
    "--config.log.every_steps=5",
    "--config.log.tensorboard=False",
    "--config.model.num_layers=2",  # most of the time goes to collectives, per array
    "--config.model.dropout_rate=0.1",
    "--config.processes.arrival_timeout_seconds=120",  # less than GRACE_SECONDS
    "--config.processes.heartbeat_timeout_seconds=10",
    "--config.processes.step_timeout_seconds=120",
)
EVENTS = ["kill"] * 5 + ["kill while saving"] * 3 + ["stop", "term"] * 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
PAUSE_SECONDS = 20.0, 60.0  # from a start to the disturbance
DAMAGE_PROBABILITY = 0.2  # of the newest checkpoint, between two sessions
GRACE_SECONDS = 300.0  # in which the rest of a disturbed run has to end
Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def session(command: list[str], logs: Path) -> Iterator[list[Process]]:
    """All processes of a run; they end with the context."""
    logs.mkdir(parents=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    flags = [f"--coordinator_address={address}", f"--num_processes={NUM_PROCESSES}"]
    processes: list[Process] = []
    try:
        for i in range(NUM_PROCESSES):
            full = [*command, *flags, f"--process_id={i}"]
            with open(logs / f"{i}.log", "w") as file:
                processes.append(
                    subprocess.Popen(full, stdout=file, stderr=file, start_new_session=True)
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_saving(checkpoints: Path) -> bool:
    """Whether a step is being saved."""
    if is_bucket(checkpoints):
        return any(not (step / COMMITTED).exists() for step in checkpoints.glob("[0-9]*"))
    return any(checkpoints.glob("*.orbax-checkpoint-tmp*"))


def disturb(processes: list[Process], checkpoints: Path, rng: random.Random) -> str:
    """Disturbs a run once and waits for its end; returns a description of the disturbance."""
    event, victim = rng.choice(EVENTS), rng.choice(processes)
    earliest = time.monotonic() + rng.uniform(*PAUSE_SECONDS)
    latest = earliest + PAUSE_SECONDS[1]  # if no saving is observed
    while running := all(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > latest or (now > earliest and ("saving" not in event or is_saving(checkpoints))):
            break
        time.sleep(0.005)
    if "saving" in event and not is_saving(checkpoints):
        event = "kill"
    if running:
        victim.send_signal(SIGNALS[event.partition(" ")[0]])
    else:
        event = "nothing"  # it has finished
    logging.info("%s, process %d.", event, processes.index(victim))
    others = [other for other in processes if other is not victim or event in ("term", "nothing")]
    try:
        codes = {process.wait(GRACE_SECONDS) for process in others}
    except subprocess.TimeoutExpired:
        message = f"after {event!r} a process was still running {GRACE_SECONDS:g} s later"
        raise UserError(f"{message}; see their logs.") from None
    aborted = {-signal.SIGABRT} if victim is processes[0] and "kill" in event else set()
    if codes - aborted - {0, REQUEUE_EXIT_CODE}:
        raise UserError(f"after {event!r} the processes ended with {codes}; see their logs.")
    return event


def damage(step: Path, rng: random.Random) -> None:
    """Flips a bit of a checkpoint."""
    files = [step / "state" / name for name in names_below(step / "state")]
    path = rng.choice([path for path in files if size_of(path)])
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def main():
    parser = create_parser(__doc__)
    parser.add_argument("--workdir", required=True, help="a new folder, also gs://BUCKET/FOLDER")
    parser.add_argument("--minutes", type=float, default=30.0, help="about, of the disturbed run")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    arguments, overrides = parser.parse_known_args()
    launch.start_logging()
    with launch.one_line_errors():
        # As with Ctrl-C, so that no training outlives this process.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = full_path(arguments.workdir)
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--workdir={folder} is not empty; choose a new folder.")
        logs = Path(tempfile.mkdtemp(prefix="chaos"))
        os.environ["JAX_PLATFORMS"] = "cpu"
        # All sessions compile the same programs.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{logs}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        num_steps = max(10, round(90 * arguments.minutes))  # on two cores, including restarts
        command = [
            sys.executable,
            f"{ROOT}/scripts/train.py",
            f"--config={ROOT}/configs/quickstart.py",
            f"--config.duration.steps={num_steps}",
            f"--config.checkpoint.every_steps={min(20, num_steps // 10)}",
            *SETTINGS,
            *overrides,
        ]
        logging.info("The undisturbed run; logs are in %s.", logs)
        calm, disturbed = folder / "undisturbed", folder / "disturbed"
        with session([*command, f"--workdir={calm}"], logs / "undisturbed") as processes:
            if any(process.wait() for process in processes):
                raise UserError(f"the undisturbed run failed; see {logs}.")
        rng, events = random.Random(arguments.seed), Counter[str]()
        while not (disturbed / "results.json").exists():
            number = f"{events.total():03}"
            with session([*command, f"--workdir={disturbed}"], logs / number) as processes:
                events[disturb(processes, disturbed / "checkpoints", rng)] += 1
            steps = steps_in(disturbed / "checkpoints")
            if rng.random() < DAMAGE_PROBABILITY and len(steps) > 1:
                damage(disturbed / "checkpoints" / str(steps[0]), rng)
                events["flip a bit"] += 1
        print("disturbances:", ", ".join(f"{n} x {name}" for name, n in events.most_common()))
        same = (calm / PARAMS_FILE).read_bytes() == (disturbed / PARAMS_FILE).read_bytes()
        print("final parameters:", "bit-identical" if same else "DIFFER")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
